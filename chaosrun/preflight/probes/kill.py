"""Whether a worker can be killed here with all its descendants, and leaves nothing behind. Ends every process it starts.

The worker is as hard to end as real ones: its child has a child that left its process group, all of them ignore SIGTERM, and
with GPUs it holds memory on each. It is killed as the fork server kills: its process group, then all orphans of this subreaper,
by pid and start time.
"""

import json
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from msgspec import Struct

from chaosrun.preflight.probes.devices import ask_driver, visible_gpus
from chaosrun.preflight.probes.forked import Say, forked
from chaosrun.preflight.probes.nvidia import matched
from chaosrun.processes import ProcessIdentity, become_subreaper, children, identify, kill_all, state_of
from chaosrun.records.codec import convert

DEVICE_MIB = 256
BACK_MIB = 64
"""Memory counts as free again when at most so much is missing: other processes may use the device, too."""
OUTLIVES_S = 100
"""Whatever happens to this process, the kernel ends the worker and its children after this."""


class Alive(Struct, frozen=True, kw_only=True):
    what: str
    """worker, child or grandchild"""
    pid: int
    state: str


class DeviceMemory(Struct, frozen=True, kw_only=True):
    """MiB in use on one device: before the worker took some, while it held it, and at the last reading."""

    before: int
    held: int
    after: int
    seconds: float | None
    """Until it was free again; None: not within the limit."""


class StartedWorker(Struct, frozen=True, kw_only=True):
    """The worker's report once all its descendants run."""

    family: dict[str, int]
    """Pids of worker, child and grandchild."""
    device_error: str


class KillFacts(Struct, frozen=True, kw_only=True):
    alive: list[Alive]
    killed_s: float
    devices: dict[str, DeviceMemory]
    device_error: str


def probe(*, within_s: float, gpus: int) -> KillFacts:
    """`within_s`: limit for each to be gone."""
    become_subreaper()
    memory_before = _device_memory(gpus)
    worker, about = _start(gpus)
    family = {name: identity for name, pid in about.family.items() if (identity := identify(pid)) is not None}
    held = _device_memory(gpus)
    began = time.monotonic()
    alive = _kill(worker, family, within_s)
    killed_s = time.monotonic() - began
    device_error = about.device_error
    if gpus and not device_error and (memory_before is None or held is None):
        device_error = "nvidia-smi does not say how much memory is used"
    return KillFacts(
        alive=[Alive(what=name, pid=one.pid, state=state_of(one) or "?") for name, one in family.items() if one in alive],
        killed_s=killed_s,
        devices={} if device_error else _freed(memory_before or {}, held or {}, gpus, within_s),
        device_error=device_error,
    )


def _start(gpus: int) -> tuple[int, StartedWorker]:
    """A process group of three that is ready to be killed: its pid, and its report."""
    pid, reading = forked(lambda say: _work(say, gpus))
    with os.fdopen(reading) as told:
        line = told.readline()
    if not line:
        raise RuntimeError("the worker that was to be killed died before that")
    return pid, convert(json.loads(line), StartedWorker)


def _work(say: Say, gpus: int) -> None:
    os.setsid()
    _ignore_and_end_in_time()
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        _ignore_and_end_in_time()
        grandchild = os.fork()
        if grandchild == 0:
            os.setsid()
            _ignore_and_end_in_time()
        os.write(theirs, b"%d\n" % (grandchild or 0))
        _wait_for_the_end()
    said = b""
    # The child's line has the grandchild's pid, the grandchild's has a zero: once both are there, both ignore SIGTERM.
    while said.count(b"\n") < 2:
        said += os.read(ours, 64)
    family = {"worker": os.getpid(), "child": child, "grandchild": max(map(int, said.split()))}
    error, _held = _take_device_memory(gpus)
    say(StartedWorker(family=family, device_error=error))
    _wait_for_the_end()


def _ignore_and_end_in_time() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(OUTLIVES_S)


def _wait_for_the_end() -> None:
    while True:
        signal.pause()


def _take_device_memory(gpus: int) -> tuple[str, list[Any]]:
    if not gpus:
        return "", []
    try:
        import torch

        return "", [torch.ones(DEVICE_MIB << 20, dtype=torch.uint8, device=f"cuda:{index}") for index in range(gpus)]
    except (ImportError, RuntimeError) as error:
        return str(error).splitlines()[0], []


def _kill(worker: int, family: Mapping[str, ProcessIdentity], limit_s: float) -> list[ProcessIdentity]:
    """Kill it; returns the processes still alive after the limit. The rest is reaped."""
    with suppress(ProcessLookupError):
        os.killpg(worker, signal.SIGKILL)

    def below() -> list[ProcessIdentity]:
        # Reap the dead first: their orphans are reparented here only then.
        for pid in children(os.getpid()):
            os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)
        fallen = [identity for pid in children(os.getpid()) if (identity := identify(pid)) is not None]
        return [*family.values(), *fallen]

    return kill_all(below, timeout_s=limit_s)


def _device_memory(gpus: int) -> dict[str, int] | None:
    """MiB in use on each GPU that the driver reports; None when it cannot be queried."""
    if not gpus:
        return {}
    driver = ask_driver()
    known = matched(driver.gpus, visible_gpus()).items()
    used = {name: gpu.total_mib - gpu.free_mib for name, gpu in known if gpu.total_mib is not None and gpu.free_mib is not None}
    return used if driver.told == "all" else None


def _freed(before: Mapping[str, int], held: Mapping[str, int], gpus: int, limit_s: float) -> dict[str, DeviceMemory]:
    # Memory that another process freed meanwhile hides the worker's.
    taken = {device: used for device, used in held.items() if used - before.get(device, 0) >= DEVICE_MIB // 2}
    began, found = time.monotonic(), dict[str, DeviceMemory]()
    while len(found) < len(taken):
        now, elapsed_s = _device_memory(gpus) or {}, time.monotonic() - began
        for device in taken.keys() - found.keys():
            had, after = before.get(device, 0), now.get(device, taken[device])
            free = after <= had + BACK_MIB
            if free or elapsed_s > limit_s:
                seconds = elapsed_s if free else None
                found[device] = DeviceMemory(before=had, held=taken[device], after=after, seconds=seconds)
    return found
