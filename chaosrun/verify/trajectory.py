"""The loss of every step of a leg, and the distance between those of two runs. Judges no recovery.

Runs of different shape (workers × batch × accumulation) are different jobs: their losses should be nearly equal.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from chaosrun.errors import UsageError
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.traces import StepRecord
from chaosrun.verify.lineage import lineage

EXIT_BEYOND = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    workers: int
    losses: tuple[float, ...]
    """Losses from step 1 on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDifference:
    """The distance between two trajectories, over the steps that both have."""

    atol: float
    steps: int
    lengths: tuple[int, int]
    """Steps of the first trajectory and of this one."""
    largest: float
    mean: float
    first_beyond: int | None
    """The first step whose losses differ by more than `atol`, or that only one of the two has."""
    expected: float | None = None
    """Loss of the first trajectory at `first_beyond`."""
    seen: float | None = None

    @property
    def within(self) -> bool:
        return self.first_beyond is None

    def to_json(self) -> dict[str, object]:
        """Numbers that JSON cannot hold (infinity, NaN) are null; `first_beyond` then shows the difference."""
        told = {**asdict(self), "within": self.within}
        return {name: None if isinstance(each, float) and not math.isfinite(each) else each for name, each in told.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedRun:
    run_id: str
    name: str
    workers: int
    changes: tuple[str, ...]
    """Overrides of the job file on its command line, which distinguish runs of one job."""
    difference: LossDifference
    """From the first run; zero for the first itself."""

    def to_json(self) -> dict[str, object]:
        about = {"run": self.run_id, "name": self.name, "workers": self.workers, "changes": self.changes}
        return {**about, **self.difference.to_json()}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryComparison:
    leg: str
    atol: float
    runs: tuple[ComparedRun, ...]
    """The others are compared with the first."""

    @property
    def within(self) -> bool:
        return all(run.difference.within for run in self.runs)

    @property
    def exit_code(self) -> int:
        return 0 if self.within else EXIT_BEYOND

    def to_json(self) -> dict[str, object]:
        about = {"v": 1, "leg": self.leg, "atol": self.atol, "within": self.within, "first": self.runs[0].run_id}
        return {**about, "runs": [run.to_json() for run in self.runs]}


def trajectory(run: RunLayout, leg: str = "reference") -> Trajectory:
    """The losses (see `loss_of`) of a leg that ran to its end, by default the reference leg. Raises UsageError, naming the
    run, for any other leg, and for one whose records are damaged."""
    layout = run.leg(leg)
    if not layout.journal.exists():
        hint = f"`chaosrun status {run_argument(run)}` tells what it has done"
        raise UsageError(f"run {run.run_id} has no {leg} leg", hint=hint)
    history = read_leg(layout)
    what = f"the {history.name} leg of run {run.run_id}"
    if history.problems:
        raise UsageError(f"{what} cannot be compared: {history.problems[0]}")
    if history.outcome != "completed":
        raise UsageError(
            f"{what} did not complete ({history.outcome or 'it has not ended'})",
            hint=f"only whole runs have losses to compare; `chaosrun status {run_argument(run)}` says what became of it",
        )
    ranks = lineage(history).steps
    steps = sorted({step for records in ranks.values() for step in records})
    if not steps or steps != list(range(1, len(steps) + 1)) or any(len(records) != len(steps) for records in ranks.values()):
        raise UsageError(f"{what} cannot be compared: not every rank recorded every step")
    return Trajectory(
        workers=len(ranks), losses=tuple(_loss([ranks[rank][step] for rank in sorted(ranks)], what) for step in steps)
    )


def compare_trajectories(first: Trajectory, seen: Trajectory, *, atol: float) -> LossDifference:
    pairs = list(zip(first.losses, seen.losses, strict=False))
    apart = [_distance(*pair) for pair in pairs]
    lengths = (len(first.losses), len(seen.losses))
    beyond = next((step for step, distance in enumerate(apart, start=1) if distance > atol), None)
    if beyond is None and lengths[0] != lengths[1]:
        beyond = len(pairs) + 1
    return LossDifference(
        atol=atol,
        steps=len(pairs),
        lengths=lengths,
        largest=max(apart, default=0.0),
        mean=math.fsum(apart) / len(apart) if apart else 0.0,
        first_beyond=beyond,
        expected=_at(first.losses, beyond),
        seen=_at(seen.losses, beyond),
    )


def _loss(records: Sequence[StepRecord], what: str) -> float:
    items = {record.items for record in records}
    if len(items) > 1:
        raise UsageError(f"{what} cannot be compared: at step {records[0].step} its ranks counted {items} items")
    return loss_of(records)


def loss_of(records: Sequence[StepRecord]) -> float:
    """The loss of one step over all these ranks: the sum of the shares that windows recorded, else the mean; NaN if none was
    recorded."""
    items = {record.items for record in records}
    values = [float.fromhex(loss) for record in records for loss in record.loss]
    if not values:
        return math.nan
    if not all(map(math.isfinite, values)):
        return sum(values)  # infinity or NaN, correctly; fsum would raise
    total = math.fsum(values)
    return total / len(values) if None in items else total


def _distance(expected: float, seen: float) -> float:
    """|seen - expected|; NaN and infinity have distance 0 from themselves, and infinity from anything else."""
    if expected == seen or (math.isnan(expected) and math.isnan(seen)):
        return 0.0
    distance = abs(seen - expected)
    return math.inf if math.isnan(distance) else distance


def _at(losses: Sequence[float], step: int | None) -> float | None:
    return losses[step - 1] if step is not None and step <= len(losses) else None
