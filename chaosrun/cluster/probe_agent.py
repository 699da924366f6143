"""The agent that runs probes on a node: each in a process of its own, under a process guard, within its limit.

A plain class with async methods; `probe_pool` makes a Ray actor of it. Imports neither ray nor torch, knows nothing of what
probes look at, and judges nothing.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from typing import Any

from chaosrun.cluster.agent import MARK_VARIABLE, RAY_SETTINGS
from chaosrun.cluster.guard import KILL_S
from chaosrun.cluster.raylet import environment_of_the_raylet, leave_with_the_raylet
from chaosrun.processes import kill_marked, with_package

PRINTED_BYTES = 1 << 14
"""Of what a probe printed: the end is looked at, for the reason of a death."""
KEPT_OF_RAYS = ("RAY_AUTH_",)
"""Settings of Ray that probes see: with what token this node talks is worth comparing."""


class ProbeAgent:
    def __init__(self, mark: str) -> None:
        """`mark` goes into the environment of every process below this agent, so that a cleaner can find them."""
        self._mark = mark
        self._guards: dict[socket.socket, asyncio.Future[None]] = {}
        self._stopped = False

    async def hello(self) -> None:
        """That it answers is all there is to hear."""
        leave_with_the_raylet()

    async def probe(self, module: str, parameters: Mapping[str, Any], limit_s: float, env: Mapping[str, str]) -> dict[str, Any]:
        """Run a probe: {facts, error, ended, seconds}, as `probing.Outcome` has them. Nothing of it is left then."""
        began = time.monotonic()
        answer, printed = (os.memfd_create(which, os.MFD_CLOEXEC) for which in ("answer", "printed"))
        asked = os.memfd_create("asked", os.MFD_CLOEXEC)
        try:
            os.write(asked, json.dumps(parameters).encode())
            os.lseek(asked, 0, os.SEEK_SET)
            mark = f"{self._mark}#{uuid.uuid4().hex}"
            end = await self._run(mark, module, limit_s, env, (asked, answer, printed))
            told = _told(end, _end_of(answer, 1 << 30), _end_of(printed, PRINTED_BYTES), limit_s)
        finally:
            for descriptor in (asked, answer, printed):
                os.close(descriptor)
        return {**told, "seconds": time.monotonic() - began}

    async def _run(
        self, mark: str, module: str, limit_s: float, env: Mapping[str, str], files: tuple[int, int, int]
    ) -> dict[str, Any] | None:
        """What its guard says of its end; None when the guard itself was killed."""
        if self._stopped:
            return None
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        command = [sys.executable, "-m", "chaosrun.cluster.probe_process", module]
        try:
            guard = subprocess.Popen(
                [sys.executable, "-m", "chaosrun.cluster.guard", str(theirs.fileno()), str(limit_s), *command],
                pass_fds=[theirs.fileno()],
                stdin=files[0],
                stdout=files[1],
                stderr=files[2],
                env={**_environment(env), MARK_VARIABLE: mark},
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
        self._guards[ours] = gone = asyncio.get_running_loop().create_future()
        said = b""
        try:
            async with asyncio.timeout(limit_s + 2 * KILL_S):
                while part := await asyncio.get_running_loop().sock_recv(ours, 4096):
                    said += part
        except (TimeoutError, ConnectionResetError):
            # Stopped or killed: what it held is found by its mark.
            pass
        finally:
            if not said.endswith(b"\n"):
                guard.kill()
                await asyncio.to_thread(kill_marked, mark, timeout_s=KILL_S)
            await asyncio.to_thread(guard.wait)
            del self._guards[ours]
            ours.close()
            gone.set_result(None)
        return json.loads(said) if said.endswith(b"\n") else None

    async def stop(self) -> None:
        """Kill what runs below this agent and wait until it is gone; nothing new is begun."""
        self._stopped = True
        waiting = list(self._guards.values())
        for guard in list(self._guards):
            guard.shutdown(socket.SHUT_WR)
        if waiting:
            await asyncio.wait(waiting)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """What a training process would see here: without what Ray sets for its own workers."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(RAY_SETTINGS) or name.startswith(KEPT_OF_RAYS)
    }
    # Ray hides every GPU from an actor that asked for none; which of them the node has been given, its raylet knows.
    given = environment_of_the_raylet().get("CUDA_VISIBLE_DEVICES")
    visible = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    return with_package({**inherited, **visible, **env})


def _end_of(descriptor: int, size: int) -> str:
    return os.pread(descriptor, size, max(0, os.fstat(descriptor).st_size - size)).decode(errors="replace")


def _told(end: Mapping[str, Any] | None, answer: str, printed: str, limit_s: float) -> dict[str, Any]:
    left = f", and process {end['left'][0]} does not die: it waits in the kernel" if end and end["left"] else ""
    if end is not None and end["limit"]:
        return {"facts": None, "ended": "limit", "error": f"no answer within {limit_s:g} s{left}"}
    try:
        said = json.loads(answer)
    except ValueError:
        last = printed.strip().rpartition("\n")[2]
        return {"facts": None, "ended": "died", "error": _how(end) + left + (f": {last}" if last else "")}
    if "error" in said:
        return {"facts": None, "ended": "raised", "error": said["error"]}
    return {"facts": said["facts"], "ended": "done", "error": ""}


def _how(end: Mapping[str, Any] | None) -> str:
    code = None if end is None else end["code"]
    if code is None:
        return "its process was killed"
    if code >= 0:
        return f"its process ended with exit code {code} and no answer"
    try:
        return f"its process was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"its process was killed by signal {-code}"
