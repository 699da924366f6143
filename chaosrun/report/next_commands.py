"""What to type next: the commands that look closer at a run, go on with it, and do the same again."""

import codecs
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.records.journal import CONCLUSIVE
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_arguments, shortest
from chaosrun.report.facts import RunFacts

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict


def next_commands(verdict: "Verdict", run: RunLayout, facts: RunFacts) -> list[tuple[str, list[str]]]:
    """Each with its label."""
    from chaosrun.verify.blame import blame

    named = run_arguments(run)
    if verdict.outcome == "interrupted":
        return [("go on", ["chaosrun", "resume", *named])]
    if verdict.outcome is None:
        # Whether anybody supervises it the files do not tell; where somebody does, `resume` says so.
        return [(label, ["chaosrun", name, *named]) for label, name in (("look", "status"), ("go on", "resume"))]
    inspect = ["chaosrun", "verify", *named]
    if verdict.divergence is not None:
        place = ["--attempt", str(verdict.divergence.attempt), "--rank", str(verdict.divergence.rank)]
        inspect = ["chaosrun", "logs", named[0], "--leg", "chaos", *place, *named[1:]]
    elif verdict.outcome not in (None, *CONCLUSIVE):
        inspect = ["chaosrun", "logs", *named]
    commands = [("inspect", inspect)]
    unexplained = verdict.divergence is not None or verdict.outcome == "inexact_restore"
    if verdict.status == "FAIL" and unexplained and blame(verdict).whose != "planned":
        commands.append(("diagnose", ["chaosrun", "diagnose", *named]))
    if repeat := repeat_command(run, facts):
        commands.append(("repeat", repeat))
    return commands


def repeat_command(run: RunLayout, facts: RunFacts) -> list[str] | None:
    """The one command that reproduces the run, under the same root; None where its job file is not known."""
    if facts.job is None:
        return None
    _, *where = run_arguments(run)
    return ["chaosrun", "submit", shortest(Path(facts.job)), *facts.overrides, *facts.injected, *where]


def repeat_note(run: RunLayout, facts: RunFacts) -> str | None:
    """What keeps that command from doing the very same; None when nothing is known to."""
    notes = [] if facts.job is None else _changes(run, Path(facts.job))
    if facts.injected:
        notes.append("what was injected strikes at its time after the start again, not at its step")
    return "; ".join(notes) or None


def _changes(run: RunLayout, job: Path) -> list[str]:
    copy = run.job_yaml
    try:
        then = copy.read_bytes()
        now = job.read_bytes().removeprefix(codecs.BOM_UTF8) if job.is_file() else None
    except OSError:
        return []  # nothing to compare with
    what = "is gone" if now is None else "has changed since"
    return [] if now == then else [f"{job.name} {what}: the run's own copy is {shortest(copy.absolute())}"]
