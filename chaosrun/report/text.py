"""A run on a terminal: tables first, as the end is what stays visible. Also plans, runs, and losses of several runs."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chaosrun.errors import InterruptedRunError
from chaosrun.report.page import columns, indented, labelled, pairs, section, unwrapped
from chaosrun.report.view import OUTCOME_WORDS, RunView
from chaosrun.wording import count, span

if TYPE_CHECKING:
    from chaosrun.faults.fault import FaultPlan
    from chaosrun.records.run_file import RunSummary
    from chaosrun.spec.model import JobSpec
    from chaosrun.verify.trajectory import ComparedRun, LossDifference, TrajectoryComparison

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
MOST_CHECKS = 5
CHECK_STYLES = {"fail": "bold red", "inconclusive": "bold yellow", "pass": "green", "skip": "dim"}


def render_text(view: RunView, *, whole: bool = False) -> RenderableType:
    """A PASS in five lines; else the first difference, whose fault it is and what to type. `whole`: with all tables."""
    verdict = view.verdict
    cached = "" if view.facts.reference_source is None else f"; reference taken from {view.facts.reference_from}"
    parts: list[RenderableType] = [unwrapped(f"run {view.run.run_id}  {view.facts.sentence}{cached}".rstrip(), style="bold")]
    if whole:
        parts += [*_tables(view), ""]
    if view.attempts:
        parts.append(labelled("faults", view.faults_sentence))
    parts += [labelled("", f"{fault.id} {fault.seen}") for fault in view.faults if view.attempts and not fault.landed]
    told = verdict.headline if view.divergence and view.decided else verdict.cause
    parts.append(labelled(view.status, f"{view.why}: {told}" if view.why else told, style=STYLES[view.status]))
    if view.divergence:
        parts += [*section("First divergence", pairs(view.divergence, bold="cause")), ""]
    if view.fatal is not None and view.fatal.traceback:
        # Indented by hand: Padding cuts lines off at the page's width, and half a path is useless.
        parts += [*section(view.fatal.title, None), unwrapped(indent(view.fatal.traceback.rstrip(), "  ")), ""]
    if view.status != "PASS":
        parts.append(labelled("blame", verdict.blame.sentence))
    if verdict.hint:
        parts.append(labelled("hint", verdict.hint))
    parts += _open_checks(view)
    parts += [labelled("warning", sentence) for sentence in (*verdict.warnings, *view.damage)]
    if view.page is not None:
        parts.append(labelled("report", view.page, wrap=False))
    if view.files is not None:
        parts.append(labelled("files", view.files, wrap=False))
    for command in view.commands:
        if view.status == "PASS" and command.label == "inspect":
            continue
        parts.append(labelled(command.label, command.line, wrap=False))
        if command.note:
            parts.append(unwrapped(f"{'':<8}  ({command.note})"))
    return Group(*parts)


def render_line(view: RunView) -> RenderableType:
    return unwrapped(f"{view.status_words}  {view.run.run_id}: {view.verdict.cause}")


def _tables(view: RunView) -> list[RenderableType]:
    parts: list[RenderableType] = []
    if view.attempts:
        parts += section(f"Faults: {view.faults_title}", _faults(view) if view.faults else None)
        parts += section(f"Attempts: {view.attempts_title}", _attempts(view))
    if view.decided:
        parts += section(f"Checks: {view.checks_title}", _checks(view))
    return parts


def _open_checks(view: RunView) -> list[RenderableType]:
    """Open checks that the first divergence does not explain; its consequences in one line."""
    told = [f"{check.name}: {check.summary}" for check in view.further_checks]
    if len(told) > MOST_CHECKS:
        told[MOST_CHECKS:] = [f"and {count(len(told) - MOST_CHECKS, 'further check')}; -v names them"]
    if view.following:
        told.append(f"{view.following} (-v names them)")
    return [labelled("" if number else "checks", sentence) for number, sentence in enumerate(told)]


def _faults(view: RunView) -> Table:
    table = columns("fault", "what", "where", "evidence")
    for fault in view.faults:
        table.add_row(
            fault.id, fault.description, fault.where or "-", Text(fault.seen, style="" if fault.landed else "bold yellow")
        )
    return table


def _attempts(view: RunView) -> Table:
    table = columns("#", "resumed from", "steps", "ended by", "lost", "recovery", right=("#", "lost", "recovery"))
    for row in view.attempts:
        table.add_row(str(row.number), row.resumed_from, row.steps, row.ended_by_id, row.lost, row.recovery)
    return table


def _checks(view: RunView) -> Table:
    table = columns("", "", "")
    table.show_header = False
    for check in view.checks:
        table.add_row(Text(check.status, style=CHECK_STYLES[check.status]), check.name, check.summary)
    # To be searched for, however narrow the terminal: what was found has the rest of the width, and is not cut off.
    table.columns[0].no_wrap = table.columns[1].no_wrap = True
    return table


def render_plan(spec: "JobSpec", plan: "FaultPlan") -> RenderableType:
    head = unwrapped(job_sentence(spec, plan))
    if not plan.faults:
        return head
    table = columns("fault", "what", "from")
    for fault in plan.faults:
        table.add_row(fault.id, fault.describe(), fault.source)
    return Group(head, "", indented(table))


def job_sentence(spec: "JobSpec", plan: "FaultPlan") -> str:
    steps = "" if spec.max_steps is None else f", {count(spec.max_steps, 'step')}"
    none = "no faults" if spec.by == "chaosrun" else "the default plan, made after the reference run"
    faults = f"{count(len(plan.faults), 'fault')} (seed {plan.seed})" if plan.faults else none
    saves = f"a checkpoint every {count(spec.checkpoint.every_steps, 'step')}"
    if spec.by == "script":
        saves = "its own checkpoints"
    return f"{spec.name}: {count(spec.workers, 'worker')}{steps}, {saves}, {faults}"


def render_runs(runs: "Sequence[RunSummary]", *, root: Path, now_s: float) -> RenderableType:
    if not runs:
        return Text(f"no runs under {root}")
    table = columns("run", "job", "status", "age")
    for run in runs:
        age = span(max(0.0, now_s - run.created_s))
        status = Text(run.status, style=STYLES.get(run.status, ""))
        table.add_row(run.run_id, run.name, status.append(_why(run), style=""), age)
    # To be copied, however narrow the terminal; rich makes wider columns of these than fit.
    table.columns[0].min_width = max(len(run.run_id) for run in runs)
    table.columns[2].min_width = max(len(run.status) for run in runs)
    return table


def _why(run: "RunSummary") -> str:
    """Which kind of INCONCLUSIVE it is; empty where the status is enough."""
    if run.status == "interrupted" and run.exit_code not in (None, InterruptedRunError.exit_code):
        return f": exit {run.exit_code}"
    words = next((words for outcome, words in OUTCOME_WORDS.items() if outcome == run.outcome), None)
    if run.status != "INCONCLUSIVE" or words is None:
        return ""
    return f": {words}" + ("" if run.exit_code is None else f" (exit {run.exit_code})")


_LEGS = {"reference": "without faults", "chaos": "under faults"}


def render_comparison(found: "TrajectoryComparison") -> RenderableType:
    first, others = found.runs[0], found.runs[1:]
    parts = section(f"Losses {_LEGS[found.leg]}, beside those of {first.run_id}", _compared(found.runs))[1:]
    if any(run.changes for run in found.runs):
        parts += section("Changes to the job file", None)
        # On one line however long, to be distinguished and copied.
        parts += [unwrapped(f"  {run.run_id}  {' '.join(run.changes)}".rstrip()) for run in found.runs]
    far = [run for run in others if not run.difference.within]
    if far:
        verdict = Text(f"BEYOND    {len(far)} of {count(len(others), 'run')} by more than {found.atol:g}", style="bold red")
    else:
        verdict = Text(f"WITHIN    {found.atol:g} at every step: {count(len(others), 'run')}", style="bold green")
    return Group(*parts, "", verdict)


def _compared(runs: "Sequence[ComparedRun]") -> Table:
    table = columns("run", "workers", "steps", "largest", "mean", "first beyond", right=("workers", "steps", "largest", "mean"))
    table.columns[0].no_wrap = True
    for number, run in enumerate(runs):
        found = run.difference
        distances = ("-", "-", "the first") if number == 0 else (f"{found.largest:.3g}", f"{found.mean:.3g}", _beyond(found))
        table.add_row(run.run_id, str(run.workers), str(found.lengths[1]), *distances)
    return table


def _beyond(found: "LossDifference") -> str:
    if found.first_beyond is None:
        return "never"
    if found.first_beyond > found.steps:
        return f"step {found.first_beyond}: missing"
    return f"step {found.first_beyond}: {found.seen:.7g}, not {found.expected:.7g}"
