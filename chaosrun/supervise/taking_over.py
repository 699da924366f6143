"""How a supervisor continues a leg that another one began: from its journal, and from files that are newer than it. A fault
that fired after that supervisor's death cannot be shown to have happened, so it must strike again. Decides nothing about
attempts.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.cluster.messages import Exited
from chaosrun.processes import ProcessIdentity, identify, kill_all
from chaosrun.records import events as recorded
from chaosrun.records.events import JournalEvent
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import read_markers
from chaosrun.supervise.lifecycle import Resume
from chaosrun.supervise.observations import Observations
from chaosrun.supervise.striking import OutsideFaults

COMMITTED = ("step", "checkpoint.rename.after", "checkpoint.postcommit", "checkpoint.retention")
"""Phases at which the checkpoint of that step, if one was due, has been committed."""
LEFT_OVER_S = 10.0
"""How long ranks that were left over may take to be gone."""


def take_over(
    past: Sequence[JournalEvent],
    leg: LegLayout,
    *,
    now_s: float,
    observations: Observations,
    outside_faults: OutsideFaults,
    store: CheckpointStore,
    record_quarantined: Callable[[recorded.CheckpointQuarantined], None],
) -> Resume:
    """Kill ranks that are left over, restore what was known of faults and checkpoints, and let faults that nobody saw strike
    again. `past`: the journal as it was found; `now_s`: wall clock, like the times in it."""
    left_over = list(_left_over(past, leg))
    kill_all(lambda: left_over, timeout_s=LEFT_OVER_S)
    for record in past:
        if isinstance(record, recorded.FaultRequested):
            observations.requested.add(record.fault)
        elif isinstance(record, recorded.FaultWithdrawn):
            observations.requested.discard(record.fault)
    observations.observed = {record.fault for record in past if isinstance(record, recorded.FaultObserved)}
    told = {Path(record.moved_to or "").name for record in past if isinstance(record, recorded.CheckpointQuarantined)}
    for aside in store.quarantined():
        if Path(aside.moved_to or "").name not in told:
            record_quarantined(aside)
    observations.of_notes()
    outside_faults.take_over(past, now_s)
    exits: dict[tuple[Any, Any, Any], recorded.WorkerExited] = {
        (record.attempt, record.rank, record.pid): record for record in past if isinstance(record, recorded.WorkerExited)
    }
    markers = read_markers(leg)
    deaths = {fault: marker and exits.get((marker.attempt, marker.rank, marker.pid)) for fault, marker in markers.items()}
    for exited in filter(None, deaths.values()):
        # The journal ends after the death, before the decision that followed.
        observations.of_death(Exited.of(exited))
    for fault, marker in markers.items():
        if fault in observations.observed or deaths[fault]:
            continue
        withdrawn = observations.withdraw(fault, "nobody saw it strike")
        # The checkpoint of that same step, from which the fault's trigger point would not be reached again.
        step = marker.step if withdrawn and marker and marker.phase in COMMITTED else None
        if step and (aside := store.set_aside(step, f"{fault} fired after it, and nobody saw it")):
            record_quarantined(aside)
    attempts = [record.attempt for record in past if isinstance(record, recorded.AttemptStarting)]
    return Resume(attempt=max(attempts, default=0))


def _left_over(past: Sequence[JournalEvent], leg: LegLayout) -> Iterator[ProcessIdentity]:
    """Ranks of earlier attempts that still live on this machine: where the head of a joined Ray has died, its ranks train on
    for a minute, and would write beside those of the next attempt."""
    for record in past:
        match record:
            case recorded.AttemptStarted():
                pids = record.pids
            case recorded.WorkerStarted():
                pids = {record.rank: record.pid}
            case _:
                continue
        for rank, pid in pids.items():
            mapped = os.fsencode(leg.attempt(record.attempt).heartbeat(rank).resolve())
            with suppress(OSError):  # it is gone, or another user's
                # A pid is given again to others; the file is mapped by its rank alone.
                if mapped in Path(f"/proc/{pid}/maps").read_bytes() and (rank_left := identify(pid)):
                    yield rank_left
