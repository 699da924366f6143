"""The account of a drill for people: faults, attempts, checks, the first divergence, the verdict, and what to type next.

Renders values that others decided. The verdict comes last, because that is where a terminal stops.
"""

import re
import shlex
from collections.abc import Sequence
from textwrap import indent
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from chaosrun.errors import InterruptedRunError
from chaosrun.records.journal import CONCLUSIVE
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import shortest
from chaosrun.report.facts import RunFacts, read_facts
from chaosrun.report.next_commands import next_commands, repeat_note
from chaosrun.report.outcomes import OUTCOME_WORDS, undecided_by
from chaosrun.report.page import columns, indented, labelled, section, shown, unwrapped
from chaosrun.report.progress import ENDED_BY_DEATH, UnplannedDeath, read_progress
from chaosrun.wording import count, span

if TYPE_CHECKING:
    from chaosrun.faults.fault import FaultPlan
    from chaosrun.records.runs import RunSummary
    from chaosrun.spec.model import JobSpec
    from chaosrun.verify.account import AttemptSummary, FaultOutcome
    from chaosrun.verify.check import Check
    from chaosrun.verify.divergence import Divergence
    from chaosrun.verify.verdict import Verdict

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
CHECK_STYLES = {"fail": "bold red", "inconclusive": "bold yellow", "pass": "green", "skip": "dim"}
"""In the order of interest."""


def render_verdict(verdict: "Verdict", run: RunLayout) -> RenderableType:
    from chaosrun.verify.blame import blame

    facts = read_facts(run)
    parts: list[RenderableType] = [unwrapped(f"run {run.run_id}  {facts.sentence}".rstrip(), style="bold")]
    if facts.reference_source is not None:
        parts.append(Text("reference taken from the cache"))
    if verdict.attempts:
        parts += section(f"Faults: {_faults_sentence(verdict, facts)}", _faults(verdict))
        parts += section(f"Attempts: {_attempts_sentence(verdict)}", _attempts(verdict))
    if verdict.outcome in CONCLUSIVE:
        parts += section(f"Checks: {_checks_sentence(verdict.checks)}", _checks(verdict.checks))
    if verdict.divergence is not None:
        parts += section("First divergence", _divergence(verdict.divergence))
    death = fatal_death(verdict, run)
    if death is not None and death.traceback:
        who = "the attempt" if death.rank is None else f"rank {death.rank}"
        # Indented by hand: Padding cuts lines off at the page's width, and half a path is of no use.
        parts += section(f"Traceback of {who}, attempt {death.attempt}", None)
        parts.append(unwrapped(indent(death.traceback.rstrip(), "  ")))
    why = undecided_by(verdict)
    parts += ["", labelled(verdict.status, f"{why}: {verdict.cause}" if why else verdict.cause, style=STYLES[verdict.status])]
    if verdict.status != "PASS":
        parts.append(labelled("blame", blame(verdict).sentence))
    parts += [labelled("warning", sentence) for sentence in verdict.warnings]
    if verdict.hint and (verdict.divergence is None or verdict.hint != verdict.divergence.hint):
        parts.append(labelled("hint", verdict.hint))
    commands = next_commands(verdict, run, facts)
    for label, command in commands:
        parts.append(labelled(label, shlex.join(command), wrap=False))
        if label == "repeat" and (note := repeat_note(run, facts)):
            parts.append(unwrapped(f"{'':<8}  ({note})"))
    if run.report_html.is_file():
        parts.append(labelled("report", shortest(run.report_html.absolute()), wrap=False))
    return Group(*parts)


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
    faults = f"{count(len(plan.faults), 'fault')} (seed {plan.seed})" if plan.faults else "no faults"
    every = count(spec.checkpoint.every_steps, "step")
    return f"{spec.name}: {count(spec.workers, 'worker')}{steps}, a checkpoint every {every}, {faults}"


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


def _faults_sentence(verdict: "Verdict", facts: RunFacts) -> str:
    landed = sum(fault.landed for fault in verdict.faults)
    return f"{landed} of {len(verdict.faults)} landed{facts.whose}" if verdict.faults else "none planned"


