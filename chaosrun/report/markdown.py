"""The account of a drill in Markdown, for a job summary ($GITHUB_STEP_SUMMARY), a merge request, a chat.

GitHub's flavour: tables and fenced code, nothing that needs a network. Whatever a run wrote is text here, never markup.
"""

import shlex
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from chaosrun.records.journal import CONCLUSIVE
from chaosrun.records.layout import RunLayout
from chaosrun.report.escapes import harmless
from chaosrun.report.facts import read_facts, read_versions
from chaosrun.report.markdown_parts import LONGEST, ROWS, fence, fitting, paragraph, table, text
from chaosrun.report.next_commands import next_commands, repeat_note
from chaosrun.report.outcomes import undecided_by
from chaosrun.report.page import shown
from chaosrun.report.text import ended_by, fatal_death
from chaosrun.verify.blame import blame
from chaosrun.wording import count, span

if TYPE_CHECKING:
    from chaosrun.verify.account import FaultOutcome
    from chaosrun.verify.divergence import Divergence
    from chaosrun.verify.verdict import Verdict

SIGNS = {"PASS": "✅", "FAIL": "❌", "INCONCLUSIVE": "⚠️"}


def render_markdown(run: RunLayout, verdict: "Verdict") -> str:
    facts, why = read_facts(run), undecided_by(verdict)
    parts = [
        f"## {SIGNS[verdict.status]} {verdict.status}{f' ({why})' if why else ''}: {text(facts.sentence or run.run_id)}",
        paragraph(verdict.cause),
        *_bullets(verdict),
        *_commands(next_commands(verdict, run, facts), repeat_note(run, facts)),
        *_traceback(run, verdict),
        *_divergence(verdict.divergence, verdict.hint),
        *_checks(verdict),
        *(_faults(verdict.faults, facts.whose) if verdict.attempts else ()),
        *_attempts(verdict),
        *_passed(verdict),
        f"<sub>{_about(run)}</sub>",
    ]
    return fitting(parts)


def _bullets(verdict: "Verdict") -> Iterable[str]:
    told: list[str] = []
    if verdict.status != "PASS":
        told.append(f"**Whose fault:** {text(blame(verdict).sentence)}")
    if verdict.hint and (verdict.divergence is None or verdict.hint != verdict.divergence.hint):
        told.append(f"**Hint:** {text(verdict.hint)}")
    told += [f"**Warning:** {text(sentence)}" for sentence in verdict.warnings[:ROWS]]
    return ["\n".join(f"- {entry}" for entry in told)] if told else []


def _commands(commands: Sequence[tuple[str, Sequence[str]]], note: str | None) -> Iterable[str]:
    """The one that does it again comes first."""
    if commands:
        ordered = sorted(commands, key=lambda entry: entry[0] != "repeat")
        about = {"repeat": f"repeat ({harmless(note)})"} if note else {}
        yield fence("\n".join(f"{shlex.join(command)}  # {about.get(label, label)}" for label, command in ordered), "sh")


def _traceback(run: RunLayout, verdict: "Verdict") -> Iterable[str]:
    """Its end, which says what was raised."""
    death = fatal_death(verdict, run)
    if death is not None and death.traceback:
        who = "the attempt" if death.rank is None else f"rank {death.rank}"
        yield f"### Traceback of {who}, attempt {death.attempt}"
        lines = harmless(death.traceback).strip().splitlines()[-ROWS:]
        yield fence("\n".join(line[:LONGEST] for line in lines), "text")


def _divergence(found: "Divergence | None", hint: str | None) -> Iterable[str]:
    if found is None:
        return
    ranks = f"rank {found.rank}" if len(found.ranks) <= 1 else f"ranks {', '.join(map(str, found.ranks))}"
    micro = "" if found.micro_batch is None else f", micro-batch {found.micro_batch}"
    rows = [
        ("where", f"step {found.step}, {ranks}, attempt {found.attempt}{micro}"),
        ("kind", found.kind),
        *([("tensor", found.tensor)] if found.tensor is not None else []),
        *([("expected", shown(found.expected)), ("seen", shown(found.seen))] if found.expected != found.seen else []),
        ("cause", found.cause),
        ("what to do" if found.hint == hint else "in detail", found.hint),
    ]
    yield "### First divergence"
    yield table(("", ""), rows)


def _checks(verdict: "Verdict") -> Iterable[str]:
    if verdict.outcome not in CONCLUSIVE:
        return
    order = ("fail", "inconclusive")
    rows = [
        (check.status, check.name, check.summary)
        for check in sorted(verdict.checks, key=lambda check: check.status != "fail")
        if check.status in order
    ]
    if rows:
        yield f"### Checks that did not pass: {len(rows)} of {len(verdict.checks)}"
        yield table(("", "check", "what it found"), rows)


def _passed(verdict: "Verdict") -> Iterable[str]:
    rows = [(check.status, check.name, check.summary) for check in verdict.checks if check.status in ("pass", "skip")]
    if rows and verdict.outcome in CONCLUSIVE:
        summary = f"<details><summary>{count(len(rows), 'check')} passed or had nothing to look at</summary>"
        yield f"{summary}\n\n{table(('', 'check', 'what it found'), rows)}\n\n</details>"


def _faults(faults: "Sequence[FaultOutcome]", whose: str) -> Iterable[str]:
    if not faults:
        return
    landed = sum(fault.landed for fault in faults)
    yield f"### Faults: {landed} of {len(faults)} landed{whose}"
    rows = [
        (
            fault.id,
            fault.description,
            "-"
            if fault.attempt is None
            else f"attempt {fault.attempt}" + ("" if fault.step is None else f", step {fault.step}"),
            fault.evidence or "landed" if fault.landed else f"NOT SHOWN: {fault.problem}",
        )
        for fault in faults
    ]
    yield table(("fault", "what", "where", "evidence"), rows)


def _attempts(verdict: "Verdict") -> Iterable[str]:
    if not verdict.attempts:
        return
    yield f"### Attempts: {len(verdict.attempts)}, {count(verdict.lost_steps, 'step')} lost and done again"
    faults = {fault.id for fault in verdict.faults}
    rows = [
        (
            attempt.attempt,
            attempt.resumed_from or "the beginning",
            "none" if attempt.first_step is None else f"{attempt.first_step}-{attempt.last_step}",
            ended_by(attempt, faults),
            attempt.lost_steps or "-",
            "-" if attempt.recovery_s is None else span(attempt.recovery_s),
        )
        for attempt in verdict.attempts
    ]
    yield table(("#", "went on from", "steps", "ended by", "lost", "recovery"), rows)


def _about(run: RunLayout) -> str:
    facts = read_facts(run)
    seeds = [f"{name} {seed}" for name, seed in (("seed", facts.seed), ("plan seed", facts.plan_seed)) if seed is not None]
    versions = [f"{name} {version}" for name, version in {"chaosrun": facts.chaosrun, **read_versions(run)}.items() if version]
    return text(", ".join([f"run {run.run_id}", *seeds, *versions]))
