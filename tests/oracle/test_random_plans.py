"""The other side of the oracle: whatever is killed, wherever, a sound job passes. Random plans over jobs, workers and loaders.

Every plan follows from its number, so a failure can be had again: it prints its job file and its plan.
"""

import itertools
import json
import math
import random
from dataclasses import dataclass
from pathlib import Path

import pytest

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.faults.kind import CHECKPOINT_PHASES
from chaosrun.plan.planner import make_plan
from chaosrun.spec.model import JobSpec
from tests.conftest import REPOSITORY, WarmDrills

pytestmark = pytest.mark.ray

OF_FEW = 10
"""So many plans are of the first jobs, in turn."""
IN_ALL = 300
FOUR = (29, 82, 123, 172)
"""Those that cost least and between them meet every moment, script, number of workers and number of loader workers, and one to
four faults."""
BY_DAY = (123,)
"""Of two workers, as other drills have them. By day integration/test_exactness has every moment of a kill."""
MOST_FAULTS = 6
DRAWS = 1000
"""Tries to draw a plan that can be carried out."""
PRELOAD = {"digits": ["sklearn.datasets"]}
"""By script: where nothing is to be imported once for all, drills share a fork server with those of other tests."""


PHASES = ("step", "checkpoint.file", "checkpoint.precommit", "checkpoint.postcommit", "restore.end", "reduce")
"""Where the plans kill; every other point is the sweep's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A small version of a job, of which many plans share one reference."""

    name: str
    workers: int
    loader_workers: int
    every_steps: int
    accumulation: int = 1

    @property
    def args(self) -> list[str]:
        """Sizes such that no number of workers divides the samples, nor the batches evenly."""
        sizes = {
            "bytelm": ["--batch-size", 4, "--chunks", 4 * 11 * self.workers - 3, "--context", 32, "--width", 32, "--layers", 1],
            "digits": ["--batch-size", math.ceil(1347 / (5 * self.workers)), "--width", 4],
            "probe": ["--samples", 67 * self.workers, "--width", 32, "--accumulation", self.accumulation],
        }
        words = [*sizes[self.name], "--epochs", 3, "--seed", 3, "--loader-workers", self.loader_workers]
        return [str(word) for word in words]

    @property
    def steps(self) -> int:
        """Optimizer steps in all; the drill checks it."""
        batches, accumulation = {"bytelm": (11, 2), "digits": (5, 1), "probe": (9, self.accumulation)}[self.name]
        return 3 * math.ceil(batches / accumulation)

    @property
    def script(self) -> Path:
        return REPOSITORY / "jobs" / self.name / "train.py"


FEW = (
    Job(name="probe", workers=1, loader_workers=2, every_steps=2, accumulation=2),
    Job(name="digits", workers=1, loader_workers=0, every_steps=3),
    Job(name="bytelm", workers=2, loader_workers=1, every_steps=4),
    Job(name="probe", workers=2, loader_workers=0, every_steps=5, accumulation=3),
    Job(name="digits", workers=3, loader_workers=2, every_steps=4),
    Job(name="bytelm", workers=3, loader_workers=0, every_steps=3),
    Job(name="probe", workers=4, loader_workers=3, every_steps=4),
    Job(name="bytelm", workers=4, loader_workers=1, every_steps=5),
)
"""Every job, number of workers and number of loader workers at least once."""
MANY = (
    *FEW,
    *(
        Job(name=name, workers=workers, loader_workers=loader_workers, every_steps=2 + (workers + loader_workers) % 4)
        for name, workers, loader_workers in itertools.product(("bytelm", "digits", "probe"), (1, 2, 3, 4), (0, 1, 2, 3))
    ),
)


