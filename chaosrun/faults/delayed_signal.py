"""Sends a later signal to one process, known by pid and start time: SIGKILL when grace runs out, SIGCONT after a pause.

    … PID START_TICKS SECONDS kill     SIGKILL after SECONDS, if it still exists
    … PID START_TICKS SECONDS resume   SIGCONT SECONDS after it was seen stopped; prints "ready", then what was seen, as JSON

A rank starts it in the rank's process group: it dies with the attempt, and ends by itself when the rank does. The agent calls
`pause` for a rank of its node. Standard library only; knows nothing of faults.
"""

import json
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

from chaosrun.processes import ProcessIdentity, send_signal, state_of, wait_gone

STOP_LIMIT_S = 10.0
"""How long to wait until a process is seen stopped after SIGSTOP, or running after SIGCONT."""
LOOK_EVERY_S = 0.001
STOPPED = "T"


def pause(identity: ProcessIdentity, duration_s: float, *, stop: bool = True) -> dict[str, Any]:
    """Stop a process (`stop=False`: wait until it has stopped itself), continue it after `duration_s`, and report its states.

    Returns {state_stopped, state_before, state_after (letters of /proc/PID/stat), stopped_s, signal} and, when this does not
    show a pause, `problem`. A stopped process always gets SIGCONT.
    """
    found: dict[str, object] = {"signal": "SIGSTOP", "state_stopped": None, "state_before": None, "state_after": None}
    if stop and not send_signal(identity, signal.SIGSTOP):
        return {**found, "problem": f"process {identity.pid} was gone before it could be stopped"}
    found["state_stopped"] = _wait_for(identity, lambda state: state in (STOPPED, "Z", None))
    if found["state_stopped"] != STOPPED:
        send_signal(identity, signal.SIGCONT)
        return {**found, "problem": f"process {identity.pid} was never seen stopped"}
    began_s = time.monotonic()
    wait_gone([identity], timeout_s=duration_s)
    found["state_before"] = state_of(identity)
    send_signal(identity, signal.SIGCONT)
    found["stopped_s"] = round(time.monotonic() - began_s, 3)
    found["state_after"] = _wait_for(identity, lambda state: state != STOPPED)
    if found["state_before"] != STOPPED:
        found["problem"] = f"process {identity.pid} did not stay stopped for {duration_s:g} s"
    elif found["state_after"] in (STOPPED, "Z", None):
        found["problem"] = f"process {identity.pid} did not go on after SIGCONT"
    return found


def _wait_for(identity: ProcessIdentity, wanted: Callable[[str | None], bool]) -> str | None:
    deadline = time.monotonic() + STOP_LIMIT_S
    while not wanted(state := state_of(identity)) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return state


def main(arguments: list[str]) -> int:
    pid, ticks, seconds, do = arguments
    identity = ProcessIdentity(int(pid), int(ticks))
    if do == "kill":
        wait_gone([identity], timeout_s=float(seconds))
        send_signal(identity, signal.SIGKILL)
    else:
        assert do == "resume"
        print(json.dumps("ready"), flush=True)
        print(json.dumps(pause(identity, float(seconds), stop=False)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
