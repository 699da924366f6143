"""A run for a terminal: faults, attempts, checks, the first divergence, the verdict, and what to type next; also plans, runs
and the losses of several runs beside each other.

The verdict comes last, because that is where a terminal stops.
"""

from collections.abc import Sequence
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
    from chaosrun.verify.trajectory import ComparedRun, Comparison, Difference

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
CHECK_STYLES = {"fail": "bold red", "inconclusive": "bold yellow", "pass": "green", "skip": "dim"}


def render_text(view: RunView) -> RenderableType:
    verdict = view.verdict
    parts: list[RenderableType] = [unwrapped(f"run {view.run.run_id}  {view.facts.sentence}".rstrip(), style="bold")]
    if view.facts.reference_source is not None:
        parts.append(Text("reference taken from the cache"))
    if view.attempts:
        parts += section(f"Faults: {view.faults_title}", _faults(view) if view.faults else None)
        parts += section(f"Attempts: {view.attempts_title}", _attempts(view))
    if view.decided:
        parts += section(f"Checks: {view.checks_title}", _checks(view))
    if view.divergence:
        parts += section("First divergence", pairs(view.divergence, bold="cause"))
    if view.fatal is not None and view.fatal.traceback:
        # Indented by hand: Padding cuts lines off at the page's width, and half a path is of no use.
        parts += section(view.fatal.title, None)
        parts.append(unwrapped(indent(view.fatal.traceback.rstrip(), "  ")))
    cause = f"{view.why}: {verdict.cause}" if view.why else verdict.cause
    parts += ["", labelled(view.status, cause, style=STYLES[view.status])]
    if view.status != "PASS":
        parts.append(labelled("blame", view.blame.sentence))
    parts += [labelled("warning", sentence) for sentence in (*verdict.warnings, *view.damage)]
    if view.advice:
        parts.append(labelled("hint", view.advice))
    for command in view.commands:
        parts.append(labelled(command.label, command.line, wrap=False))
        if command.note:
            parts.append(unwrapped(f"{'':<8}  ({command.note})"))
    if view.page is not None:
        parts.append(labelled("report", view.page, wrap=False))
    return Group(*parts)


def _faults(view: RunView) -> Table:
    table = columns("fault", "what", "where", "evidence")
    for fault in view.faults:
        table.add_row(fault.id, fault.what, fault.where or "-", Text(fault.seen, style="" if fault.landed else "bold yellow"))
    return table


def _attempts(view: RunView) -> Table:
    table = columns("#", "went on from", "steps", "ended by", "lost", "recovery", right=("#", "lost", "recovery"))
    for row in view.attempts:
        table.add_row(str(row.number), row.resumed_from, row.steps, row.ended_by_id, row.lost, row.recovery)
    return table


def _checks(view: RunView) -> Table:
    table = columns("", "", "")
    table.show_header = False
    for check in view.checks:
        table.add_row(Text(check.status, style=CHECK_STYLES[check.status]), check.name, check.summary)
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
    none = "no faults" if spec.by == "chaosrun" else "the default plan, made when the undisturbed run is there"
    faults = f"{count(len(plan.faults), 'fault')} (seed {plan.seed})" if plan.faults else none
    saves = f"a checkpoint every {count(spec.checkpoint.every_steps, 'step')}"
    if spec.by == "script":
        saves = "its own checkpoints"
    return f"{spec.name}: {count(spec.workers, 'worker')}{steps}, {saves}, {faults}"


def render_runs(runs: "Sequence[RunSummary]", *, now_s: float) -> RenderableType:
    if not runs:
        return Text("no runs yet")
    table = columns("run", "job", "status", "age")
    for run in runs:
        age = span(max(0.0, now_s - run.created_s))
        status = Text(run.status, style=STYLES.get(run.status, ""))
        table.add_row(run.run_id, run.name, status.append(_why(run), style=""), age)
    return table


def _why(run: "RunSummary") -> str:
    """What tells one INCONCLUSIVE from another; empty where the status says it all."""
    if run.status == "interrupted" and run.exit_code not in (None, InterruptedRunError.exit_code):
        return f": exit {run.exit_code}"
    words = next((words for outcome, words in OUTCOME_WORDS.items() if outcome == run.outcome), None)
    if run.status != "INCONCLUSIVE" or words is None:
        return ""
    return f": {words}" + ("" if run.exit_code is None else f" (exit {run.exit_code})")


_LEGS = {"reference": "undisturbed", "chaos": "under faults"}


def render_comparison(found: "Comparison") -> RenderableType:
    first, others = found.runs[0], found.runs[1:]
    parts = section(f"Losses {_LEGS[found.leg]}, beside those of {first.run_id}", _compared(found.runs))[1:]
    if any(run.changes for run in found.runs):
        parts += section("Changes to the job file", None)
        # On one line however long, to be told apart and copied.
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


def _beyond(found: "Difference") -> str:
    if found.first_beyond is None:
        return "never"
    if found.first_beyond > found.steps:
        return f"step {found.first_beyond}: missing"
    return f"step {found.first_beyond}: {found.seen:.7g}, not {found.expected:.7g}"
