"""Shared by commands: their arguments, and how they show results: pages on stdout, progress on stderr."""

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from chaosrun.errors import UsageError
from chaosrun.records.naming import default_root
from chaosrun.report.output import has_colour, page_width, printed, rendered, tell, write_json, write_out

if TYPE_CHECKING:
    from rich.console import RenderableType

    from chaosrun.records.events import EventRecord
    from chaosrun.records.layout import RunLayout
    from chaosrun.records.run_file import Early
    from chaosrun.spec.command_line import TypedJob
    from chaosrun.verify.verdict import Verdict

Root = Annotated[Path | None, Parameter(name="--root", help="Where runs are kept (default: $CHAOSRUN_ROOT, else ./.chaosrun).")]
Address = Annotated[str | None, Parameter(name="--address", help="Ray cluster to join (default: start a local Ray).")]
Quiet = Annotated[bool, Parameter(name=["--quiet", "-q"], help="Show no progress, and at most one line for a verdict.")]
Verbose = Annotated[
    bool, Parameter(name=["--verbose", "-v"], help="Also show tables of faults, attempts, checks; not with --quiet.")
]
Drilled = Annotated[Path | None, Parameter(name="JOB", help="A job file, or a script (.py); else a command after two dashes.")]
Overrides = Annotated[str, Parameter(help="Changes to the job file: workers=4 faults.seed=7 'faults.schedule[0].rank=1'.")]
ToTheEnd = Annotated[bool, Parameter(help="Run every chaos leg to its end, even once its state is the reference run's.")]


def early_of(to_the_end: bool, otherwise: "Early" = "always") -> "Early":
    """When chaos legs may end before their training does."""
    return "never" if to_the_end else otherwise


FromTheBeginning = Annotated[bool, Parameter(help="Begin chaos legs at step 0, not at a checkpoint of the reference run.")]


def begun(from_the_beginning: bool) -> tuple[str, ...]:
    """The changes to a job that `--from-the-beginning` makes."""
    return ("verify.begin=beginning",) if from_the_beginning else ()


AtOnce = Annotated[int | None, Parameter(help="Largest number of drills at the same time (default: as many as fit).")]


@Parameter(name="*", help="What is printed, and how.")
@dataclass(frozen=True, slots=True, kw_only=True)
class Out:
    quiet: Quiet = False
    output: Annotated[
        Literal["text", "json"], Parameter(name=["--output", "-o"], help="text for people, json for programs (on stdout).")
    ] = "text"

    @property
    def is_json(self) -> bool:
        return self.output == "json"


OUT = Out()
MOMENTS = "chaos (the chaos leg's ranks are started), attempt=N (of that leg has begun) or step=N (completed in it)"
After = Annotated[tuple[str, ...], Parameter(parse=False, help="After two dashes: arguments for the script, or a command.")]
"""`cli.main` fills it in."""


@Parameter(name="*", help="Used instead of a job file, or on top of one.")
@dataclass(frozen=True, slots=True, kw_only=True)
class WayIn:
    """Options that are used instead of a job file, or on top of one."""

    workers: Annotated[int | None, Parameter(help="How many ranks (default: guessed from the command or the script).")] = None
    kill: Annotated[list[str] | None, Parameter(help="SIGKILL a rank: RANK@STEP or RANK@STEP:PHASE; repeatable.")] = None
    preempt: Annotated[list[str] | None, Parameter(help="Send a rank a preemption notice: RANK@STEP; repeatable.")] = None
    write: Annotated[Path | None, Parameter(help="Write what was typed, and guessed, to this job file.")] = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WayInWithoutFaults(WayIn):
    """For commands that plan no faults of the job: they refuse these two, and do not list them."""

    kill: Annotated[list[str] | None, Parameter(show=False)] = None
    preempt: Annotated[list[str] | None, Parameter(show=False)] = None


NOTHING = WayIn()
NO_FAULTS = WayInWithoutFaults()


def job_asked(
    job: Path | None, overrides: Sequence[str], after: Sequence[str], asked: WayIn, *, quiet: bool
) -> "tuple[Path | TypedJob, tuple[str, ...]]":
    """The command's job, and the changes to it; prints guesses. Raises UsageError."""
    from chaosrun.spec.command_line import JobOptions, is_job_file, keep, typed_job
    from chaosrun.spec.job_file import load_job

    if job is not None and after and re.match(r"[a-z][a-z_.0-9\[\]]*=", str(job)) and not job.exists():
        job, overrides = None, (str(job), *overrides)  # of a command, which follows the dashes
    options = JobOptions(workers=asked.workers, kill=tuple(asked.kill or ()), preempt=tuple(asked.preempt or ()))
    if job is not None and is_job_file(job):
        if after:
            raise UsageError(f"{job} is a job file: what comes after -- is for a script", hint="write it into the job's args")
        if asked.write is not None:
            raise UsageError("--write keeps what was typed, and this is a job file", hint=f"copy {job}")
        return job, (*options.overrides(), *overrides)
    for key in (change.partition("=")[0].strip() for change in overrides if after):
        if key in ("args", "command"):
            raise UsageError(
                f"{key}=… takes the place of what comes after --, which would be lost",
                hint=f"write all of it after --; {key}[]=… adds to that",
            )
    typed = typed_job(job, after, options, Path.cwd())
    load_job(typed, overrides)  # a wrong job is refused before anything is printed or written
    if asked.write is not None:
        keep(typed, overrides, asked.write)
    if not quiet:
        changed = {change.partition("=")[0].strip() for change in overrides}
        tell([guess for guess in typed.guesses if guess.partition(":")[0] not in changed])
    return (typed, tuple(overrides)) if asked.write is None else (asked.write, ())


