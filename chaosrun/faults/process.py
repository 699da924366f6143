"""Faults that end one process: it is killed, preempted, raises, exits silently, runs out of memory, loses a loader worker.

Signals are sent by the rank to itself when it reaches their point, or by its agent after a delay.
"""

import ctypes
import os
import re
import resource
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

from chaosrun.faults.kind import LEFT_ON_NOTICE, PREEMPTED_EXIT_CODE, TRAINING_PHASES, Kind
from chaosrun.faults.observed import Disproof, Observation, other_error, own_error
from chaosrun.faults.outside import OutsideStrike
from chaosrun.faults.strike import Strike
from chaosrun.processes import PACKAGE_ROOT, ProcessIdentity, catches, children, identify, is_alive, leave_at_once, wait_gone
from chaosrun.records.markers import Note
from chaosrun.wording import MIB

BALLAST_LIMIT = 2
"""Give up once this many times the allowance was allocated: the limit does not hold."""
TORCH_HEARS_WITHIN_S = 1.0
"""torch hears of a dead loader worker at once, by SIGCHLD; otherwise only after waiting 5 s for a batch, not done here."""


LISTENER = "chaosrun.protocol.preemption"
"""The module of the handler by which an attached script hears of a notice."""


class InjectedError(Exception):
    """Raised by a fault of kind `exception`."""

    chaosrun_fault = ""


class NoticeNote(Note, frozen=True, kw_only=True):
    unhandled: bool = False
    """The process had no handler for the SIGTERM."""
    taken: bool = False
    """An attached script's own handler had replaced chaosrun's, and may leave no end record that says so."""


TAKEN = NoticeNote(taken=True, problem="a handler of the script's own took the notice", problem_code="notice_taken")


class MemoryLimitNote(Note, frozen=True, kw_only=True):
    taken_mib: int | None = None
    limit_mib: int | None = None


class LoaderWorkerNote(Note, frozen=True, kw_only=True):
    victim: int | None = None
    start_ticks: int | None = None


def preempt(strike: Strike) -> None:
    """Send the notice, and SIGKILL when grace runs out. `protocol.preemption`, or the script, decides what the rank does."""
    handler = signal.getsignal(signal.SIGTERM)
    if handler == signal.SIG_DFL:
        strike.note(NoticeNote(unhandled=True))
    elif strike.order.by == "chaosrun" and getattr(handler, "__module__", None) != LISTENER:
        strike.note(NoticeNote(taken=True))
    signal_later(strike, strike.option("grace_s"), "kill")
    os.kill(strike.pid, signal.SIGTERM)


def preempt_from_outside(strike: OutsideStrike) -> bool:
    def end_grace() -> None:
        wait_gone([strike.victim], timeout_s=strike.option("grace_s"))
        strike.signal(signal.SIGKILL)

    if is_alive(strike.victim) and not catches(strike.victim, signal.SIGTERM):
        strike.note(NoticeNote(unhandled=True))
    return strike.signal(signal.SIGTERM) and strike.later(end_grace)


def segfault(strike: Strike) -> None:
    """Read from address 0."""
    _dump_nothing()
    ctypes.string_at(0)


def abort(strike: Strike) -> None:
    """End as NCCL's watchdog does after a collective timed out, or C++ after an uncaught exception."""
    _dump_nothing()
    os.abort()


def _dump_nothing() -> None:
    """Switch off the core dump, which would only cost time and disk space."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))


def exception(strike: Strike) -> None:
    error = InjectedError(f"fault {strike.fault.id}: raised on purpose {strike.fault.moment()}")
    error.chaosrun_fault = strike.fault.id
    raise error


def memory(strike: Strike) -> None:
    """Limit the address space of this process to slightly more than it uses, and allocate memory until none is left."""
    allowance = strike.option("mebibytes")
    has_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limit, hard = has_bytes + allowance * MIB, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    ballast: list[bytearray] = []
    try:
        while len(ballast) < BALLAST_LIMIT * allowance + 1024:
            ballast.append(bytearray(b"\1") * MIB)  # written to, so that the pages are really allocated
    except MemoryError as error:
        taken = len(ballast)
        ballast.clear()  # otherwise no memory is left to report it
        strike.note(MemoryLimitNote(taken_mib=taken, limit_mib=limit // MIB))
        error.chaosrun_fault = strike.fault.id  # type: ignore[attr-defined]
        error.args = (f"fault {strike.fault.id}: {taken} MiB taken, then the limit ({limit // MIB} MiB) of this process held",)
        raise
    taken = len(ballast)
    ballast.clear()
    strike.note(MemoryLimitNote(problem=f"{taken} MiB could be taken under a limit that allows {allowance} MiB"))


def loader_worker(strike: Strike) -> None:
    """Kill one live loader worker of this rank; torch then raises here, or when it next needs a batch from it."""
    assert strike.training is not None
    for victim, started in strike.training.loader_workers():
        if not is_alive(ProcessIdentity(victim, started)) or victim not in children(strike.pid):
            continue  # it has ended
        strike.note(LoaderWorkerNote(victim=victim, start_ticks=started))
        # Our own child: its pid is not reused until this process reaps it, which does not happen in between.
        os.kill(victim, signal.SIGKILL)
        time.sleep(TORCH_HEARS_WITHIN_S)
        return
    none = f"rank {strike.rank} has no live loader worker at this point"
    strike.note(LoaderWorkerNote(problem=none, problem_code="no_loader_worker"))


def signal_later(strike: Strike, seconds: float, do: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    """Start a tiny process that signals this one later (`faults.delayed_signal`); its process group dies with the rank."""
    command = [sys.executable, "-P", "-S", "-m", "chaosrun.faults.delayed_signal"]
    # The script's own directory, or its PYTHONPATH, must not hide this package.
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    own = identify(strike.pid)
    assert own is not None
    return subprocess.Popen(
        [*command, str(own.pid), str(own.start_ticks), str(seconds), do],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment,
    )


def _silent(seen: Observation) -> Disproof | None:
    if (end := seen.death.end) is None:
        return None
    return Disproof("end_record", f"the process left an end record ({end.status}), a fault of kind exit leaves none")


def _on_notice(seen: Observation) -> Disproof | None:
    end = seen.death.end
    return other_error(seen, unless=end is not None and end.status == LEFT_ON_NOTICE and end.told)


def _lost_worker(seen: Observation) -> Disproof | None:
    """Why the error is not torch's about this loader worker; None when it is."""
    note: LoaderWorkerNote | None = seen.note
    if note is None or note.victim is None:
        return Disproof("nothing_said", "the fault's record names no victim")
    return other_error(seen, unless=bool(re.search(rf"^RuntimeError: DataLoader worker \(pid.*\b{note.victim}\b", seen.error)))


