"""Faults of one process that end it: it is killed, told to leave, raises, leaves, runs out of something.

Those that are signals, the rank sends to itself when it comes to its point; after a delay its agent sends them.
"""

import ctypes
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NoReturn

from chaosrun.faults.kind import PREEMPTED_EXIT_CODE, TRAINING_PHASES, Kind
from chaosrun.faults.observed import Observation
from chaosrun.faults.outside import OutsideStrike, gone_within
from chaosrun.faults.strike import Strike
from chaosrun.processes import PACKAGE_ROOT
from chaosrun.records.markers import start_ticks

MIB = 1 << 20
BALLAST_LIMIT = 2
"""Give up when this many times the allowance could be taken: the limit does not hold."""
TORCH_HEARS_WITHIN_S = 1.0
"""torch hears of a dead loader worker by SIGCHLD, at once; else when it has waited 5 s for a batch, which is not here."""


class InjectedError(Exception):
    """What a fault of kind `exception` raises."""


def kill(strike: Strike) -> None:
    strike.die(signal.SIGKILL)


def preempt(strike: Strike) -> None:
    """The notice, and SIGKILL when grace runs out. What the rank makes of it is `train.preemption`, or the script's own."""
    signal_later(strike, strike.option("grace_s"), "kill")
    os.kill(strike.pid, signal.SIGTERM)


def preempt_from_outside(strike: OutsideStrike) -> bool:
    def end_grace() -> None:
        gone_within([strike.victim], strike.option("grace_s"))
        strike.signal(signal.SIGKILL)

    return strike.signal(signal.SIGTERM) and strike.later(end_grace)


def segfault(strike: Strike) -> None:
    """Read from address 0."""
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))  # a dump of the whole process would only cost time and disk
    ctypes.string_at(0)


def exception(strike: Strike) -> None:
    raise InjectedError(f"fault {strike.fault.id}: raised on purpose {strike.fault.moment()}")


def exit_silently(strike: Strike) -> NoReturn:
    os._exit(0)


def memory(strike: Strike) -> None:
    """Limit the address space of this process to what it has and a little more, and take memory until there is none."""
    allowance = strike.option("mebibytes")
    has_bytes = _address_space_bytes()
    limit, hard = has_bytes + allowance * MIB, resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    ballast: list[bytearray] = []
    try:
        while len(ballast) < BALLAST_LIMIT * allowance + 1024:
            ballast.append(bytearray(b"\1") * MIB)  # written to: these pages are there
    except MemoryError as error:
        taken = len(ballast)
        ballast.clear()  # or there would be no memory to say so
        strike.note(taken_mib=taken, limit_mib=limit // MIB)
        error.args = (f"fault {strike.fault.id}: {taken} MiB taken, then the limit ({limit // MIB} MiB) of this process held",)
        raise
    taken = len(ballast)
    ballast.clear()
    strike.note(problem=f"{taken} MiB could be taken under a limit that allows {allowance} MiB")


def loader_worker(strike: Strike) -> None:
    """Kill one live loader worker of this rank; torch then raises here, or where it next wants a batch of it."""
    assert strike.training is not None
    for victim, started in strike.training.loader_workers():
        if start_ticks(victim) != started or _parent_of(victim) != strike.pid:
            continue  # it has ended
        strike.note(victim=victim, start_ticks=started)
        # Our own child: its pid is not given out again before this process has reaped it, which nobody does meanwhile.
        os.kill(victim, signal.SIGKILL)
        time.sleep(TORCH_HEARS_WITHIN_S)
        return
    strike.note(problem=f"rank {strike.rank} has no live loader worker at this point")


def signal_later(strike: Strike, seconds: float, do: str, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    """A tiny process that signals this one later (`faults.delayed_signal`); in our process group, so it dies with the rank."""
    command = [sys.executable, "-P", "-S", "-m", "chaosrun.faults.delayed_signal"]
    # The script's own directory, or its PYTHONPATH, must not stand in the way.
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_ROOT)}
    return subprocess.Popen(
        [*command, str(strike.pid), str(start_ticks(strike.pid)), str(seconds), do],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        env=environment,
    )


