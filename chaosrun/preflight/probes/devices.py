"""Which devices this node has, the driver's report on them, and the results of computing on each. Every device has its own
process, so that one that hangs or crashes is identified and leaves nothing behind."""

import json
import os
import select
import shutil
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import takewhile
from typing import Literal

import psutil
from msgspec import Struct, structs

from chaosrun.preflight.probes.compute import ComputeFacts
from chaosrun.preflight.probes.nvidia import Driver, parse
from chaosrun.records.codec import convert

DRIVER_PATIENCE_S = 30.0
"""Without persistence mode a driver starts every GPU anew when it is asked."""
PROBES = "chaosrun.preflight.probes."
BEFORE_THE_DEVICE = ("start", "import of torch")
"""Phases in which no device has been touched yet."""
START_PATIENCE_S = 40.0
"""Of such a phase, and of those that load a device's libraries: they may come from a slow file system to a busy machine."""
HIDING = {"", "-1", "NoDevFiles"}
DEAD_WITHIN_S = 2.0
"""A killed process that is still there after this waits inside the kernel, as behind a GPU that no longer answers."""


class Computed(Struct, frozen=True, kw_only=True):
    ended: Literal["done", "raised", "died", "hung"]
    phase: str
    error: str = ""
    facts: ComputeFacts | None = None

    @property
    def touched(self) -> bool:
        return self.phase not in BEFORE_THE_DEVICE


class DevicesFacts(Struct, frozen=True, kw_only=True):
    visible: list[str] | None
    """See `visible_gpus`."""
    driver: Driver
    computed: dict[str, Computed]
    """By the device's name."""


def probe(*, gpus: int, patience_s: float, works: dict[str, dict[str, object]]) -> DevicesFacts:
    """`gpus`: as Ray counts them; `patience_s`: limit of a phase; `works`: parameters of `compute`, by kind of device (cpu,
    cuda)."""
    visible = visible_gpus()
    # First, as the processes started below would be counted as others'.
    driver = ask_driver()
    tokens = {"cpu": ""} if "cpu" in works else {}
    tokens |= gpu_devices(gpus, visible, [gpu.uuid for gpu in driver.gpus if gpu.uuid])
    with ThreadPoolExecutor(max_workers=max(1, len(tokens))) as pool:
        running = {name: pool.submit(_compute, name.split(":")[0], token, works, patience_s) for name, token in tokens.items()}
        computed = {name: answer.result() for name, answer in running.items()}
    return DevicesFacts(visible=visible, driver=driver, computed=computed)


def visible_gpus() -> list[str] | None:
    """CUDA_VISIBLE_DEVICES with which this node's Ray was started; None: it was not set, so Ray has every GPU."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    # As CUDA reads it: an invalid entry hides itself and all that follow.
    return list(takewhile(lambda token: token not in HIDING, (token.strip() for token in given.split(","))))


def gpu_devices(count: int, visible: list[str] | None, uuids: list[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES for each GPU that Ray counts, by its name in a program on Ray: "cuda:0"."""
    tokens = visible if visible is not None else uuids or [str(index) for index in range(count)]
    return {f"cuda:{index}": token for index, token in enumerate(tokens[:count])}


def ask_driver() -> Driver:
    if not shutil.which("nvidia-smi"):
        return Driver(told="absent", error="there is no nvidia-smi on this node")
    try:
        asked = subprocess.run(["nvidia-smi", "-q", "-x"], capture_output=True, text=True, timeout=DRIVER_PATIENCE_S)
        driver = parse(asked.stdout if asked.returncode == 0 else asked.stdout + asked.stderr)
    except subprocess.TimeoutExpired:
        return Driver(told="silent", error=f"nvidia-smi gave no answer within {DRIVER_PATIENCE_S:g} s")
    except (ValueError, OSError) as error:
        return Driver(told="nothing", error=f"nvidia-smi: {error}")
    theirs = [tuple(each for each in gpu.processes if not _ours(each.pid)) for gpu in driver.gpus]
    gpus = tuple(structs.replace(gpu, processes=those) for gpu, those in zip(driver.gpus, theirs, strict=True))
    return structs.replace(driver, gpus=gpus)


def _ours(pid: int) -> bool:
    """Whether it belongs to another preflight, as on a second node on this machine."""
    try:
        return any(word.startswith(PROBES) for word in psutil.Process(pid).cmdline())
    except psutil.Error:
        return False


def _compute(device: str, token: str, works: Mapping[str, Mapping[str, object]], patience_s: float) -> Computed:
    reading, writing = os.pipe()
    parameters = json.dumps({**works[device], "device": device, "progress": writing})
    # Files, not pipes, as output needs no reader then. In memory, as the disk may be full.
    with os.fdopen(os.memfd_create("out"), "rb") as out, os.fdopen(os.memfd_create("err"), "rb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "chaosrun.cluster.probing", f"{PROBES}compute"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            # Let waiting threads sleep: on a small machine they would block others.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "CUDA_VISIBLE_DEVICES": token},
            pass_fds=[writing],
        )
        os.close(writing)
        assert process.stdin is not None
        with suppress(BrokenPipeError):  # it has died; its exit status shows how
            process.stdin.write(parameters.encode())
            process.stdin.close()
        phase, over = _last_phase(reading, patience_s)
        os.close(reading)
        if not _ends_within(process, patience_s if over else 0):
            process.kill()
            stuck = "" if _ends_within(process, DEAD_WITHIN_S) else ", and its process cannot be killed"
            return Computed(ended="hung", phase=phase, error=f"no progress for {patience_in(phase, patience_s):g} s{stuck}")
        out.seek(0)
        said = out.read()
        if process.returncode or not said:
            err.seek(0)
            words = err.read().decode(errors="replace")
            return Computed(ended="died", phase=phase, error=how_it_ended(process.returncode, words))
        answer = json.loads(said)
        if "error" in answer:
            return Computed(ended="raised", phase=phase, error=answer["error"])
        return Computed(ended="done", phase=phase, facts=convert(answer["facts"], ComputeFacts))


def _last_phase(reading: int, patience_s: float) -> tuple[str, bool]:
    """The last phase that was announced, and whether the process has closed its end (else it made no progress)."""
    phase, unfinished = BEFORE_THE_DEVICE[0], b""
    while select.select([reading], [], [], patience_in(phase, patience_s))[0]:
        more = os.read(reading, 1 << 12)
        if not more:
            return phase, True
        *lines, unfinished = (unfinished + more).split(b"\n")
        phase = lines[-1].decode() if lines else phase
    return phase, False


def patience_in(phase: str, patience_s: float) -> float:
    loads = phase in (*BEFORE_THE_DEVICE, "first use") or phase.endswith("(first call)")
    return max(START_PATIENCE_S, patience_s) if loads else patience_s


def _ends_within(process: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def how_it_ended(status: int, words: str) -> str:
    from chaosrun.faults.observed import signal_name

    how = f"killed by {signal_name(-status)}" if status < 0 else f"exit status {status}"
    said = words.strip().splitlines()
    return f"{how}: {said[-1][:200]}" if said else how