def _describe_notice(seen: Observation) -> str:
    if seen.signal is None:
        return f"{seen.process}: left on the notice ({seen.end})"
    after_s = seen.death.after_s
    if seen.signal in (signal.SIGTERM, signal.SIGINT):
        unhandled = isinstance(seen.note, NoticeNote) and seen.note.unhandled
        return f"{seen.process}: {seen.end}, which the script {'did not handle' if unhandled else 'left by, on the notice'}"
    when = "" if after_s is None else f" {after_s:.1f} s after the notice"
    return f"{seen.process}: {seen.end}{when}, when grace had run out"


def _describe_memory(seen: Observation) -> str:
    note: MemoryLimitNote | None = seen.note
    more = ""
    if note and note.taken_mib and note.limit_mib:
        more = f" after {note.taken_mib} MiB, at a limit of {note.limit_mib / 1024:.1f} GiB"
    return f"{seen.process}: MemoryError{more}"


def _describe_loader_worker(seen: Observation) -> str:
    victim = seen.note and seen.note.victim
    return f"{f'loader worker {victim}' if victim else 'a loader worker'} of {seen.process}: SIGKILL"


_of_one = partial(Kind, family="process")

KINDS = (
    _of_one(
        name="kill",
        beside=True,
        words="SIGKILL {rank}",
        proof="its process was seen to die of SIGKILL",
        inside=lambda strike: strike.die(signal.SIGKILL),
        outside=lambda strike: strike.signal(signal.SIGKILL),
        loss=True,
        signals=(signal.SIGKILL,),
    ),
    _of_one(
        name="preempt",
        words="preemption notice (SIGTERM, {grace_s:g} s of grace) to {rank}",
        proof="its end record says that it left on the notice, or it died of SIGKILL when grace had run out",
        phases=TRAINING_PHASES,
        options={"grace_s": 30.0},
        inside=preempt,
        outside=preempt_from_outside,
        notice=True,
        loss=True,
        signals=(signal.SIGKILL,),
        exit_code=PREEMPTED_EXIT_CODE,
        note=NoticeNote,
        shows=_on_notice,
        tell=_describe_notice,
    ),
    _of_one(
        name="segfault",
        words="segmentation fault in {rank}",
        proof="its process was seen to die of SIGSEGV",
        inside=segfault,
        outside=lambda strike: strike.signal(signal.SIGSEGV),
        signals=(signal.SIGSEGV,),
    ),
    _of_one(
        name="abort",
        words="SIGABRT in {rank}, as NCCL's watchdog ends a process",
        proof="its process was seen to die of SIGABRT",
        inside=abort,
        outside=lambda strike: strike.signal(signal.SIGABRT),
        signals=(signal.SIGABRT,),
    ),
    _of_one(
        name="exception",
        words="an exception raised in {rank}",
        proof="its end record names that very exception",
        inside=exception,
        exit_code="failure",
        shows=own_error,
        tell=lambda seen: f"{seen.process}: {seen.error.partition(':')[0] or 'an exception'}",
    ),
    _of_one(
        name="exit",
        words="{rank} leaves silently with exit code 0",
        proof="its process was seen to leave with exit code 0 and without an end record",
        inside=lambda strike: leave_at_once(0),
        exit_code=0,
        shows=_silent,
        tell=lambda seen: f"{seen.process}: {seen.end}, no end record",
    ),
    _of_one(
        name="memory",
        words="{rank} runs out of memory within {mebibytes} MiB more",
        proof="its end record names the MemoryError at the limit that was set for it alone",
        options={"mebibytes": 256},
        inside=memory,
        exit_code="failure",
        note=MemoryLimitNote,
        shows=own_error,
        tell=_describe_memory,
    ),
    _of_one(
        name="loader_worker",
        words="SIGKILL a loader worker of {rank}",
        proof="its end record names torch's error about that very loader worker",
        phases=TRAINING_PHASES,
        inside=loader_worker,
        exit_code="failure",
        note=LoaderWorkerNote,
        shows=_lost_worker,
        tell=_describe_loader_worker,
    ),
)
