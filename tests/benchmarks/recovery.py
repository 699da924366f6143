"""From the SIGKILL of one rank to the first optimizer step that any rank of the restarted job completes.

The same training everywhere (jobs/probe, with more state that is saved, restored and never trained), 2 workers, a checkpoint
every 10 steps, one kill when that of step 20 is there: after step 21 where the training waits for its saves, and chaosrun's as
soon as it is committed, since it saves large state beside the training. A run whose restart went on from another step has
failed. Times are the wall clock's, noted by the processes themselves: by the one that is about to be killed (chaosrun's before
it has brought its fault marker to the disk, which counts as recovery here), and by the new ones after the step.
"""

import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from chaosrun.records.layout import RunLayout
from tests.benchmarks.launch import LIMIT_S, REPOSITORY, LaunchError, chaosrun_command, launch, on_gpu, scratch
from tests.benchmarks.peer_probe import SAVED_STEP, STEP_S, STEPS
from tests.benchmarks.samples import Samples
from tests.records import read_lines

__all__ = ["MEGABYTES", "TARGET_S", "measure_recovery", "why_no_ray_train"]

TARGET_S = 0.3
MEGABYTES = (0, 100, 500, 2000)
"""Of state beside the tiny model's own, to see what size costs."""
BIG_LIMIT_S = 300.0
HERE = Path(__file__).parent
JOB = REPOSITORY / "jobs" / "probe" / "job.yaml"


def measure_recovery(repeats: int, progress: Callable[[str], None], megabytes: int = 0) -> dict[str, Samples]:
    """Kill to first step in seconds for each launcher that can be had, one run of each at a time, in turn."""
    launchers: dict[str, Callable[[Path, int], float]] = {"chaosrun": _chaosrun, "torchrun": _torchrun}
    if why_no_ray_train() is None:
        launchers["Ray Train"] = _ray_train
    found = {name: Samples(limit_s=_limit_s(megabytes)) for name in launchers}
    for repeat in range(1, repeats + 1):
        for name, once in launchers.items():
            with scratch() as folder:
                try:
                    seconds = once(folder, megabytes)
                except LaunchError as error:
                    found[name].failures.append(str(error))
                    progress(f"recovery of {megabytes} MB {repeat}/{repeats}: {name} failed: {str(error).splitlines()[0]}")
                else:
                    found[name].values.append(seconds)
                    progress(f"recovery of {megabytes} MB {repeat}/{repeats}: {name} {seconds:.3f} s")
    return found


def why_no_ray_train() -> str | None:
    """Why there is no row for Ray Train; None when there is one."""
    if on_gpu():
        return "Ray Train is not measured on a GPU"
    missing = [name for name in ("pandas", "pyarrow") if importlib.util.find_spec(name) is None]
    if not missing:
        return None
    return f"Ray Train is not measured: {' and '.join(missing)} not installed (pip install 'ray[train]', or make bench)"


def _limit_s(megabytes: int) -> float:
    return BIG_LIMIT_S if megabytes else LIMIT_S


def _workers() -> int:
    return 1 if on_gpu() else 2


def _chaosrun(folder: Path, megabytes: int) -> float:
    cpu = "" if on_gpu() else "--cpu, "
    command = [
        *(chaosrun_command(), "submit", str(JOB), "--root", str(folder), "--quiet", "-o", "json"),
        f"args=[--steps, {STEPS}, --seed, 1, --step-seconds, {STEP_S}, {cpu}--frozen-megabytes, {megabytes}]",
        f"workers={_workers()}",
        f"per_worker.gpu={int(on_gpu())}",
        "checkpoint.every_steps=10",
        f"faults.schedule=[{{rank: {_workers() - 1}, at_step: {SAVED_STEP}, phase: checkpoint.postcommit}}]",
    ]
    # Exit code 0: the recovery was exact as well.
    account = json.loads(launch(command, folder, limit_s=_limit_s(megabytes)))
    leg = RunLayout(Path(account["path"])).leg("chaos")
    killed_s = json.loads((leg.faults / "F1.json").read_text())["time_s"]
    traces = [leg.attempt(2).trace(rank) for rank in range(_workers())]
    return _first_step_s([line for trace in traces for line in read_lines(trace) if line["kind"] == "step"]) - killed_s


def _torchrun(folder: Path, megabytes: int) -> float:
    launch(
        [
            *(sys.executable, "-m", "torch.distributed.run"),
            *("--standalone", f"--nproc-per-node={_workers()}", "--max-restarts=3"),
            *(str(HERE / "peer_probe.py"), str(folder), str(megabytes)),
        ],
        folder,
        limit_s=_limit_s(megabytes),
    )
    return _peer_recovery_s(folder)


def _ray_train(folder: Path, megabytes: int) -> float:
    launch([sys.executable, str(HERE / "ray_train_probe.py"), str(folder), str(megabytes)], folder, limit_s=_limit_s(megabytes))
    return _peer_recovery_s(folder)


def _peer_recovery_s(folder: Path) -> float:
    processes = [[json.loads(line) for line in path.open()] for path in folder.glob("events-*.jsonl")]
    kills = [event["time_s"] for events in processes for event in events if event["event"] == "kill"]
    if len(kills) != 1:
        raise LaunchError(f"{len(kills)} kills were noted instead of one")
    # A survivor of the first start may do a step after the kill; it is not of the restarted job.
    restarted = [events for events in processes if events[0]["time_s"] > kills[0]]
    return _first_step_s([event for events in restarted for event in events if event["event"] == "step"]) - kills[0]


def _first_step_s(steps: list[dict[str, Any]]) -> float:
    """When the restarted job made its first step, the one after the checkpoint. Raises LaunchError where it made another."""
    if not steps:
        raise LaunchError("the job ended without a new step")
    first = min(step["step"] for step in steps)
    if first != SAVED_STEP + 1:
        raise LaunchError(f"the restarted job went on with step {first}, not from the checkpoint of step {SAVED_STEP}")
    return min(step["time_s"] for step in steps)
