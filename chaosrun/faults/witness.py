"""The witness of a node's end: a small process that outlives the agent that started it, strikes, and records what it saw.

`python -m chaosrun.faults.witness` with a `WitnessOrder` on its standard input. It sends SIGKILL to the processes of `strike`,
identified by pid and start time, and waits until these, those of `watch`, and every process with that mark are gone. Its note
lists which it struck, which are gone and which are not. Imports neither ray nor torch.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from chaosrun.faults.node_evidence import UNNAMED, EndNote, NamedProcess
from chaosrun.processes import ProcessIdentity, is_alive, marked, send_signal, with_package
from chaosrun.records.codec import Record, changed, decode, encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import write_note

LIMIT_S = 30.0
POLL_S = 0.02


class WitnessOrder(Record, frozen=True, kw_only=True):
    leg_path: str
    fault: str
    about: EndNote
    """The note that it writes, still without its observations."""
    strike: tuple[NamedProcess, ...]
    watch: tuple[NamedProcess, ...]
    mark: str
    limit_s: float = LIMIT_S


def call_witness(order: WitnessOrder) -> None:
    """Start a detached witness and return; it outlives the processes that die here."""
    process = subprocess.Popen(
        [sys.executable, "-m", "chaosrun.faults.witness"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=with_package(os.environ),
        start_new_session=True,
    )
    process.communicate(encode(order))


def main() -> int:
    order = decode(sys.stdin.buffer.read(), msgspec.json.Decoder(WitnessOrder))
    # A process that Ray ends kills its direct children first, so the witness must not be one.
    if os.fork() > 0:
        os._exit(0)
    # The witness itself does not bear `order.mark`, which the fork server gives to all below it.
    struck = tuple(each for each in order.strike if is_alive(each.identity))
    for each in struck:
        send_signal(each.identity, signal.SIGKILL)  # one may have ended already, with another that was struck before it
    every = {each.identity: each for each in (*order.strike, *order.watch)}
    deadline = time.monotonic() + order.limit_s
    while (left := _still_there(every, order.mark)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    gone = tuple(each for each in every.values() if each not in left)
    names = ", ".join(f"{each.what} ({each.pid})" for each in left)
    problem = f"{order.limit_s:g} s after the strike there still was: {names}" if left else None
    note = changed(order.about, struck=struck, gone=gone, left=left, problem=problem)
    write_note(LegLayout(Path(order.leg_path)), order.fault, note)
    return 0


def _still_there(every: dict[ProcessIdentity, NamedProcess], mark: str) -> tuple[NamedProcess, ...]:
    """Which of them are alive. Marked processes that are not listed yet are added to `every`."""
    for found in marked(mark) if mark else ():
        every.setdefault(found, NamedProcess(what=UNNAMED, pid=found.pid, start_ticks=found.start_ticks))
    return tuple(each for each in every.values() if is_alive(each.identity))


if __name__ == "__main__":
    sys.exit(main())