def _faults(verdict: "Verdict") -> RenderableType | None:
    if not verdict.faults:
        return None
    table = columns("fault", "what", "where", "evidence")
    for fault in verdict.faults:
        table.add_row(fault.id, fault.description, _where(fault), _evidence(fault))
    return table


def _where(fault: "FaultOutcome") -> str:
    if fault.attempt is None:
        return "-"
    return f"attempt {fault.attempt}" + ("" if fault.step is None else f", step {fault.step}")


def _evidence(fault: "FaultOutcome") -> Text:
    if not fault.landed:
        return Text(f"NOT SHOWN: {fault.problem}", style="bold yellow")
    return Text(fault.evidence or "landed")


def _attempts_sentence(verdict: "Verdict") -> str:
    times_s = sorted(attempt.recovery_s for attempt in verdict.attempts if attempt.recovery_s is not None)
    parts = [str(len(verdict.attempts)), f"{count(verdict.lost_steps, 'step')} lost and done again"]
    if times_s:
        parts.append(f"recovery {' to '.join(dict.fromkeys((span(times_s[0]), span(times_s[-1]))))}")
    return ", ".join(parts)


def _attempts(verdict: "Verdict") -> RenderableType:
    faults = {fault.id for fault in verdict.faults}
    table = columns("#", "went on from", "steps", "ended by", "lost", "recovery", right=("#", "lost", "recovery"))
    for attempt in verdict.attempts:
        table.add_row(
            str(attempt.attempt),
            attempt.resumed_from or "the beginning",
            "none" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}",
            ended_by(attempt, faults),
            str(attempt.lost_steps) if attempt.lost_steps else "-",
            "-" if attempt.recovery_s is None else span(attempt.recovery_s),
        )
    return table


def ended_by(attempt: "AttemptSummary", faults: set[str]) -> str:
    """Planned faults by their ids alone: the table above says what they are."""
    named = [name for name in re.findall(r"(?:^|, )([^ ,()]+) \(", attempt.ended_by) if name in faults]
    if not named:
        return attempt.ended_by.replace("_", " ")
    return f"fault {named[0]}" if len(named) == 1 else f"faults {', '.join(named)}"


def _checks_sentence(checks: "Sequence[Check]") -> str:
    words = {"fail": "failed", "inconclusive": "inconclusive", "pass": "passed", "skip": "skipped"}
    counted = {status: sum(check.status == status for check in checks) for status in words}
    return ", ".join(f"{counted[status]} {word}" for status, word in words.items() if counted[status])


def _checks(checks: "Sequence[Check]") -> RenderableType:
    table = columns("", "", "")
    table.show_header = False
    order = list(CHECK_STYLES)
    for check in sorted(checks, key=lambda check: order.index(check.status)):
        table.add_row(Text(check.status, style=CHECK_STYLES[check.status]), check.name, check.summary)
    return table


def _divergence(found: "Divergence") -> RenderableType:
    ranks = f"rank {found.rank}" if len(found.ranks) <= 1 else f"ranks {', '.join(map(str, found.ranks))}"
    micro = "" if found.micro_batch is None else f", micro-batch {found.micro_batch}"
    table = columns("", "")
    table.show_header = False
    table.add_row("where", f"step {found.step}, {ranks}, attempt {found.attempt}{micro}")
    table.add_row("kind", found.kind)
    if found.tensor is not None:
        table.add_row("tensor", found.tensor)
    if (found.expected, found.seen) != (None, None):
        table.add_row("expected", shown(found.expected))
        table.add_row("seen", shown(found.seen))
    table.add_row("cause", Text(found.cause, style="bold"))
    table.add_row("", found.hint)
    return table


def fatal_death(verdict: "Verdict", run: RunLayout) -> UnplannedDeath | None:
    """The first unplanned death of the last attempt, of the leg that ended badly."""
    if verdict.outcome not in ENDED_BY_DEATH:
        return None
    chaos = read_progress("chaos", run.leg("chaos"))
    leg = chaos if chaos.outcome == verdict.outcome else read_progress("reference", run.reference)
    return next((death for death in leg.unplanned if death.attempt == leg.attempt), None)
