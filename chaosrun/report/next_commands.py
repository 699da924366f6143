"""The next commands: to look closer at a run, to resume it, and to repeat it."""

import codecs
import os
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.records.events import CONCLUSIVE, can_go_on
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.naming import run_arguments, shortest
from chaosrun.report.facts import RunFacts
from chaosrun.wording import LEFT_OUT

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict


_MAY_DIFFER = "from the newest checkpoint, which may be of the attempt that differed"
_CONFIRMS = "makes the confirming run"


@dataclass(frozen=True, slots=True, kw_only=True)
class NextCommand:
    label: str
    line: str
    note: str | None = None
    """What its label does not say, or why it cannot do that."""


def next_commands(verdict: "Verdict", run: RunLayout, facts: RunFacts, repeat: NextCommand | None) -> tuple[NextCommand, ...]:
    """`repeat`: from `repeat_command`."""
    where = run_arguments(run)
    resume = command("resume", "resume", *where, *facts.joining)
    if verdict.outcome == "interrupted":
        return (resume,)
    if verdict.outcome is None and verdict.code != "records_damaged":
        # The files do not show whether it is supervised; if it is, `resume` says so.
        return (command("look", "status", *where), resume)
    inspect = command("inspect", "verify", "-v", *where)
    if verdict.divergence is not None:
        place = ["--attempt", str(verdict.divergence.attempt), "--rank", str(verdict.divergence.rank)]
        inspect = command("inspect", "logs", where[0], "--leg", run.main, *place, *where[1:])
    elif verdict.outcome not in CONCLUSIVE:
        inspect = command("inspect", "logs", *where)
    unexplained = verdict.divergence is not None or verdict.outcome == "inexact_restore"
    unplanned = verdict.blame.whose != "planned"  # an effect of a planned fault needs no diagnosis
    diagnose = verdict.status == "FAIL" and unexplained and unplanned and run.main != RUN
    further = [command("diagnose", "diagnose", *where)] if diagnose else []
    if verdict.code != "records_damaged" and can_go_on(verdict.outcome, in_production=run.main == RUN):
        stopped = verdict.outcome == "diverged"
        further.append(replace(resume, note=_MAY_DIFFER) if stopped else resume)
    if verdict.unconfirmed:
        further.insert(0, replace(resume, note=_CONFIRMS))
    return (inspect, *further, *([repeat] if repeat else []))


def repeat_command(run: RunLayout, facts: RunFacts) -> NextCommand | None:
    """The command that reproduces the run, under the same root; None where its job file is unknown."""
    if facts.job is None:
        return None
    _, *where = run_arguments(run)
    notes = [] if facts.typed else _changes(run, Path(facts.job))
    injected = () if facts.in_production else facts.injected  # faults can be injected only while a run runs
    if injected:
        notes.append("what was injected strikes at its time after the start again, not at its step")
    if any(LEFT_OUT in override for override in facts.overrides):
        notes.append("with what was left out of its changes")
    replaced = {each.split("=")[0] for each in injected}
    words = facts.typed or (shortest(Path(facts.job)),)
    dashes = words.index("--") if "--" in words else len(words)
    if facts.typed and facts.directory not in (None, os.getcwd()):
        notes.append(f"in {facts.directory}")
    found = command(
        "repeat",
        "run" if facts.in_production else "submit",
        *words[:dashes],
        *(each for each in facts.overrides if each.split("=")[0] not in replaced),
        *injected,
        *where,
        *facts.joining,
        *words[dashes:],
    )
    return replace(found, note="; ".join(notes) or None)


def command(label: str, *arguments: str) -> NextCommand:
    return NextCommand(label=label, line=shlex.join(["chaosrun", *arguments]))


def _changes(run: RunLayout, job: Path) -> list[str]:
    copy = run.job_yaml
    try:
        then = copy.read_bytes()
        now = job.read_bytes().removeprefix(codecs.BOM_UTF8) if job.is_file() else None
    except OSError:
        return []  # nothing to compare with
    what = "is gone" if now is None else "has changed since"
    return [] if now == then else [f"{job.name} {what}: the run's own copy is {shortest(copy.absolute())}"]
