"""Faults of the storage while a checkpoint is written: writes that fail or are slow."""

import errno
import os
import time
from collections.abc import Callable
from functools import partial

from chaosrun.errors import ResourcesError
from chaosrun.faults.kind import Kind
from chaosrun.faults.observed import Disproof, Observation, brief, other_error
from chaosrun.faults.strike import Strike
from chaosrun.records.events import FaultRequested
from chaosrun.records.filesystem import Filesystem, Moment, Operation
from chaosrun.records.history import LegHistory
from chaosrun.records.markers import Note
from chaosrun.wording import count

FULL_DEVICE = "/dev/full"


class WaitNote(Note, frozen=True, kw_only=True):
    waits: int = 0
    waited_s: float = 0.0


class RequestNote(Note, frozen=True, kw_only=True):
    requests: int = 0
    """Requests that the store was made to answer wrongly or not at all."""
    accepted: int = 0
    """Later requests that it answered."""


def no_space(strike: Strike) -> None:
    """The kernel's own ENOSPC, in the middle of the file: from here on its descriptor points to a device that is always full. A
    device cannot be synced, so at an fsync the error is raised here, with the kernel's message."""
    descriptor = strike.at.get("descriptor")
    if descriptor is None or not os.path.exists(FULL_DEVICE):
        raise _failure(strike, errno.ENOSPC)
    full = os.open(FULL_DEVICE, os.O_WRONLY | os.O_CLOEXEC)
    os.dup2(full, descriptor, inheritable=False)
    os.close(full)


def io_error(strike: Strike) -> None:
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
        strike.note(WaitNote(final=final, waits=len(waits), waited_s=sum(waits), problem=problem))

    def stop() -> None:
        disk.listeners.remove(wait)
        tell(final=True)

    tell(final=False)
    # As the first listener, to wait before any other fault strikes there.
    disk.listeners.insert(0, wait)
    strike.at["until_saved"].callback(stop)


