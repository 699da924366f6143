"""The answers at the top of a drill's page, one sentence each: what was tried, what was killed, what differed, whose fault."""

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaosrun.records.journal import CONCLUSIVE
from chaosrun.report.html.source import Source
from chaosrun.report.next_commands import next_commands, repeat_note
from chaosrun.report.outcomes import status_words
from chaosrun.report.progress import ENDED_BY_DEATH
from chaosrun.verify.blame import blame
from chaosrun.verify.check import Check
from chaosrun.wording import count

ORDER = ("fail", "inconclusive", "pass", "skip")
"""Of checks, by interest."""
MOST_FAULTS = 3
"""Faults told one by one in a sentence."""
MOST_DEATHS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    label: str
    line: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    leg: str
    attempt: int
    rank: int | None
    step: int | None
    reason: str
    error: str | None
    traceback: str | None
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    status: str
    """With the reason, where there is none to judge by."""
    headline: str
    more: str | None
    """The rest of the cause: where, where it says so in brackets."""
    tried: str
    killed: str
    differed: str
    whose: str
    reason: str
    repeat: str | None
    """The command that reproduces it."""
    repeat_note: str | None
    """What keeps it from that."""
    here: str
    """The directory that the commands' paths are relative to."""
    commands: tuple[Command, ...]
    """The others: what to type next."""
    checks: str
    undecided: bool
    """A leg did not come to its end: most checks had nothing to go by."""
    failing: tuple[Check, ...]
    others: tuple[Check, ...]
    deaths: tuple[Death, ...]


def answers(source: Source) -> Answers:
    verdict = source.verdict
    found = blame(verdict)
    commands = [Command(label=label, line=shlex.join(line)) for label, line in next_commands(verdict, source.run, source.facts)]
    checks = sorted(verdict.checks, key=lambda check: ORDER.index(check.status))
    headline, bracket, more = verdict.cause.partition(" (first difference")
    whole = not bracket or not more.endswith(")")
    return Answers(
        status=status_words(verdict),
        headline=verdict.cause if whole else headline,
        more=None if whole else f"first difference{more[:-1]}",
        tried=_tried(source),
        killed=_killed(source),
        differed=_differed(source),
        whose=found.words,
        reason=found.reason,
        repeat=next((command.line for command in commands if command.label == "repeat"), None),
        repeat_note=repeat_note(source.run, source.facts),
        here=str(Path.cwd()),
        commands=tuple(command for command in commands if command.label != "repeat"),
        checks=_counted(verdict.checks),
        undecided=verdict.outcome not in CONCLUSIVE,
        failing=tuple(check for check in checks if check.status in ("fail", "inconclusive")),
        others=tuple(check for check in checks if check.status in ("pass", "skip")),
        deaths=tuple(deaths(source)),
    )


def _tried(source: Source) -> str:
    facts, spec, plan = source.facts, source.spec, source.plan
    name = facts.name or "a job whose file cannot be read"
    workers = "" if facts.workers is None else f" on {count(facts.workers, 'worker')}"
    every = "" if spec is None else f", a checkpoint every {count(spec.checkpoint.every_steps, 'step')}"
    if plan is None:
        again = "once with its faults"
    elif not plan.faults:
        again = "once again with no fault planned"
    else:
        injected = source.facts.injected_faults
        more = f", {injected} more injected" if injected else ""
        again = f"once with its faults ({len(plan.faults) - injected}, seed {plan.seed}{more})"
    verify = None if spec is None else spec.verify
    loose = verify is not None and not (verify.weights.exact and verify.losses.exact)
    compared = "within the job file's tolerances" if loose else "bit for bit"
    return f"{name}{workers}{every}: once undisturbed, {again}, and the two compared {compared}"


def _killed(source: Source) -> str:
    faults, deaths_seen = source.verdict.faults, source.chaos.history.events("death.unplanned")
    unplanned = f" {count(len(deaths_seen), 'death')} nobody had planned." if deaths_seen else ""
    if not source.chaos.began:
        return "Nothing: the disturbed run never began."
    if not faults:
        return f"Nothing was planned.{unplanned}"
    landed = [fault for fault in faults if fault.landed]
    if len(faults) <= MOST_FAULTS:
        told = "; ".join(
            f"{fault.id}: {fault.description}{'' if fault.landed else ' (NOT SHOWN to have happened)'}" for fault in faults
        )
        return f"{told}.{unplanned}"
    kinds = ", ".join(f"{number} × {kind}" for kind, number in Counter(fault.kind for fault in faults).most_common())
    ends = f"the first {faults[0].description}, the last {faults[-1].description}"
    of = "faults " if source.facts.injected_faults else "planned faults "
    return f"{len(landed)} of {len(faults)} {of}landed{source.facts.whose} ({kinds}): {ends}.{unplanned}"


def _differed(source: Source) -> str:
    verdict = source.verdict
    found = verdict.divergence
    if found is not None:
        ranks = f"rank {found.rank}" if len(found.ranks) <= 1 else f"{len(found.ranks)} ranks, first rank {found.rank}"
        tensor = f", {found.tensor}" if found.tensor else ""
        return f"{found.kind} first: at step {found.step}, {ranks}, attempt {found.attempt}{tensor}."
    if verdict.status == "PASS":
        return "Nothing."
    failing = [check for check in verdict.checks if check.status == "fail"]
    if failing:
        return f"{failing[0].name.replace('_', ' ')}: {failing[0].summary}."
    if verdict.outcome not in CONCLUSIVE:
        return "Not known: a leg did not come to its end, so there was nothing to compare."
    return "Nothing that was compared."


def _counted(checks: Sequence[Check]) -> str:
    words: Mapping[str, str] = {"fail": "failed", "inconclusive": "inconclusive", "pass": "passed", "skip": "skipped"}
    counted = Counter(check.status for check in checks)
    return ", ".join(f"{counted[status]} {words[status]}" for status in ORDER if counted[status]) or "none made"


def deaths(source: Source) -> list[Death]:
    """Deaths that nobody planned, those that ended a leg first."""
    found: list[Death] = []
    for leg in (source.reference, source.chaos):
        last = leg.history.attempts[-1].number if leg.history.attempts else None
        ended_badly = leg.history.outcome in ENDED_BY_DEATH
        for record in leg.history.events("death.unplanned"):
            error: Any = record.get("error")
            error = error if isinstance(error, dict) else {}
            said = [str(error[key]) for key in ("type", "message") if error.get(key)]
            found.append(
                Death(
                    leg=leg.name,
                    attempt=record["attempt"],
                    rank=record["rank"],
                    step=record.get("step"),
                    reason=str(record["reason"]),
                    error=": ".join(said) or None,
                    traceback=str(error["traceback"]) if error.get("traceback") else None,
                    fatal=ended_badly and record["attempt"] == last,
                )
            )
    return sorted(found, key=lambda death: not death.fatal)[:MOST_DEATHS]
