"""One drill, carried out in this process, and its reports. Heavy imports (ray, torch) happen inside, when they are needed."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.records.layout import RunLayout
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener, carry_out, create
from chaosrun.supervise.runs import default_root

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict


@dataclass(frozen=True, slots=True)
class RunResult:
    run: RunLayout
    verdict: "Verdict"
    unwritten: tuple[str, ...] = ()
    """Why reports are missing; warnings for people."""


def submit(
    job: Path,
    *,
    overrides: Sequence[str] = (),
    root: Path | None = None,
    address: str | None = None,
    reference: str = "auto",
    on_event: Listener | None = None,
) -> RunResult:
    """Run one drill and return its verdict, whatever it is.

    `reference` is "auto" (use the cache), "fresh", or a run (id, unique prefix, "latest") whose reference is used. `on_event`
    gets every journal record with the key `leg` added. Raises UsageError or SpecError before anything starts, ResourcesError
    when no cluster can be had, InterruptedRunError on SIGINT and SIGTERM: no process is left then, `resume` goes on.
    """
    with Interrupts() as interrupts:
        base = (default_root() if root is None else root).absolute()
        return _carried_out(create(job, overrides, base, address, reference), base, address, on_event, interrupts)


def resume(run: RunLayout, *, address: str | None = None, on_event: Listener | None = None) -> RunResult:
    """Continue a run whose supervisor died or was interrupted, from its journal; one that has ended is only judged again.

    Raises UsageError while it is supervised, otherwise as `submit`.
    """
    from chaosrun.supervise.drill import has_ended, lock_run

    with Interrupts() as interrupts:
        if has_ended(run):
            with lock_run(run):
                return _reported(run, verify(run))
        return _carried_out(run, run.path.parent.parent.absolute(), address, on_event, interrupts)


def verify(run: RunLayout) -> "Verdict":
    """Judge a run again, from its files alone."""
    from chaosrun.supervise.drill import read_run
    from chaosrun.verify.verdict import judge

    read_run(run)
    return judge(run)


def _carried_out(
    run: RunLayout, root: Path, address: str | None, on_event: Listener | None, interrupts: Interrupts
) -> RunResult:
    """With its reports, which are there before anybody else may take the run."""
    unwritten: tuple[str, ...] = ()

    def report(verdict: "Verdict") -> tuple[str, ...]:
        nonlocal unwritten
        unwritten = _reported(run, verdict).unwritten
        return unwritten

    verdict = carry_out(run, root, address, on_event or (lambda record: None), interrupts, report)
    return RunResult(run, verdict, unwritten)


def _reported(run: RunLayout, verdict: "Verdict") -> RunResult:
    from chaosrun.report.write import write_reports

    return RunResult(run, verdict, tuple(write_reports(run, verdict)))