def failed_put(strike: Strike) -> None:
    """Break the connection when half of this rank's next uploaded file is stored."""
    objects = strike.at["objects"]

    def cut(request: str, key: str, moment: Moment) -> None:
        if request == "put" and moment == "after":
            objects.listeners.remove(cut)
            whole = objects.read(key)
            objects.delete(key)
            objects.put_new(key, whole[: len(whole) // 2])
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    objects.listeners.append(cut)


def lost_reply(strike: Strike) -> None:
    """Let the conditional put that commits succeed, and lose its reply."""

    def answer(request: str, moment: Moment, note: RequestNote) -> RequestNote:
        if (request, moment, note.requests) == ("create", "after", 0):
            return RequestNote(requests=1)
        accepted = (request, moment) == ("read", "after")  # the object was read back
        return RequestNote(requests=note.requests, accepted=note.accepted + (accepted and note.requests))

    _meddle(strike, answer, lambda: TimeoutError("no reply"))


def throttled_store(strike: Strike) -> None:
    """Refuse this rank's requests for a while, as an overloaded store does."""
    until_s = time.monotonic() + strike.option("duration_s")

    def answer(request: str, moment: Moment, note: RequestNote) -> RequestNote:
        refused = moment == "before" and time.monotonic() < until_s
        accepted = moment == "after" and note.requests > 0
        return RequestNote(requests=note.requests + refused, accepted=note.accepted + accepted)

    _meddle(strike, answer, lambda: OSError(errno.EBUSY, "Please reduce your request rate"))


def late_listing(strike: Strike) -> None:
    """Until this checkpoint is saved and retention is done, make listings show only objects that existed at its beginning."""
    objects = strike.at["objects"]
    list_now, stood = objects.listed, objects.listed("")
    left_out: list[list[str]] = []

    def listed(prefix: str) -> list[str]:
        shown = [key for key in stood if key.startswith(f"{prefix}/")]
        if missing := [key for key in list_now(prefix) if key not in shown]:
            left_out.append(missing)
        return shown

    def stop() -> None:
        objects.listed = list_now
        there = sum(objects.size(key) is not None for key in {key for keys in left_out for key in keys})
        problem = None if left_out else "no listing had a new object to leave out"
        strike.note(RequestNote(final=True, requests=len(left_out), accepted=there, problem=problem))

    strike.note(RequestNote(final=False, problem="the checkpoint was never saved"))
    objects.listed = listed
    strike.at["until_saved"].callback(stop)


def _meddle(strike: Strike, answer: Callable[[str, Moment, RequestNote], RequestNote], error: Callable[[], OSError]) -> None:
    """Fail each request for which `answer` counts one more in `requests`, until the checkpoint is saved."""
    objects = strike.at["objects"]
    note = RequestNote()

    def tell(*, final: bool) -> None:
        problem = None if note.requests else "no request was made to the store"
        strike.note(RequestNote(final=final, requests=note.requests, accepted=note.accepted, problem=problem))

    def meddle(request: str, key: str, moment: Moment) -> None:
        nonlocal note
        before, note = note, answer(request, moment, note)
        if note.requests > before.requests or (note.accepted and not before.accepted):
            tell(final=note.accepted > 0)
        if note.requests > before.requests:
            raise error()

    def stop() -> None:
        objects.listeners.remove(meddle)
        if not note.accepted:
            tell(final=True)

    tell(final=False)
    objects.listeners.append(meddle)
    strike.at["until_saved"].callback(stop)


def _failure(strike: Strike, code: int) -> OSError:
    return OSError(code, os.strerror(code), str(strike.at["path"]))


_CALLS = {"checkpoint.file": "write", "checkpoint.fsync.before": "fsync", "checkpoint.rename.before": "rename"}


def _failed_by(number: int) -> Callable[[Observation], Disproof | None]:
    def shows(seen: Observation) -> Disproof | None:
        end = seen.death.end
        return other_error(seen, unless=end is not None and end.errno == number)

    return shows


def _waited(seen: Observation) -> Disproof | None:
    note: WaitNote = seen.note
    short = not note.waits or note.waited_s < note.waits * seen.fault.option("duration_s") - 1e-3
    return Disproof("no_wait", f"the storage made it wait {note.waits} times, {note.waited_s} s in all") if short else None


def _accepted(seen: Observation) -> Disproof | None:
    note: RequestNote = seen.note
    if note.requests and note.accepted:
        return None
    return Disproof("not_accepted", f"of {count(note.requests, 'request')} nothing was there afterwards")


def _committed(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Disproof | None:
    later = next((attempt for attempt in leg.attempts if attempt.number > seen.attempt), None)
    if later is None or later.resume_step < (saved := asked.step or 0):
        return None
    return Disproof("committed", f"the checkpoint of step {saved} was committed all the same")


def _describe_error(seen: Observation) -> str:
    number = seen.death.end and seen.death.end.errno
    if number is None:
        return f"{seen.process}: {brief(seen.error or seen.end)}"
    return f"{seen.process}: {errno.errorcode[number]} from {_CALLS.get(seen.fault.phase or '', 'the storage')}"


def _describe_late(seen: Observation) -> str:
    lacked = f"{count(seen.note.requests, 'listing')} left out {count(seen.note.accepted, 'object')}"
    return f"{seen.process}: {lacked} that were new, and are still there"


_of_storage = partial(
    Kind, family="storage", beside=True, phases=frozenset({"checkpoint.begin"}), default_phase="checkpoint.begin"
)
_by_requests = partial(_of_storage, needs_objects=True, evidence="note", note=RequestNote, shows=_accepted)
_while_it_writes = partial(
    _of_storage,
    phases=frozenset({"checkpoint.file", "checkpoint.fsync.before"}),
    default_phase="checkpoint.file",
    exit_code=ResourcesError.exit_code,
    tell=_describe_error,
)

KINDS = (
    _while_it_writes(
        name="no_space",
        words="ENOSPC while {rank} writes a checkpoint",
        proof="its end record names ENOSPC",
        inside=no_space,
        shows=_failed_by(errno.ENOSPC),
    ),
    _while_it_writes(
        name="io_error",
        words="EIO while {rank} writes a checkpoint",
        proof="its end record names EIO",
        inside=io_error,
        shows=_failed_by(errno.EIO),
    ),
    _of_storage(
        name="slow_storage",
        words="{rank} waits {duration_s:g} s for the storage at every fsync of a checkpoint",
        proof="the waits were counted and timed",
        options={"duration_s": 0.2},
        inside=slow_storage,
        evidence="note",
        note=WaitNote,
        shows=_waited,
        tell=lambda seen: f"{seen.process}: {count(seen.note.waits, 'fsync')} took {seen.note.waited_s:.2g} s longer in all",
    ),
    _while_it_writes(
        name="failed_rename",
        words="the rename that commits a checkpoint fails (EIO)",
        proof="rank 0's end record names EIO, and nothing was committed",
        phases=frozenset({"checkpoint.rename.before"}),
        default_phase="checkpoint.rename.before",
        only_rank=0,
        inside=io_error,
        shows=_failed_by(errno.EIO),
        aftermath=_committed,
    ),
    _while_it_writes(
        name="failed_put",
        words="the object store takes half of a file of {rank} and fails (EIO)",
        proof="its end record names EIO, and nothing was committed",
        phases=frozenset({"checkpoint.begin"}),
        default_phase="checkpoint.begin",
        needs_objects=True,
        inside=failed_put,
        shows=_failed_by(errno.EIO),
        aftermath=_committed,
    ),
    _by_requests(
        name="lost_reply",
        words="the put that commits a checkpoint is done, and its reply is lost",
        proof="the reply was withheld, and the object was asked for and accepted",
        only_rank=0,
        inside=lost_reply,
        tell=lambda seen: f"{seen.process} lost the reply to {count(seen.note.requests, 'request')}, and saved the checkpoint",
    ),
    _by_requests(
        name="late_listing",
        words="the object store lists what was there before a checkpoint, until retention is done",
        proof="what the listings left out was there by its key, before and after",
        only_rank=0,
        inside=late_listing,
        tell=_describe_late,
    ),
    _by_requests(
        name="throttled_store",
        words="the object store refuses the requests of {rank} for {duration_s:g} s",
        proof="the refusals were counted, and later requests accepted",
        options={"duration_s": 0.5},
        inside=throttled_store,
        tell=lambda seen: f"{seen.process} was refused {count(seen.note.requests, 'request')}, and saved the checkpoint",
    ),
)
