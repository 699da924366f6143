"""Observes this node's ranks: their heartbeats, their state in the kernel and, on request, their Python stacks.

Owns how a process's stacks are requested, and how the answer in its log is recognised and read. faulthandler answers in C,
without the GIL: a rank that holds the GIL in native code, or waits for it, still answers; a stopped one cannot. Decides nothing
about hangs.
"""

import asyncio
import os
import re
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from chaosrun.cluster.messages import RankStack
from chaosrun.processes import STACKS_SIGNAL, ProcessIdentity, catches, children, cpu_and_state, identify, send_signal, state_of
from chaosrun.records.heartbeat import Activity, read_heartbeat
from chaosrun.records.layout import AttemptLayout, LegLayout

LOOK_S = 0.02
QUIET_S = 0.1
"""An answer is complete when the log has not grown for this time."""
CHILDREN = 8
"""At most so many children of a rank (loader workers) are asked, too."""
DEEPEST = 30
"""At most so many frames are reported, innermost first."""

_FRAME = re.compile(r'  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)')
_BELOW = f"{Path(__file__).parent}/"
_STOPPED = frozenset("Tt")


async def write_stacks(
    ranks: Mapping[int, ProcessIdentity], leg: LegLayout, attempt: int, wait_s: float
) -> dict[int, RankStack]:
    """Request the stacks of ranks, then of their children, each with a limited wait; returns the ranks' stacks, by rank."""
    deadline = time.monotonic() + wait_s

    def title(rank: int) -> str:
        return f"attempt {attempt} hangs; where the threads of rank {rank}, process {ranks[rank].pid}, are"

    asked = [_ask(identity, leg.attempt(attempt).log(rank), title(rank), deadline) for rank, identity in ranks.items()]
    return dict(zip(ranks, await asyncio.gather(*asked), strict=True))


async def _ask(identity: ProcessIdentity, log: Path, title: str, deadline: float) -> RankStack:
    # Read the state before asking: a process that answers is running.
    state, stack = state_of(identity), list[str]()
    with suppress(OSError):  # the log cannot be written
        offset = _announce(log, title)
        if await _answered(identity, log, offset, deadline):
            with log.open("rb") as file:
                file.seek(offset)
                # Read as bytes: a script may print anything.
                stack = main_thread(file.read().decode(errors="replace"))
            if not stack:
                _announce(log, f"no answer: the process is in state {state}")
            # Its children one after the other, as they write into the same log.
            for pid in children(identity.pid)[:CHILDREN]:
                if (child := identify(pid)) is not None and catches(child, STACKS_SIGNAL):
                    await _answered(child, log, _announce(log, f"its child, process {pid}"), deadline)
    return RankStack(pid=identity.pid, state=state, stack=tuple(stack))


async def _answered(identity: ProcessIdentity, log: Path, offset: int, deadline: float) -> bool:
    """Request the stacks of a process, and wait until its answer is complete. False: it was not asked."""
    # Without a handler the signal would kill it.
    if not catches(identity, STACKS_SIGNAL) or not send_signal(identity, STACKS_SIGNAL):
        return False
    size, grown_s = offset, None
    while (now_s := time.monotonic()) < deadline and state_of(identity) not in (None, "Z", *_STOPPED):
        if (seen := log.stat().st_size) != size:
            size, grown_s = seen, now_s
        elif grown_s is not None and now_s - grown_s > QUIET_S:
            return True
        await asyncio.sleep(LOOK_S)
    return True


def main_thread(text: str) -> list[str]:
    """The main thread's stack in faulthandler's output, innermost first, down to where the rank was forked.

    It is the last one: faulthandler lists new threads first.
    """
    stack: list[str] = []
    for line in text.splitlines():
        if line.startswith(("Thread 0x", "Current thread 0x")):
            stack = []
        elif (match := _FRAME.fullmatch(line)) is not None:
            stack.append(f"{match['file']}:{match['line']} in {match['function']}")
    return [frame for frame in stack if not frame.startswith(_BELOW)][:DEEPEST]


def _announce(log: Path, title: str) -> int:
    """Write a title into a log, and return the offset after it."""
    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    try:
        os.write(descriptor, f"--- chaosrun: {title} ---\n".encode())
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def read_activities(layout: AttemptLayout, ranks: Iterable[int], live: Mapping[int, int]) -> dict[int, Activity]:
    """Heartbeats and processor time of this node's ranks; `live`: by rank, pids of those that have not exited."""
    found: dict[int, Activity] = {}
    for rank in ranks:
        cpu_s, state = cpu_and_state(live[rank]) if rank in live else (0.0, None)
        found[rank] = Activity(beat=read_heartbeat(layout.heartbeat(rank)), cpu_s=cpu_s, is_stopped=state == "T")
    return found
