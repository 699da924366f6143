"""Faults of the storage while a checkpoint is written: writes that fail, or take their time."""

from __future__ import annotations

import errno
import os
import time
from typing import TYPE_CHECKING

from chaosrun.faults.kind import Kind
from chaosrun.faults.observed import Observation, Problem, brief
from chaosrun.faults.strike import Strike
from chaosrun.records.filesystem import Filesystem, Moment, Operation
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.records.events import FaultRequested
    from chaosrun.records.history import LegHistory

FULL_DEVICE = "/dev/full"


def no_space(strike: Strike) -> None:
    """The kernel's own ENOSPC, in the middle of the file: from here on its descriptor leads to a device that is always full.
    Devices are not synced, so at an fsync it is said in the kernel's words."""
    descriptor = strike.at.get("descriptor")
    if descriptor is None or not os.path.exists(FULL_DEVICE):
        raise _failure(strike, errno.ENOSPC)
    full = os.open(FULL_DEVICE, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, descriptor, inheritable=False)
    os.close(full)


def io_error(strike: Strike) -> None:
    raise _failure(strike, errno.EIO)


def failed_rename(strike: Strike) -> None:
    raise _failure(strike, errno.EIO)


def slow_storage(strike: Strike) -> None:
    """Wait before each fsync that this rank makes for the checkpoint, until it is saved."""
    disk: Filesystem = strike.at["disk"]
    waits: list[float] = []

    def wait(operation: Operation, moment: Moment) -> None:
        if operation.kind == "fsync" and moment == "before":
            began = time.monotonic()
            time.sleep(strike.option("duration_s"))
            waits.append(time.monotonic() - began)

    def tell(*, final: bool) -> None:
        problem = None if waits else "nothing was synced meanwhile"
        strike.note(final=final, waits=len(waits), waited_s=sum(waits), longest_s=max(waits, default=0.0), problem=problem)

    def stop() -> None:
        disk.listeners.remove(wait)
        tell(final=True)

    tell(final=False)
    # First of all: what is slow is slow before any other fault strikes there.
    disk.listeners.insert(0, wait)
    strike.at["until_saved"].callback(stop)


def _failure(strike: Strike, code: int) -> OSError:
    return OSError(code, os.strerror(code), str(strike.at["path"]))


_CALLS = {"checkpoint.file": "write", "checkpoint.fsync.before": "fsync", "checkpoint.rename.before": "rename"}
_ERRNO_NAMES = {os.strerror(number): errno.errorcode[number] for number in (errno.ENOSPC, errno.EIO)}


def _waited(seen: Observation) -> Problem | None:
    waits, waited_s = seen.found.get("waits"), seen.found.get("waited_s")
    short = not waits or not waited_s or waited_s < waits * seen.fault.option("duration_s") - 1e-3
    return Problem("no_wait", f"the storage made it wait {waits} times, {waited_s} s in all") if short else None


def _committed(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Problem | None:
    later = next((attempt for attempt in leg.attempts if attempt.number > seen.attempt), None)
    if later is None or later.resume_step < (saved := asked.step or 0):
        return None
    return Problem("committed", f"the checkpoint of step {saved} was committed all the same")


def _tell_error(seen: Observation) -> str:
    name = next((name for words, name in _ERRNO_NAMES.items() if words in seen.error), None)
    call = _CALLS.get(seen.fault.phase or "", "the storage")
    return f"{seen.process}: {name} from {call}" if name else f"{seen.process}: {brief(seen.error or seen.end)}"


def _tell_waits(seen: Observation) -> str:
    waits = count(seen.found["waits"], "fsync")
    return f"{seen.process}: {waits} took {seen.found.get('waited_s') or 0.0:.2g} s longer in all"


_STORAGE_FAILED = r"^ResourcesError: checkpoint storage failed at .*: "
_WHILE_IT_WRITES = frozenset({"checkpoint.file", "checkpoint.fsync.before"})

KINDS = (
    Kind(
        name="no_space",
        family="storage",
        words="ENOSPC while {rank} writes a checkpoint",
        proof="its end record names ENOSPC",
        phases=_WHILE_IT_WRITES,
        default_phase="checkpoint.file",
        inside=no_space,
        exit_codes="failure",
        tell=_tell_error,
        error=f"{_STORAGE_FAILED}No space left on device",
    ),
    Kind(
        name="io_error",
        family="storage",
        words="EIO while {rank} writes a checkpoint",
        proof="its end record names EIO",
        phases=_WHILE_IT_WRITES,
        default_phase="checkpoint.file",
        inside=io_error,
        exit_codes="failure",
        tell=_tell_error,
        error=f"{_STORAGE_FAILED}Input/output error",
    ),
    Kind(
        name="slow_storage",
        family="storage",
        words="{rank} waits {duration_s:g} s for the storage at every fsync of a checkpoint",
        proof="the waits were counted and timed",
        phases=frozenset({"checkpoint.begin"}),
        default_phase="checkpoint.begin",
        options={"duration_s": 0.2},
        inside=slow_storage,
        ends_attempt=False,
        evidence="note",
        shows=_waited,
        tell=_tell_waits,
    ),
    Kind(
        name="failed_rename",
        family="storage",
        words="the rename that commits a checkpoint fails (EIO)",
        proof="rank 0's end record names EIO, and nothing was committed",
        phases=frozenset({"checkpoint.rename.before"}),
        default_phase="checkpoint.rename.before",
        only_rank=0,
        inside=failed_rename,
        exit_codes="failure",
        aftermath=_committed,
        tell=_tell_error,
        error=f"{_STORAGE_FAILED}Input/output error",
    ),
)
