"""The agent that runs probes on a node: each in a separate process, under a process guard, within its limit.

A plain class with async methods; `probe_pool` makes a Ray actor of it. Imports neither ray nor torch, knows nothing of what
probes measure, and judges nothing.
"""

import asyncio
import json
import os
import socket
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import msgspec

from chaosrun.cluster.agent import RAY_SETTINGS, is_raylet, leave_with_the_raylet, start_program
from chaosrun.cluster.probe_guard import KILL_S
from chaosrun.cluster.probing import Call, ProbeOutcome
from chaosrun.faults.observed import signal_name
from chaosrun.processes import MARK_VARIABLE, kill_marked, with_package

PRINTED_BYTES = 1 << 14
"""Bytes of a probe's output, from its end, that are searched for the reason of a death."""
KEPT_OF_RAYS = ("RAY_AUTH_",)
"""Ray settings that probes see: they compare the token that nodes use."""


class GuardReport(msgspec.Struct, frozen=True):
    """What `cluster.probe_guard` reports at its end."""

    code: int | None
    """Exit code of the command, or minus the signal that ended it."""
    limit: bool
    """Whether the time limit passed."""
    left: tuple[int, ...]
    """Processes that did not die."""


class ProbeAgent:
    def __init__(self, mark: str) -> None:
        """`mark` goes into the environment of every process below this agent, so that a cleaner can find them."""
        self._mark = mark
        self._guards: dict[socket.socket, asyncio.Future[None]] = {}
        self._stopped = False

    async def hello(self) -> bool:
        """Answers, to show that the agent runs."""
        leave_with_the_raylet()
        return True

    async def probe(self, call: Call) -> ProbeOutcome:
        """Run a probe. When this returns, none of its processes is left."""
        answer, printed = (os.memfd_create(which, os.MFD_CLOEXEC) for which in ("answer", "printed"))
        asked = os.memfd_create("asked", os.MFD_CLOEXEC)
        try:
            os.write(asked, json.dumps(call.parameters).encode())
            os.lseek(asked, 0, os.SEEK_SET)
            mark = f"{self._mark}#{uuid.uuid4().hex}"
            end = await self._run(mark, call, stdin=asked, stdout=answer, stderr=printed)
            return _outcome(end, _end_of(answer, 1 << 30), _end_of(printed, PRINTED_BYTES), call.limit_s)
        finally:
            for descriptor in (asked, answer, printed):
                os.close(descriptor)

    async def _run(self, mark: str, call: Call, **files: int) -> GuardReport | None:
        """The report of its guard; None if the guard itself was killed."""
        if self._stopped:
            return None
        command = [sys.executable, "-m", "chaosrun.cluster.probing", call.probe]
        environment = {**_environment(call.env), MARK_VARIABLE: mark}
        guard, ours = start_program("probe_guard", str(call.limit_s), *command, env=environment, **files)
        ours.setblocking(False)
        self._guards[ours] = gone = asyncio.get_running_loop().create_future()
        said = b""
        try:
            async with asyncio.timeout(call.limit_s + 2 * KILL_S):
                while part := await asyncio.get_running_loop().sock_recv(ours, 4096):
                    said += part
        except (TimeoutError, ConnectionResetError):
            # The guard was stopped or killed: its processes are found by their mark.
            pass
        finally:
            if not said.endswith(b"\n"):
                guard.kill()
                await asyncio.to_thread(kill_marked, mark, timeout_s=KILL_S)
            await asyncio.to_thread(guard.wait)
            del self._guards[ours]
            ours.close()
            gone.set_result(None)
        return msgspec.json.decode(said, type=GuardReport) if said.endswith(b"\n") else None

    async def stop(self) -> None:
        """Kill all processes below this agent, and wait until they are gone; nothing new is started."""
        self._stopped = True
        waiting = list(self._guards.values())
        for guard in list(self._guards):
            guard.shutdown(socket.SHUT_WR)
        if waiting:
            await asyncio.wait(waiting)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """The environment of a training process here, without what Ray sets for its own workers."""
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(RAY_SETTINGS) or name.startswith(KEPT_OF_RAYS)
    }
    # Ray hides every GPU from an actor that requested none; the raylet's environment shows which ones the node has.
    given = _environment_of_the_raylet().get("CUDA_VISIBLE_DEVICES")
    visible = {} if given is None else {"CUDA_VISIBLE_DEVICES": given}
    return with_package({**inherited, **visible, **env})


def _environment_of_the_raylet() -> dict[str, str]:
    """The raylet's environment at its start, before Ray changed it for its workers; empty if it cannot be read."""
    parent = os.getppid()
    try:
        if not is_raylet(parent):
            return {}
        entries = Path(f"/proc/{parent}/environ").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries if b"=" in entry)
    return {name: value for name, _, value in pairs}


def _end_of(descriptor: int, size: int) -> str:
    return os.pread(descriptor, size, max(0, os.fstat(descriptor).st_size - size)).decode(errors="replace")


def _outcome(end: GuardReport | None, answer: str, printed: str, limit_s: float) -> ProbeOutcome:
    left = f", and process {end.left[0]} does not die: it waits in the kernel" if end and end.left else ""
    last = printed.strip().rpartition("\n")[2]
    left += f": {last}" if last else ""
    if end is not None and end.limit:
        return ProbeOutcome(ended="limit", error=f"no answer within {limit_s:g} s{left}")
    try:
        said = json.loads(answer)
    except ValueError:
        if end is None or end.code is None:
            how = "its process was killed"
        elif end.code >= 0:
            how = f"its process ended with exit code {end.code} and no answer"
        else:
            how = f"its process was killed by {signal_name(-end.code)}"
        return ProbeOutcome(ended="died", error=how + left)
    if "error" in said:
        return ProbeOutcome(ended="raised", error=said["error"])
    return ProbeOutcome(facts=said["facts"])
