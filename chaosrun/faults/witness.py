"""The witness of a node's end: a small process that outlives the agent it was started by, strikes, and writes down what it saw.

`python -m chaosrun.faults.witness` with one JSON object on its standard input: leg_path, fault, about (goes into the note as
it is), strike and watch (lists of {what, pid, start_ticks}), mark, limit_s. It sends SIGKILL to those of `strike`, known by pid
and start time, and waits until those of both lists and every process marked with `mark` are gone. Its note (`records.markers`)
lists whom it struck, who is gone and who is not. Standard library only; imports neither ray nor torch.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chaosrun.processes import ProcessIdentity, identify, is_alive, marked, send_signal, with_package
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import write_note

LIMIT_S = 30.0
POLL_S = 0.02
Seen = Mapping[str, Any]
"""A process: what {"agent", "fork server", "raylet", "rank 1", …}, pid, start_ticks."""


def call_witness(
    leg_path: str, fault: str, *, about: Mapping[str, Any], strike: Sequence[Seen], watch: Sequence[Seen], mark: str
) -> None:
    """Start a witness and return; it is nobody's child, so it outlives whoever dies here."""
    order = {"leg_path": leg_path, "fault": fault, "about": about, "strike": strike, "watch": watch, "mark": mark}
    process = subprocess.Popen(
        [sys.executable, "-m", "chaosrun.faults.witness"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=with_package(os.environ),
        start_new_session=True,
    )
    process.communicate(json.dumps({**order, "limit_s": LIMIT_S}).encode())


def main() -> int:
    order = json.loads(sys.stdin.buffer.read())
    # A process that Ray ends kills its direct children first: be none.
    if os.fork() > 0:
        os._exit(0)
    # In a process that others have come to know by this mark; ours is not one of them.
    struck = [seen for seen in order["strike"] if send_signal(_identity(seen), signal.SIGKILL)]
    every = {(seen["pid"], seen["start_ticks"]): seen for seen in (*order["strike"], *order["watch"])}
    deadline = time.monotonic() + order["limit_s"]
    left = _still_there(every, order["mark"])
    while left and time.monotonic() < deadline:
        time.sleep(POLL_S)
        left = _still_there(every, order["mark"])
    alive = {(seen["pid"], seen["start_ticks"]) for seen in left}
    gone = [seen for who, seen in every.items() if who not in alive]
    names = ", ".join(f"{seen['what']} ({seen['pid']})" for seen in left)
    problem = f"{order['limit_s']:g} s after the strike there still was: {names}" if left else None
    leg = LegLayout(Path(order["leg_path"]))
    write_note(leg, order["fault"], **order["about"], struck=struck, gone=gone, left=left, problem=problem)
    return 0


def _still_there(every: dict[tuple[int, int], Seen], mark: str) -> list[Seen]:
    """Who of them lives. Marked processes that nobody had named are named from now on."""
    for found in marked(mark) if mark else ():
        who = (found.pid, found.start_ticks)
        every.setdefault(who, {"what": "process below", "pid": found.pid, "start_ticks": found.start_ticks})
    return [seen for seen in every.values() if is_alive(_identity(seen))]


def seen_as(what: str, pid: int) -> Seen | None:
    """How a live process is named to a witness."""
    identity = identify(pid)
    return None if identity is None else {"what": what, "pid": pid, "start_ticks": identity.start_ticks}


def _identity(seen: Seen) -> ProcessIdentity:
    return ProcessIdentity(seen["pid"], seen["start_ticks"])


if __name__ == "__main__":
    sys.exit(main())
