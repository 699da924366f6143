"""A process of its own for every device of this node, so that one that hangs or crashes is named and leaves nothing behind."""

import json
import os
import select
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from chaosrun.preflight.probes.compute import ComputeFacts

BEFORE_THE_DEVICE = ("start", "import of torch")
"""Phases in which no device has been touched yet."""
START_PATIENCE_S = 40.0
"""Of such a phase, and of those that load a device's libraries: they may come from a slow file system to a busy machine."""
HIDING = {"", "-1", "NoDevFiles"}
DEAD_WITHIN_S = 2.0
"""A killed process that is still there after this waits inside the kernel, as behind a GPU that no longer answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Computed:
    """What came of computing on one device."""

    ended: str
    """done, raised, died, hung"""
    phase: str
    """The last one that was announced."""
    touched: bool
    """Whether it came to the device."""
    error: str
    facts: ComputeFacts | None


def visible_gpus() -> list[str] | None:
    """What this node's Ray was started with in CUDA_VISIBLE_DEVICES; None: it was not set, so every GPU is Ray's."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return None
    # As CUDA reads it: what is no device hides itself and all that follow.
    return list(takewhile(lambda token: token not in HIDING, (token.strip() for token in given.split(","))))


def gpu_devices(count: int, visible: list[str] | None, uuids: list[str]) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of each GPU that Ray counts, by the name that a program on Ray would call it: "cuda:0"."""
    tokens = visible if visible is not None else uuids or [str(index) for index in range(count)]
    return {f"cuda:{index}": token for index, token in enumerate(tokens[:count])}


def compute(orders: Mapping[str, Mapping[str, Any]], patience_s: float) -> dict[str, Computed]:
    """Run the probe `compute` on every device at the same time; one phase of it may take `patience_s`.

    `orders` by the device's name: "visible", what CUDA_VISIBLE_DEVICES is there, and the probe's parameters.
    """
    with ThreadPoolExecutor(max_workers=max(1, len(orders))) as pool:
        running = {name: pool.submit(_compute, name, order, patience_s) for name, order in orders.items()}
        return {name: answer.result() for name, answer in running.items()}


def _compute(name: str, order: Mapping[str, Any], patience_s: float) -> Computed:
    reading, writing = os.pipe()
    parameters = json.dumps({**order, "device": name.partition(":")[0], "progress": writing})
    # Files, not pipes: its words need no reader. In memory: the disk may be full.
    with os.fdopen(os.memfd_create("out"), "rb") as out, os.fdopen(os.memfd_create("err"), "rb") as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "chaosrun.cluster.probe_process", "chaosrun.preflight.probes.compute"],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            # Threads that wait sleep: on a small machine they would keep others from work.
            env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ, "CUDA_VISIBLE_DEVICES": order["visible"]},
            pass_fds=[writing],
        )
        os.close(writing)
        assert process.stdin is not None
        try:
            process.stdin.write(parameters.encode())
            process.stdin.close()
        except BrokenPipeError:
            pass  # it has died; how, its exit status says
        phase, over = _last_phase(reading, patience_s)
        os.close(reading)
        if not _ends_within(process, patience_s if over else 0):
            process.kill()
            waited_s = patience_in(phase, patience_s)
            stuck = "" if _ends_within(process, DEAD_WITHIN_S) else ", and its process cannot be killed"
            return _answer("hung", phase, f"no progress for {waited_s:g} s{stuck}")
        out.seek(0)
        said = out.read()
        if process.returncode or not said:
            err.seek(0)
            return _answer("died", phase, how_it_ended(process.returncode, err.read().decode(errors="replace")))
        answer = json.loads(said)
        if "error" in answer:
            return _answer("raised", phase, answer["error"])
        return _answer("done", phase, "", answer["facts"])


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
    """How long a phase may take."""
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


def _answer(ended: str, phase: str, error: str, facts: Mapping[str, Any] | None = None) -> Computed:
    touched = phase not in BEFORE_THE_DEVICE
    # Its parts stay as they are: this process only passes them on.
    told = None if facts is None else ComputeFacts(**facts)
    return Computed(ended=ended, phase=phase, touched=touched, error=error, facts=told)
