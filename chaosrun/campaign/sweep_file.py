"""What is known of a sweep, and the folder it is kept in: `<root>/sweeps/<sweep id>/`.

sweep.json is written anew, durably, after each drill; the runs lie beside it, those that passed are removed. Runs nothing.
"""

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaosrun.campaign import json_file
from chaosrun.plan.points import Point
from chaosrun.records.folders import find_folder, new_folder
from chaosrun.records.locks import locked
from chaosrun.records.naming import root_arguments, shortest
from chaosrun.spec.fragment import scheduled
from chaosrun.verify.verdict import EXIT_CODES, Verdict, VerdictStatus

SWEEP_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PointResult:
    """What became of the drill of a point."""

    status: VerdictStatus
    exit_code: int
    cause: str
    reached: bool
    """Every fault of its plan was shown to have happened, this point's among them."""
    run: str | None
    """Id of its run; None when there is none, or none any more."""
    took_s: float

    @classmethod
    def of(cls, verdict: Verdict, *, run: str | None, took_s: float) -> "PointResult":
        return cls(
            status=verdict.status,
            exit_code=verdict.exit_code,
            cause=verdict.cause,
            reached=bool(verdict.faults) and all(fault.landed for fault in verdict.faults),
            run=run,
            took_s=round(took_s, 3),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    sweep_id: str
    created_s: float
    job: str
    """Absolute path of the job file."""
    text: str
    """The job file as it was."""
    overrides: tuple[str, ...]
    cleared: tuple[str, ...]
    """Overrides that leave the job none of its own faults."""
    reference_key: str
    """What the one reference of all drills depends on (`supervise.reference`)."""
    survey: str
    """Id of the run that found the points, whose undisturbed leg is the reference."""
    workers: int
    final_step: int
    passages: int
    """Different points that the survey came by, of which `points` are the chosen ones."""
    steps: tuple[int, ...]
    """The steps at which the phases of the training are tried."""
    points: tuple[Point, ...]
    tried: Mapping[str, PointResult] = field(default_factory=dict)
    """By the point's id."""

    def overrides_of(self, point: Point) -> list[str]:
        """All overrides of the drill of a point."""
        return [*self.overrides, *self.cleared, scheduled(point.schedule)]

    @property
    def left(self) -> list[Point]:
        return [point for point in self.points if point.id not in self.tried]

    @property
    def reached(self) -> int:
        return sum(tried.reached for tried in self.tried.values())

    @property
    def exit_code(self) -> int:
        """That of PASS when every point was tried and passed, of FAIL when one failed, else of INCONCLUSIVE."""
        seen = {tried.status for tried in self.tried.values()}
        if "FAIL" in seen:
            return EXIT_CODES["FAIL"]
        return EXIT_CODES["INCONCLUSIVE" if self.left or seen != {"PASS"} else "PASS"]

    def to_json(self) -> dict[str, Any]:
        return {"v": SWEEP_VERSION, **json_file.plain(self)}


@dataclass(frozen=True, slots=True)
class SweepFolder:
    path: Path

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    def save(self, sweep: Sweep) -> None:
        json_file.save(self.file, sweep, SWEEP_VERSION)

    def load(self) -> Sweep:
        """Raises UsageError when it holds no sweep that this version can read."""
        return json_file.load(self.file, Sweep, version=SWEEP_VERSION, what="sweep")

    def resume_command(self, sweep: Sweep) -> str:
        where = root_arguments(self.path.parent.parent)
        return shlex.join(["chaosrun", "sweep", shortest(Path(sweep.job)), "--resume", sweep.sweep_id, *where])

    def locked(self) -> AbstractContextManager[int]:
        """Hold the sweep for this process. Raises UsageError while another one does."""
        return locked(self.path / "lock", f"sweep {self.path.name} is being carried out")


def new_sweep(root: Path, name: str) -> SweepFolder:
    """A folder of its own. Raises UsageError when none can be made."""
    return SweepFolder(new_folder(root / "sweeps", name))


def find_sweep(root: Path, ref: str, job: Path) -> SweepFolder:
    """The sweep of this job file called `ref`: an id, a unique prefix of one, or "latest". Raises UsageError."""

    def began(path: Path) -> tuple[str, float]:
        sweep = SweepFolder(path).load()
        return sweep.job, sweep.created_s

    otherwise = "without --resume a new one begins"
    return SweepFolder(find_folder(root / "sweeps", ref, began, of=job, otherwise=otherwise))
