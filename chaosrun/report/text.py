"""The account of a drill for people: faults, attempts, checks, the first divergence, the verdict, and what to type next.

Renders values that others decided. The verdict comes last, because that is where a terminal stops.
"""

import shlex
from collections.abc import Sequence
from pathlib import Path
from textwrap import indent
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from chaosrun.records.layout import RunLayout
from chaosrun.report.facts import RunFacts, read_facts
from chaosrun.report.progress import LegProgress, UnplannedDeath, count, read_progress, signal_name, span

if TYPE_CHECKING:
    from chaosrun.plan.faults import FaultPlan
    from chaosrun.records.runs import RunSummary
    from chaosrun.spec.model import JobSpec
    from chaosrun.verify.account import AttemptSummary, FaultOutcome
    from chaosrun.verify.check import Check
    from chaosrun.verify.divergence import Divergence
    from chaosrun.verify.verdict import Verdict

__all__ = ["job_sentence", "render_plan", "render_runs", "render_verdict"]

STYLES = {"PASS": "bold green", "FAIL": "bold red", "INCONCLUSIVE": "bold yellow"}
CHECK_STYLES = {"fail": "bold red", "inconclusive": "bold yellow", "pass": "green", "skip": "dim"}
"""In the order of interest."""
LONGEST_VALUE = 160
"""Characters of an expected or seen value; verdict.json holds the whole."""


def render_verdict(verdict: "Verdict", run: RunLayout, *, root: Path | None = None) -> RenderableType:
    """`root`: the --root that the user gave, to be repeated in the commands shown."""
    facts, chaos = read_facts(run), read_progress("chaos", run.leg("chaos"))
    parts: list[RenderableType] = [_unwrapped(f"run {run.run_id}  {facts.sentence}".rstrip(), style="bold")]
    if facts.reference_source is not None:
        parts.append(Text("reference taken from the cache"))
    if verdict.attempts:
        parts += _section(f"Faults: {_faults_sentence(verdict)}", _faults(verdict, chaos))
        parts += _section(f"Attempts: {_attempts_sentence(verdict)}", _attempts(verdict))
    if verdict.outcome in ("completed", "inexact_restore"):
        parts += _section(f"Checks: {_checks_sentence(verdict.checks)}", _checks(verdict.checks))
    if verdict.divergence is not None:
        parts += _section("First divergence", _divergence(verdict.divergence))
    death = _fatal_death(verdict, run, chaos)
    if death is not None and death.traceback:
        who = "the attempt" if death.rank is None else f"rank {death.rank}"
        # Indented by hand: Padding cuts lines off at the page's width, and half a path is of no use.
        parts += _section(f"Traceback of {who}, attempt {death.attempt}", None)
        parts.append(_unwrapped(indent(death.traceback.rstrip(), "  ")))
    parts += ["", _labelled(verdict.status, verdict.cause, style=STYLES[verdict.status])]
    parts += [_labelled("warning", sentence) for sentence in verdict.warnings]
    if verdict.hint and (verdict.divergence is None or verdict.hint != verdict.divergence.hint):
        parts.append(_labelled("hint", verdict.hint))
    parts += [_labelled(label, shlex.join(command), wrap=False) for label, command in _next(verdict, run, facts, root)]
    return Group(*parts)


def render_plan(spec: "JobSpec", plan: "FaultPlan") -> RenderableType:
    head = _unwrapped(job_sentence(spec, plan))
    if not plan.faults:
        return head
    table = _table("fault", "what", "from")
    for fault in plan.faults:
        table.add_row(fault.id, fault.describe(), fault.source)
    return Group(head, "", _indented(table))


def job_sentence(spec: "JobSpec", plan: "FaultPlan") -> str:
    steps = "" if spec.max_steps is None else f", {count(spec.max_steps, 'step')}"
    faults = f"{count(len(plan.faults), 'fault')} (seed {plan.seed})" if plan.faults else "no faults"
    every = count(spec.checkpoint.every_steps, "step")
    return f"{spec.name}: {count(spec.workers, 'worker')}{steps}, a checkpoint every {every}, {faults}"


def render_runs(runs: "Sequence[RunSummary]", *, now_s: float) -> RenderableType:
    if not runs:
        return Text("no runs yet")
    table = _table("run", "job", "status", "age")
    for run in runs:
        age = span(max(0.0, now_s - run.created_s))
        table.add_row(run.run_id, run.name, Text(run.status, style=STYLES.get(run.status, "")), age)
    return table


def _faults_sentence(verdict: "Verdict") -> str:
    landed = sum(fault.landed for fault in verdict.faults)
    return f"{landed} of {len(verdict.faults)} landed" if verdict.faults else "none planned"


def _faults(verdict: "Verdict", chaos: LegProgress) -> RenderableType | None:
    if not verdict.faults:
        return None
    table = _table("fault", "what", "where", "evidence")
    for fault in verdict.faults:
        table.add_row(fault.id, fault.description, _where(fault), _evidence(fault, chaos))
    return table


def _where(fault: "FaultOutcome") -> str:
    if fault.attempt is None:
        return "-"
    return f"attempt {fault.attempt}" + ("" if fault.step is None else f", step {fault.step}")


def _evidence(fault: "FaultOutcome", chaos: LegProgress) -> Text:
    if not fault.landed:
        return Text(f"NOT SHOWN: {fault.problem}", style="bold yellow")
    seen = next((landing for landing in chaos.landed if landing.fault == fault.id), None)
    return Text("landed" if seen is None else f"pid {seen.pid}: {signal_name(seen.signal)}")


