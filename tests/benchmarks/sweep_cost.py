"""What a sweep costs that begins each drill before its fault and ends it when it is decided, beside one that runs all of each.

    python -m tests.benchmarks.sweep_cost --steps 1000 --every 50

Steps are counted in the traces: what any attempt of any leg did, the undisturbed run's and lost ones included.
"""

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaosrun import api
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import Early, read_run
from chaosrun.supervise.drill import leg_of

PROBE = Path(__file__).parents[2] / "jobs" / "probe" / "train.py"
JOB = """\
name: cost
script: {script}
args: [{args}]
workers: 2
seed: 1
max_steps: {steps}
checkpoint: {{every_steps: {every}}}
verify: {{confirm: {confirm}}}
"""
PHASES = ("record", "step")
PER_STEP = IN_RECOVERY = 4
"""Points, on two ranks: of each step, and beside these of the recovery after the first checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    steps: int
    """Of all ranks together, as one: those of rank 0."""
    undisturbed: int
    """Of them those of the first run, from which the points come: undisturbed, and killed once."""
    took_s: float
    verdicts: dict[str, str]
    """By point: the status, and why it is not a PASS."""


def measure(
    folder: Path,
    *,
    steps: int,
    every: int,
    at: Sequence[int],
    whole: bool,
    script: Path = PROBE,
    args: Sequence[str] = (),
    only: Sequence[str] = PHASES,
    confirm: int = 0,
    at_once: int | None = None,
) -> Cost:
    """One sweep of a job, with nothing in the cache; `whole`: from the beginning to the end; `at_once`: so many drills, of
    which each has a fork server to start. A job that does not come back has to be confirmed,
    or nobody knows that it repeats itself."""
    folder.mkdir(parents=True)
    job = folder / "job.yaml"
    quoted = ", ".join(f'"{each}"' for each in args)
    job.write_text(JOB.format(script=script, args=quoted, steps=steps, every=every, confirm=confirm or "false"))
    early: Early = "never" if whole else "always"
    overrides = ("verify.begin=beginning",) if whole else ()
    began_s = time.monotonic()
    about: dict[str, Any] = {"overrides": overrides, "early": early, "at_once": at_once}
    swept = api.sweep(job, steps=at, only=only, keep=True, root=folder, **about)
    took_s = time.monotonic() - began_s
    runs = [RunLayout(path.parent) for path in folder.rglob("runs/*/run.json")]
    survey = next(run for run in runs if run.run_id == swept.survey)
    first = steps_of(survey)
    return Cost(
        steps=first + sum(steps_of(run) for run in runs if run != survey),
        undisturbed=first,
        took_s=took_s,
        verdicts={
            point: result.status if result.status == "PASS" else f"{result.status}: {result.cause}"
            for point, result in swept.tried.items()
        },
    )


def steps_of(run: RunLayout) -> int:
    """That were done in this run; a reference of another one costs nothing again."""
    legs = ("chaos", "confirm") if read_run(run).reference.source else ("reference", "chaos", "confirm")
    traces = [trace for name in legs for trace in read_leg(leg_of(run, name)).traces]
    return sum(len(trace.steps) for trace in traces if trace.rank == 0)


def spread(steps: int, points: int) -> list[int]:
    """So many steps, evenly, none of them a round one."""
    return [steps * (2 * number + 1) // (2 * points) + 1 for number in range(points)]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a sweep costs, by steps and seconds.")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--points", type=int, default=24)
    parser.add_argument("--step-seconds", type=float, default=0.0, help="that each step takes longer than it needs to")
    arguments = parser.parse_args()
    at = spread(arguments.steps, (arguments.points - IN_RECOVERY) // PER_STEP)
    args = ("--steps", str(arguments.steps), "--seed", "1", "--step-seconds", str(arguments.step_seconds))
    with tempfile.TemporaryDirectory() as folder:
        about = {"steps": arguments.steps, "every": arguments.every, "at": at, "args": args}
        short = measure(Path(folder) / "short", whole=False, **about)
        print(f"short  {short.steps} steps ({short.undisturbed} of the first run)  {short.took_s:.1f} s", flush=True)
        whole = measure(Path(folder) / "whole", whole=True, **about)
    print(f"whole  {whole.steps} steps ({whole.undisturbed} of the first run)  {whole.took_s:.1f} s")
    drills = (short.steps - short.undisturbed) / (whole.steps - whole.undisturbed)
    print(f"share  {short.steps / whole.steps:.1%} of the steps, {short.took_s / whole.took_s:.1%} of the time")
    print(f"of the {len(whole.verdicts)} drills alone  {drills:.1%} of the steps")
    print("verdicts", "agree" if short.verdicts == whole.verdicts else f"differ: {short.verdicts} {whole.verdicts}")


if __name__ == "__main__":
    main()
