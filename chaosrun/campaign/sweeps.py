"""What is known of a sweep, and the folder it is kept in: `<root>/sweeps/<sweep id>/`.

sweep.json is written anew, durably, after each drill; the runs lie beside it, those that passed are removed. Runs nothing.
"""

import json
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.plan.fragment import scheduled
from chaosrun.plan.points import Point
from chaosrun.records.folders import find_folder, new_folder
from chaosrun.records.journal import write_durably
from chaosrun.records.locks import locked
from chaosrun.verify.verdict import EXIT_CODES, Verdict, VerdictStatus

SWEEP_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
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
    def of(cls, verdict: Verdict, *, run: str | None, took_s: float) -> "Tried":
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
    tried: Mapping[str, Tried] = field(default_factory=dict)
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
        return {"v": SWEEP_VERSION, **asdict(self)}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "Sweep":
        """Raises TypeError, KeyError or AttributeError when the value is not a sweep's."""
        known = {key: inner for key, inner in value.items() if key != "v"}
        tuples = {name: tuple(known[name]) for name in ("overrides", "cleared", "steps")}
        points = tuple(Point.from_json(point) for point in known["points"])
        tried = {name: Tried(**entry) for name, entry in known["tried"].items()}
        return cls(**{**known, **tuples, "points": points, "tried": tried})


@dataclass(frozen=True, slots=True)
class SweepFolder:
    path: Path

    @property
    def file(self) -> Path:
        return self.path / "sweep.json"

    def save(self, sweep: Sweep) -> None:
        write_durably(self.file, json.dumps(sweep.to_json(), indent=1).encode())

    def load(self) -> Sweep:
        """Raises UsageError when it holds no sweep that this version can read."""
        try:
            value = json.loads(self.file.read_bytes())
            if value["v"] != SWEEP_VERSION:
                raise UsageError(
                    f"{self.file} has version {value['v']!r}, this chaosrun reads version {SWEEP_VERSION}",
                    hint="go on with the chaosrun that began the sweep, or begin a new one",
                )
            return Sweep.from_json(value)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(f"{self.path} holds no sweep that can be read ({error})", hint="begin a new one") from error

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