def drawn(number: int) -> tuple[Job, JobSpec, FaultPlan]:
    """Plan `number`: a job, and one to six faults at any moments that can come to pass."""
    chance = random.Random(number)
    job = FEW[number % len(FEW)] if number < OF_FEW else chance.choice(MANY)
    for _ in range(DRAWS):
        faults = [_fault(job, chance) for _ in range(chance.randint(1, MOST_FAULTS))]
        spec = JobSpec.model_validate(
            {
                "name": job.name,
                "script": str(job.script),
                "args": job.args,
                "workers": job.workers,
                "seed": 1,
                "checkpoint": {"every_steps": job.every_steps, "keep": chance.randint(2, 4)},
                "recovery": {"preload": PRELOAD.get(job.name, []), "hang_timeout": 30.0},
                "faults": {"schedule": faults},
                "timeout": 400.0,
            }
        )
        try:
            return job, spec, make_plan(spec)
        except UsageError:
            continue  # one of its faults can never fire: draw others
    raise AssertionError(f"plan {number}: no plan that can be carried out in {DRAWS} draws")


def _fault(job: Job, chance: random.Random) -> dict[str, object]:
    phase = chance.choice(PHASES)
    fault: dict[str, object] = {"rank": chance.randrange(job.workers), "phase": phase}
    if phase in CHECKPOINT_PHASES:
        fault["at_step"] = job.every_steps * chance.randint(1, job.steps // job.every_steps)
    elif phase == "restore.end":
        if chance.random() < 0.5:
            fault["at_step"] = job.every_steps * chance.randint(1, job.steps // job.every_steps)
    else:
        fault["at_step"] = chance.randint(1, job.steps)
    return fault


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("plans")


NUMBERS = [number if number in BY_DAY else pytest.param(number, marks=pytest.mark.nightly) for number in range(IN_ALL)]


@pytest.mark.parametrize("number", NUMBERS)
def test_a_random_plan_passes(warm_drills: WarmDrills, root: Path, number: int) -> None:
    job, spec, plan = drawn(number)
    path = root / "job.yaml"
    path.write_text(json.dumps(spec.model_dump(mode="json", exclude_defaults=True), indent=1))
    result = warm_drills(path, root=root)
    verdict = result.verdict
    told = "\n".join(
        [
            f"plan {number}: {verdict.status} ({verdict.exit_code}): {verdict.cause}",
            *(f"  {fault.id} {fault.describe()}" for fault in plan.faults),
            f"the job file, to have it again:\n{path.read_text()}",
            f"the run: {result.run.path}",
        ]
    )
    if verdict.outcome == "fault_missed":
        # Two of its faults raced, and the other was the first: the drill says so, of both, and is no failure.
        assert verdict.status == "INCONCLUSIVE" and number >= OF_FEW and number not in BY_DAY, told
        named = [fault.id for fault in plan.faults if f"{fault.id} ({fault.describe()})" in verdict.cause]
        assert len(named) == 2, told
        return
    assert verdict.status == "PASS", told
    assert verdict.steps == job.steps, told
    # Two faults may end one attempt together; nothing else may end any.
    assert 2 <= len(verdict.attempts) <= len(plan.faults) + 1, told
    assert not any("unplanned" in attempt.ended_by for attempt in verdict.attempts), told


def test_four_plans_meet_every_moment_and_every_kind_of_job() -> None:
    """What is drawn is fixed, so this can be: each kind of moment, each kind of job, and restores in a row."""
    assert set(BY_DAY) < set(FOUR)
    plans = [drawn(number) for number in FOUR]
    for kind in ("name", "workers", "loader_workers"):
        assert {getattr(job, kind) for job, _, _ in plans} == {getattr(job, kind) for job in MANY}
    assert {fault.phase for _, _, plan in plans for fault in plan.faults} == set(PHASES)
    assert {len(plan.faults) for _, _, plan in plans} >= {1, 2, 3, 4}
    assert {drawn(number)[0] for number in range(OF_FEW)} == set(FEW)
    assert {job.workers for job in FEW} == {1, 2, 3, 4} and {job.loader_workers for job in FEW} == {0, 1, 2, 3}
