"""What a step of jobs/bytelm takes under chaosrun, with its trace, and under torchrun: one script, one stopwatch.

No fault and no checkpoint falls into the measured steps: chaosrun's are those of its second attempt, from the beginning. Runs
of the two alternate, so that whatever else the machine does meets both.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.benchmarks.launch import REPOSITORY, LaunchError, chaosrun_command, launch, on_gpu, scratch
from tests.benchmarks.samples import Samples

__all__ = ["TARGET_RATIO", "StepTimes", "measure_steps"]

TARGET_RATIO = 1.05
HERE = Path(__file__).parent
SCRIPT = REPOSITORY / "jobs" / "bytelm" / "train.py"
ARGUMENTS = ("--epochs", "2", "--chunks", "1490", "--seed", "1")
WARM_UP_STEPS = 10
LIMIT_S = 300.0
JOB = """\
name: steps
script: {script}
args: {arguments}
workers: {workers}
per_worker: {{gpu: {gpus}}}
seed: 1
resume: {{by: chaosrun}}           # the stopwatch does not import it, the script that it runs does
checkpoint: {{every_steps: 100000}}
faults:
  schedule:
    - {{rank: 0, at_step: 1}}     # a drill without a fault proves nothing; this one comes before the steps that are measured
"""


@dataclass(slots=True, kw_only=True)
class StepTimes:
    """Medians of runs: each value is the median over a run's steps after the warm-up, in seconds."""

    workers: int
    wall: dict[str, Samples] = field(default_factory=dict)
    cpu: dict[str, Samples] = field(default_factory=dict)
    """CPU time of rank 0's process: hardly touched by what else runs on the machine."""

    def ratio(self, times: dict[str, Samples]) -> float | None:
        ours, theirs = times["chaosrun"].median, times["torchrun"].median
        return None if ours is None or theirs is None else ours / theirs

    def to_json(self) -> dict[str, Any]:
        return {
            "workers": self.workers,
            "ratio": self.ratio(self.wall),
            "cpu_ratio": self.ratio(self.cpu),
            "wall": {name: samples.to_json() for name, samples in self.wall.items()},
            "cpu": {name: samples.to_json() for name, samples in self.cpu.items()},
        }


def measure_steps(repeats: int, progress: Callable[[str], None]) -> StepTimes:
    workers = 1 if on_gpu() else max(2, min(3, os.cpu_count() or 1))
    launchers: dict[str, Callable[[Path, int], None]] = {"chaosrun": _chaosrun, "torchrun": _torchrun}
    found = StepTimes(workers=workers)
    found.wall = {name: Samples(limit_s=LIMIT_S) for name in launchers}
    found.cpu = {name: Samples(limit_s=LIMIT_S) for name in launchers}
    # One folder for all repeats: chaosrun's reference leg is run by the first and found by the others.
    with scratch() as folder:
        for repeat in range(repeats + 1):
            order = list(launchers) if repeat % 2 else list(reversed(launchers))
            for name in order:
                try:
                    launchers[name](folder, workers)
                    wall_s, cpu_s = _median_step_s(folder)
                except LaunchError as error:
                    found.wall[name].failures.append(str(error))
                    progress(f"steps {repeat}/{repeats}: {name} failed: {str(error).splitlines()[0]}")
                    continue
                if repeat == 0:
                    continue
                found.wall[name].values.append(wall_s)
                found.cpu[name].values.append(cpu_s)
                progress(f"steps {repeat}/{repeats}: {name} {1e3 * wall_s:.2f} ms, {1e3 * cpu_s:.2f} ms CPU")
    return found


def _chaosrun(folder: Path, workers: int) -> None:
    job = folder / "job.yaml"
    arguments = json.dumps([str(folder), str(SCRIPT), *_arguments()])
    about = {"arguments": arguments, "workers": workers, "gpus": int(on_gpu())}
    job.write_text(JOB.format(script=HERE / "timed_steps.py", **about))
    launch([chaosrun_command(), "submit", str(job), "--root", str(folder / "root"), "--quiet"], folder, limit_s=LIMIT_S)


def _torchrun(folder: Path, workers: int) -> None:
    launch(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"),
            *(str(HERE / "timed_steps.py"), str(folder), str(SCRIPT), *_arguments()),
        ],
        folder,
        limit_s=LIMIT_S,
    )


def _arguments() -> tuple[str, ...]:
    return ARGUMENTS if on_gpu() else (*ARGUMENTS, "--cpu")


def _median_step_s(folder: Path) -> tuple[float, float]:
    """Median (wall clock, CPU) of rank 0's steps after the warm-up; the ranks wait for each other at every step."""
    record = folder / "rank-0.json"
    stamps = json.loads(record.read_text())
    record.unlink()
    pairs = list(pairwise(stamps))[WARM_UP_STEPS:]
    if not pairs:
        raise LaunchError(f"only {len(stamps)} steps were made")
    wall_s = statistics.median(after[0] - before[0] for before, after in pairs)
    return wall_s, statistics.median(after[1] - before[1] for before, after in pairs)
