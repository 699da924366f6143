"""Faults inside the script's own save, and of its saved files: the kinds at the phase `save`, and the power cut.

The tracer counts operations to find the place in the save (`faults.tracer`); files are damaged after it (`save_points`).
"""

import os
import signal
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from chaosrun.faults.kind import Kind, Option
from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.power_cut import take
from chaosrun.faults.storage_damage import DamageNote, change_of, flip_bit, spoiled, truncate, zero_tail
from chaosrun.faults.strike import Strike
from chaosrun.faults.tracer import Act, SaveNote
from chaosrun.records.events import FaultRequested, OutputsReplaced
from chaosrun.records.history import LegHistory
from chaosrun.wording import count

OPTIMIZER = "*optim*"
"""Files that hold an optimizer, as the libraries call them."""


def _traced(act: Act, error: str = "") -> Callable[[Strike], None]:
    def inside(strike: Strike) -> None:
        wait_s = strike.option("duration_s") if act == "slow" else 0.0
        before = None if act == "slow" else strike.option("operation")
        strike.at["points"].trace(strike, act, before=before, error=error, wait_s=wait_s)

    return inside


def _cut_power(strike: Strike) -> None:
    """Keep a copy of the outputs, and kill the rank; the supervisor does the rest when all ranks are gone."""
    try:
        take(strike.order.outputs, strike.leg.outputs_before(strike.fault.id))
    except OSError as error:
        strike.note(SaveNote(problem=f"the outputs could not be copied: {error}"))
        return
    before = strike.option("operation")
    strike.at["points"].trace(strike, "cut" if before is None else "kill", before=before)


def _damage(pattern: str, spoil: Callable[[Path], object]) -> Callable[[Strike], None]:
    def inside(strike: Strike) -> None:
        points = strike.at["points"]
        file, since_s = strike.option("file") or pattern, points.began_s
        points.when_over(lambda: strike.note(_spoiled(strike, file, spoil, since_s)))

    return inside


def _spoiled(strike: Strike, pattern: str, spoil: Callable[[Path], object], since_s: float) -> DamageNote:
    """Damage the largest file of this save that matches the pattern."""
    found = {name: path for path, name in _saved(strike.order.outputs, since_s) if fnmatchcase(name, pattern)}
    if not found:
        return DamageNote(problem=f"the save left no file that matches {pattern}", problem_code="no_such_file")
    name = min(found, key=lambda name: (-found[name].stat().st_size, name))
    return spoiled(found[name], spoil, checkpoint=f"the save of step {strike.step}", file=name, shown=str(found[name]))


def _saved(outputs: tuple[str, ...], since_s: float) -> Iterator[tuple[Path, str]]:
    for output in outputs:
        for path in sorted(Path(output).rglob("*")):
            if path.is_file() and not path.is_symlink() and path.stat().st_ctime >= since_s and path.stat().st_nlink == 1:
                yield path, os.path.relpath(path, output)


def _struck(seen: Observation) -> Disproof | None:
    """Why it did not die before the planned operation; None when it did."""
    note: SaveNote | None = seen.note
    if note is None or note.struck_s is None:
        return Disproof("nothing_said", "there is no record of the operations before its death")
    wanted = seen.fault.option("operation")
    if wanted is not None and note.done != wanted - 1:
        return Disproof(
            "elsewhere_in_save", f"{count(note.done, 'operation')} were done, operation {wanted} was to be the next"
        )
    return None


def _rebuilt(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Disproof | None:
    done = [event for event in leg.events(OutputsReplaced) if event.fault == seen.fault.id]
    if not done:
        return Disproof("not_rebuilt", "the outputs were not put into the state that a power cut leaves")
    return Disproof("not_rebuilt", done[-1].problem) if done[-1].problem else None


def _describe(seen: Observation) -> str:
    note: SaveNote | None = seen.note
    if note is None:
        return f"{seen.process}: {seen.end}"
    after = f"after {count(note.done, 'operation')} of its save" + (f" ({note.last})" if note.last else "")
    if note.failed:
        return f"{seen.process}: {count(note.failed, 'call')} failed {after}"
    if note.waits:
        return f"{seen.process}: {count(note.waits, 'sync')} waited"
    return f"{seen.process}: {seen.end} {after}"


_WHERE: Mapping[Option, None] = {"operation": None, "file": None}
_at_save = partial(Kind, phases=frozenset({"save"}), default_phase="save")
_by_strace = partial(_at_save, family="storage", evidence="note", note=SaveNote, tell=_describe)
_damaged = partial(
    _at_save,
    family="storage",
    evidence="note",
    note=DamageNote,
    options={"file": None},
    proof="the file was looked at before and after",
    tell=lambda seen: f"{seen.note.file}: {change_of(seen.note)}",
)

AT_SAVE: Mapping[str, Kind] = {
    kind.name: kind
    for kind in (
        _at_save(
            name="kill",
            family="process",
            words="SIGKILL {rank}",
            proof="its process was seen to die of SIGKILL, after the operations that strace saw",
            options=_WHERE,
            inside=_traced("kill"),
            signals=(signal.SIGKILL,),
            note=SaveNote,
            shows=_struck,
            tell=_describe,
        ),
        *(
            _by_strace(
                name=name,
                words=f"{error} while {{rank}} saves",
                proof="strace gave the error",
                options=_WHERE,
                inside=_traced("fail", error),
                may_end=True,
                shows=lambda seen: None if seen.note.failed else Disproof("nothing_failed", "no call was given an error"),
            )
            for name, error in (("no_space", "ENOSPC"), ("io_error", "EIO"))
        ),
        _by_strace(
            name="slow_storage",
            words="{rank} waits {duration_s:g} s for the storage at every fsync of its save",
            proof="strace made the syncs wait",
            options={"duration_s": 0.2},
            inside=_traced("slow"),
            shows=lambda seen: None if seen.note.waits else Disproof("no_wait", "nothing was synced meanwhile"),
        ),
        _damaged(name="truncate", words="truncate a file that {rank} saved", inside=_damage("*", truncate)),
        _damaged(name="zero_tail", words="zero the tail of a file that {rank} saved", inside=_damage("*", zero_tail)),
        _damaged(name="flip_file_bit", words="flip one bit in a file that {rank} saved", inside=_damage("*", flip_bit)),
        _damaged(name="missing_file", words="remove a file that {rank} saved", inside=_damage(OPTIMIZER, Path.unlink)),
    )
}
"""Kinds that exist at other phases, too, as they are at the phase `save`."""

KINDS = (
    _at_save(
        name="power_cut",
        family="storage",
        words="cut the power of {rank}, what was not synced {unsynced},",
        proof="its process was seen to die of SIGKILL, and the outputs were replaced by what had been synced",
        options={"operation": None, "unsynced": "lost"},
        inside=_cut_power,
        witnessed=True,
        signals=(signal.SIGKILL,),
        note=SaveNote,
        shows=_struck,
        aftermath=_rebuilt,
        tell=_describe,
    ),
)