def _attempts_sentence(verdict: "Verdict") -> str:
    times_s = sorted(attempt.recovery_s for attempt in verdict.attempts if attempt.recovery_s is not None)
    parts = [str(len(verdict.attempts)), f"{count(verdict.lost_steps, 'step')} lost and done again"]
    if times_s:
        parts.append(f"recovery {span(times_s[0])}" + ("" if len(times_s) == 1 else f" to {span(times_s[-1])}"))
    return ", ".join(parts)


def _attempts(verdict: "Verdict") -> RenderableType:
    faults = {fault.id for fault in verdict.faults}
    table = _table("#", "went on from", "steps", "ended by", "lost", "recovery", right=("#", "lost", "recovery"))
    for attempt in verdict.attempts:
        table.add_row(
            str(attempt.attempt),
            attempt.resumed_from or "the beginning",
            "none" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}",
            _ended_by(attempt, faults),
            str(attempt.lost_steps) if attempt.lost_steps else "-",
            "-" if attempt.recovery_s is None else span(attempt.recovery_s),
        )
    return table


def _ended_by(attempt: "AttemptSummary", faults: set[str]) -> str:
    """A planned fault by its id alone: the table above says what it is."""
    name = attempt.ended_by.split(" ", 1)[0]
    return f"fault {name}" if name in faults and "," not in attempt.ended_by else attempt.ended_by.replace("_", " ")


def _checks_sentence(checks: "Sequence[Check]") -> str:
    words = {"fail": "failed", "inconclusive": "inconclusive", "pass": "passed", "skip": "skipped"}
    counted = {status: sum(check.status == status for check in checks) for status in words}
    return ", ".join(f"{counted[status]} {word}" for status, word in words.items() if counted[status])


def _checks(checks: "Sequence[Check]") -> RenderableType:
    table = _table("", "", "")
    table.show_header = False
    order = list(CHECK_STYLES)
    for check in sorted(checks, key=lambda check: order.index(check.status)):
        table.add_row(Text(check.status, style=CHECK_STYLES[check.status]), check.name, check.summary)
    return table


def _divergence(found: "Divergence") -> RenderableType:
    ranks = f"rank {found.rank}" if len(found.ranks) <= 1 else f"ranks {', '.join(map(str, found.ranks))}"
    micro = "" if found.micro_batch is None else f", micro-batch {found.micro_batch}"
    table = _table("", "")
    table.show_header = False
    table.add_row("where", f"step {found.step}, {ranks}, attempt {found.attempt}{micro}")
    table.add_row("kind", found.kind)
    if found.tensor is not None:
        table.add_row("tensor", found.tensor)
    if (found.expected, found.seen) != (None, None):
        table.add_row("expected", _value(found.expected))
        table.add_row("seen", _value(found.seen))
    table.add_row("cause", Text(found.cause, style="bold"))
    table.add_row("", found.hint)
    return table


def _value(value: Any) -> str:
    text = _plain_value(value)
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}... ({len(text)} characters)"


def _plain_value(value: Any) -> str:
    """Floats are recorded as float.hex(): exact, and unreadable alone."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_plain_value, value))}]"
    if isinstance(value, str) and value.lstrip("-").startswith("0x") and "p" in value:
        return f"{float.fromhex(value):.9g} ({value})"
    return str(value)


def _fatal_death(verdict: "Verdict", run: RunLayout, chaos: LegProgress) -> UnplannedDeath | None:
    """The first unplanned death of the last attempt, of the leg that ended badly."""
    if verdict.outcome not in ("user_error", "recovery_failed"):
        return None
    leg = chaos if chaos.outcome == verdict.outcome else read_progress("reference", run.reference)
    return next((death for death in leg.unplanned if death.attempt == leg.attempt), None)


def _next(verdict: "Verdict", run: RunLayout, facts: RunFacts, root: Path | None) -> list[tuple[str, list[str]]]:
    """What to type to look closer, and to have the same again."""
    where = [] if root is None else ["--root", str(root)]
    if verdict.outcome == "interrupted":
        return [("go on", ["chaosrun", "resume", run.run_id, *where])]
    inspect = ["chaosrun", "verify", run.run_id]
    if verdict.divergence is not None:
        place = ["--attempt", str(verdict.divergence.attempt), "--rank", str(verdict.divergence.rank)]
        inspect = ["chaosrun", "logs", run.run_id, "--leg", "chaos", *place]
    elif verdict.outcome not in (None, "completed", "inexact_restore"):
        inspect = ["chaosrun", "logs", run.run_id]
    commands = [("inspect", [*inspect, *where])]
    if facts.job is not None:
        commands.append(("repeat", ["chaosrun", "submit", _shortest(Path(facts.job)), *facts.overrides, *where]))
    return commands


def _shortest(path: Path) -> str:
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def _section(title: str, body: RenderableType | None) -> list[RenderableType]:
    return ["", Text(title, style="bold"), *([] if body is None else [_indented(body)])]


def _labelled(label: str, text: str, *, style: str = "", wrap: bool = True) -> RenderableType:
    if not wrap:
        return _unwrapped(f"{label:<8}  {text}")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, min_width=8)
    table.add_column(overflow="fold")
    table.add_row(Text(label, style=style), Text(text))
    return table


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _indented(body: RenderableType) -> RenderableType:
    return Padding(body, (0, 0, 0, 2))


def _unwrapped(text: str, *, style: str = "") -> Text:
    """For what people copy: paths and commands stay whole, however narrow the terminal."""
    return Text(text, style=style, no_wrap=True, overflow="ignore")
