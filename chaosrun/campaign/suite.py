"""A suite as one call: one Ray for all its drills, and at the end its pages. What a suite is and does, is in `suites`."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chaosrun.errors import ChaosrunError
from chaosrun.supervise.interrupts import Interrupts

if TYPE_CHECKING:
    from chaosrun.campaign.folder import Agenda
    from chaosrun.campaign.night import SuiteRun, Wish
    from chaosrun.campaign.planned import PlannedDrill
    from chaosrun.campaign.results import SuiteResult
    from chaosrun.records.layout import RunLayout
    from chaosrun.verify.verdict import Verdict


def list_drills(wish: "Wish", root: Path) -> "Agenda":
    """What would run. Starts and writes nothing."""
    from chaosrun.campaign.night import agree

    return agree(wish, root.absolute(), time.time() if wish.asked_s is None else wish.asked_s)


def run_suite(
    wish: "Wish",
    *,
    resume: str | None,
    at_once: int | None,
    root: Path,
    address: str | None,
    on_event: Callable[[dict[str, Any]], None],
    on_cut_short: "Callable[[SuiteResult], None]",
) -> "SuiteResult":
    """Carry out what is wished for, or what is left of the suite called `resume`, and write its pages into its folder; when it
    is cut short, with what had ended by then. `on_cut_short` is told that before the error is raised."""
    os.environ.setdefault("RAY_DISABLE_FAILURE_SIGNAL_HANDLER", "1")
    from chaosrun.campaign.night import SuiteRun, opened
    from chaosrun.campaign.places import Places
    from chaosrun.campaign.report.suite_pages import write_pages

    base = root.absolute()
    with Interrupts() as interrupts, opened(base, wish, resume) as (folder, agenda, journal):
        began = {"leg": None, "event": "suite.started", "suite": agenda.suite_id, "of": len(agenda.drills)}
        on_event({**began, "seed": agenda.seed})
        run = SuiteRun(
            folder=folder,
            agenda=agenda,
            journal=journal,
            root=base,
            address=address,
            on_record=on_event,
            finish=_report,
        )
        if not agenda.drills:  # a shard that nothing belongs to
            return write_pages(folder, run.nothing(), Path(agenda.history))
        with _one_ray(address, agenda.drills, interrupts), Places(address, interrupts.postponed) as places:
            try:
                result = run.carry_out(places, at_once=at_once)
            except Exception as error:
                # Before Ray is stopped: who interrupts may not wait for long.
                _tell_so_far(run, error, on_cut_short)
                raise
        return write_pages(folder, result, Path(agenda.history))


def _tell_so_far(run: "SuiteRun", error: Exception, on_cut_short: "Callable[[SuiteResult], None]") -> None:
    from chaosrun.campaign.report.suite_pages import write_pages

    why = error.message if isinstance(error, ChaosrunError) else f"a bug in chaosrun ({type(error).__name__}: {error})"
    # A folder that cannot be read must not hide what cut it short; and who asks to end a second time has no time for pages.
    with suppress(ChaosrunError, OSError, KeyboardInterrupt):
        on_cut_short(write_pages(run.folder, run.so_far(why), Path(run.agenda.history)))


def _report(run: "RunLayout", verdict: "Verdict") -> Sequence[str]:
    from chaosrun.report.write import write_reports

    return write_reports(run, verdict)


@contextmanager
def _one_ray(address: str | None, drills: "Sequence[PlannedDrill]", interrupts: Interrupts) -> Iterator[None]:
    """Connect once for many drills: each of them finds this process connected, and leaves it so."""
    from chaosrun.cluster.ray_cluster import RayCluster

    largest = max((drill.workers for drill in drills), default=1)
    with interrupts.postponed():
        cluster = RayCluster.connect(address, workers=largest, cpu=max((drill.cpu for drill in drills), default=1.0), gpu=0)
    try:
        interrupts.check()
        yield
    finally:
        with interrupts.postponed():
            cluster.close()
