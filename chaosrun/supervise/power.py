"""Power cuts: once every process of the attempt is gone, changes the script's outputs to what the disk would hold.

Journalled before and after. This process must be able to access the outputs.
"""

from collections.abc import Callable

from chaosrun.faults.fault import FaultPlan
from chaosrun.faults.power_cut import rebuild
from chaosrun.faults.tracer import SaveNote
from chaosrun.records.codec import DamagedRecordError
from chaosrun.records.events import OutputsReplaced, OutputsReplacing
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Marker, read_marker, read_note
from chaosrun.records.operations import FileOperation, read_operations


def cut_power(leg: LegLayout, plan: FaultPlan, attempt: int, outputs: tuple[str, ...], record: Callable[..., None]) -> None:
    """Apply each power cut of this attempt to the script's outputs."""
    for fault in plan.faults:
        note = read_note(leg, fault.id, SaveNote) if fault.kind == "power_cut" else None
        marker = read_marker(leg, fault.id)
        if note is None or note.struck_s is None or marker is None or marker.attempt != attempt:
            continue
        unsynced = fault.option("unsynced")
        record(OutputsReplacing(fault=fault.id, attempt=attempt, unsynced=unsynced))
        before, about = leg.outputs_before(fault.id), {"fault": fault.id, "attempt": attempt}
        try:
            done, scratch = _done(leg, marker, note), before.with_suffix(".rebuilt")
            change = rebuild(outputs, before, done, unsynced, taken_s=marker.time_s, scratch=scratch)
        except (OSError, DamagedRecordError) as error:
            record(OutputsReplaced(**about, problem=f"they could not be rebuilt: {error}"))
        else:
            record(OutputsReplaced(**about, gone=change.gone, back=change.back, torn=change.torn))


def _done(leg: LegLayout, marker: Marker, note: SaveNote) -> list[FileOperation]:
    """The operations of all ranks in that save before the power was cut."""
    files = leg.attempt(marker.attempt).path.glob("rank-*.operations.jsonl")
    of_save = (each for path in files for each in read_operations(path) if each.save == note.save)
    return [each for each in of_save if each.time_s <= (note.struck_s or 0.0)]
