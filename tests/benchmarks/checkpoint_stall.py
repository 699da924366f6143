"""For how long a training stands still at a checkpoint: `accelerator.save_state`, and chaosrun's, sync and async, of one state.

Two ranks on this machine, or one on a GPU, each way by turns in the same processes, each keeps its two newest checkpoints;
before each, what the one before left is brought to the disk. chaosrun's also hash, sync and commit, which `save_state` does
not.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks.launch import REPOSITORY, on_gpu, scratch
from tests.benchmarks.samples import Samples

__all__ = ["SIZES", "TARGETS", "WAYS", "Stall", "measure_stalls"]

SIZES = (int(0.1e9), int(0.5e9), int(2e9))
"""Bytes of weights and optimizer."""
WAYS = ("save_state", "and fsync", "sync", "async", "until committed", "memcpy")
TARGETS = {"sync": 1.1, "async": 0.25}
LIMIT_S = 600.0


@dataclass(slots=True, kw_only=True)
class Stall:
    """Of a state of one size."""

    size: int
    ways: dict[str, Samples] = field(default_factory=dict)
    first: dict[str, float] = field(default_factory=dict)
    """Seconds of the first save, which gets its memory."""
    failures: list[str] = field(default_factory=list)

    def ratio(self, way: str) -> float | None:
        """Of `save_state`."""
        medians = [self.ways[name].median if name in self.ways else None for name in (way, "save_state")]
        return medians[0] / medians[1] if medians[0] is not None and medians[1] else None

    def to_json(self) -> dict[str, Any]:
        ways = {name: {**samples.to_json(), "first_s": self.first[name]} for name, samples in self.ways.items()}
        ratios = {way: self.ratio(way) for way in TARGETS}
        return {"bytes": self.size, "ways": ways, "ratios": ratios, "failures": self.failures}


def measure_stalls(repeats: int, progress: Callable[[str], None]) -> list[Stall]:
    found: list[Stall] = []
    number = 1 if on_gpu() else 2
    for size in SIZES:
        stall = Stall(size=size)
        found.append(stall)
        with scratch() as folder:
            environment = {**os.environ, "WORLD_SIZE": str(number), "LOCAL_WORLD_SIZE": str(number)}
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
            environment |= {} if on_gpu() else {"ACCELERATE_USE_CPU": "true"}
            command = [sys.executable, "-m", "tests.benchmarks.stall_probe", str(folder), str(size), str(repeats)]
            ranks = [
                subprocess.Popen(command, env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}, cwd=REPOSITORY)
                for rank in range(number)
            ]
            try:
                codes = [each.wait(LIMIT_S) for each in ranks]
            except subprocess.TimeoutExpired:
                codes = [-1]
            finally:
                for each in ranks:
                    each.kill()
                    each.wait()
            if any(codes):
                stall.failures.append(f"{size} bytes: the ranks left with {codes}")
                continue
            for way, told in json.loads((folder / "stall.json").read_text()).items():
                stall.ways[way] = Samples(values=told["values_s"], limit_s=LIMIT_S)
                stall.first[way] = told["first_s"]
        progress(f"stall {size / 1e9:g} GB: " + ", ".join(f"{way} {each.median:.3f} s" for way, each in stall.ways.items()))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