def _names_of_runs(context: Any) -> list[str]:
    """Names of runs for a shell's completion; it reads no run."""
    given = next((argument.value for name in ("root", "--root") if (argument := context.get(name)) is not None), None)
    folder = (given if isinstance(given, Path) else default_root()) / "runs"
    runs = [entry.name for entry in os.scandir(folder) if entry.is_dir()] if folder.is_dir() else []
    return ["latest", *sorted(run for run in runs if not run.startswith("."))]


Run = Annotated[str, Parameter(help="A run id, its unique beginning, or 'latest'.", completer=_names_of_runs)]


def duration_s(option: str, text: str) -> float:
    """`90s`, `10m`, `2h` as seconds. Raises UsageError, naming the option."""
    from chaosrun.spec.fields import seconds_of

    try:
        return seconds_of(text)
    except ValueError as error:
        raise UsageError(f"{option} {text!r} must be {error}", hint=f"such as {option} 90s") from error


def moment(option: str, text: str) -> dict[str, int]:
    """`chaos`, `attempt=2`, `step=40` as `api.wait_until` takes it. Raises UsageError, naming the option."""
    name, _, number = ("attempt", "=", "1") if text == "chaos" else text.partition("=")
    if name not in ("attempt", "step") or not number.isdecimal() or int(number) < 1:
        raise UsageError(f"{option} {text!r} is not a moment of a drill", hint=f"write {option} chaos, attempt=2 or step=40")
    return {name: int(number)}


def numbers(option: str, text: str, of: str) -> tuple[int, ...]:
    """`1,27,66`, each 1 or more. Raises UsageError, naming the option and what the numbers mean."""
    try:
        found = tuple(int(part) for part in text.split(",")) if text else ()
    except ValueError as error:
        raise UsageError(f"{option} {text!r} is not a list of {of}", hint=f"write numbers, such as {option} 1,27,66") from error
    if any(number < 1 for number in found):
        raise UsageError(f"{option} {text!r}: {of} count from 1", hint=f"write numbers, such as {option} 1,27,66")
    return found


def names(given: Sequence[str] | None) -> tuple[str, ...]:
    """All names of an option that is repeatable and takes several names at once, separated by commas."""
    return tuple(name for each in given or () for part in each.split(",") if (name := part.strip()))


def one_or_more(option: str, number: int | None) -> None:
    """Raises UsageError for anything but a number of drills."""
    if number is not None and number < 1:
        raise UsageError(f"{option} {number} is not a number of drills", hint=f"give {option} a number, 1 or more")


def about(run: "RunLayout", **more: object) -> dict[str, object]:
    return {"v": 1, "run": run.run_id, "path": str(run.path.absolute()), **more}


def show(out: Out, value: Callable[[], Mapping[str, object]], page: "Callable[[], RenderableType]") -> int:
    """Print the result: as JSON for programs, or as a page for people. Returns the exit code of `printed`."""
    if out.is_json:
        write_json(value())
    else:
        write_out(told if isinstance(told := page(), str) else as_text(told))
    return printed()


def show_verdict(run: "RunLayout", verdict: "Verdict", out: Out, *, verbose: bool) -> None:
    if out.is_json:
        write_json(about(run, verdict=verdict.to_json()))
        return
    from chaosrun.report.text import render_line, render_text
    from chaosrun.report.view import read_view

    view = read_view(run, verdict)
    write_out(as_text(render_line(view) if out.quiet else render_text(view, whole=verbose)))


def as_text(page: "RenderableType") -> str:
    return rendered(page, width=page_width(), colour=has_colour(sys.stdout, os.environ))


@contextmanager
def ticking(*, quiet: bool, preflight: bool = False) -> "Iterator[Callable[[EventRecord], None] | None]":
    """Like `report.live.progress`, but for many drills, or a preflight."""
    from chaosrun.preflight.report.ticker import PreflightTicker
    from chaosrun.report.live import is_live_terminal
    from chaosrun.report.ticker import DrillsTicker

    with redirect_stdout(sys.stderr):
        if quiet or preflight:
            yield None if quiet else PreflightTicker(sys.stderr).on_event
            return
        with DrillsTicker(sys.stderr, terminal=is_live_terminal(sys.stderr, os.environ)) as ticker:
            yield ticker.on_event