def _address_space_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def _parent_of(pid: int) -> int | None:
    try:
        line = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, parent = line[line.rindex(b")") + 2 :].split()[:2]
    return None if state in (b"Z", b"X") else int(parent)


def _tell_preempt(seen: Observation) -> str:
    if seen.signal is None:
        return f"{seen.process}: left on the notice ({seen.end})"
    after_s = seen.found.get("after_s")
    when = "" if after_s is None else f" {after_s:.1f} s after the notice"
    return f"{seen.process}: {seen.end}{when}, out of grace"


def _tell_memory(seen: Observation) -> str:
    taken, limit = seen.note.get("taken_mib"), seen.note.get("limit_mib")
    more = f" after {taken} MiB, at a limit of {limit / 1024:.1f} GiB" if taken and limit else ""
    return f"{seen.process}: MemoryError{more}"


def _tell_loader_worker(seen: Observation) -> str:
    victim = seen.note.get("victim")
    return f"{f'loader worker {victim}' if victim else 'a loader worker'} of {seen.process}: SIGKILL"


KINDS = (
    Kind(
        name="kill",
        family="process",
        words="SIGKILL {rank}",
        proof="its process was seen to die of SIGKILL",
        inside=kill,
        outside=lambda strike: strike.signal(signal.SIGKILL),
        loss=True,
        signals=frozenset({int(signal.SIGKILL)}),
    ),
    Kind(
        name="preempt",
        family="process",
        words="preemption notice (SIGTERM, {grace_s:g} s of grace) to {rank}",
        proof=f"its process left with exit code {PREEMPTED_EXIT_CODE}, saying so, or died of SIGKILL when grace had run out",
        phases=TRAINING_PHASES,
        options={"grace_s": 30.0},
        inside=preempt,
        outside=preempt_from_outside,
        notice=True,
        loss=True,
        signals=frozenset({int(signal.SIGKILL)}),
        exit_codes="preempted",
        tell=_tell_preempt,
        error=r"^Preempted: rank \d+ was told to leave",
    ),
    Kind(
        name="segfault",
        family="process",
        words="segmentation fault in {rank}",
        proof="its process was seen to die of SIGSEGV",
        inside=segfault,
        outside=lambda strike: strike.signal(signal.SIGSEGV),
        signals=frozenset({int(signal.SIGSEGV)}),
    ),
    Kind(
        name="exception",
        family="process",
        words="an exception raised in {rank}",
        proof="its end record names that very exception",
        inside=exception,
        exit_codes="failure",
        tell=lambda seen: f"{seen.process}: {seen.error.partition(':')[0] or 'an exception'}",
        error=r"^InjectedError: fault {fault}\b",
    ),
    Kind(
        name="exit",
        family="process",
        words="{rank} leaves silently with exit code 0",
        proof="its process was seen to leave with exit code 0 and without an end record",
        inside=exit_silently,
        tell=lambda seen: f"{seen.process}: {seen.end}, no end record",
        exit_codes="zero",
    ),
    Kind(
        name="memory",
        family="process",
        words="{rank} runs out of memory within {mebibytes} MiB more",
        proof="its end record names the MemoryError at the limit that was set for it alone",
        options={"mebibytes": 256},
        inside=memory,
        exit_codes="failure",
        tell=_tell_memory,
        error=r"^MemoryError: fault {fault}\b",
    ),
    Kind(
        name="loader_worker",
        family="process",
        words="SIGKILL a loader worker of {rank}",
        proof="its end record names torch's error about that very loader worker",
        phases=TRAINING_PHASES,
        inside=loader_worker,
        exit_codes="failure",
        tell=_tell_loader_worker,
        error=r"^RuntimeError: DataLoader worker \(pid.*\b{victim}\b",
    ),
)
