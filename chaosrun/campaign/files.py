"""The files of sweeps and suites, in `<root>/sweeps/<id>/` and `<root>/suites/<id>/`: typed values with a version.

sweep.json is rewritten after each drill; suite.json holds the plan, and journal.jsonl gets a line when a drill starts and when
it has ended. Runs nothing.
"""

import shlex
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec
from pydantic import BaseModel

from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.campaign.results import DrillResult, PointResult
from chaosrun.errors import UsageError
from chaosrun.plan.points import Point
from chaosrun.records.codec import DamagedRecordError, decoder_of, read_records
from chaosrun.records.events import Event
from chaosrun.records.folders import called, new_folder
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import Below
from chaosrun.records.locks import locked
from chaosrun.records.naming import root_arguments, shortest
from chaosrun.spec.fragment import scheduled
from chaosrun.spec.suite import Comparison
from chaosrun.verify.ruling import EXIT_CODES, VerdictStatus

VERSION = 1
T = TypeVar("T")


def plain(value: object) -> Any:
    """A dataclass as JSON values."""
    return msgspec.to_builtins(value, enc_hook=_plain)


def checked(kind: type[T], value: object) -> T:
    """The dataclass from which `plain` made the value. Raises ValueError for a value of another dataclass."""
    decoder_of(kind)
    return msgspec.convert(value, kind, dec_hook=_special)


def encode(value: object, *, indent: int = -1) -> bytes:
    return msgspec.json.format(msgspec.json.encode({"v": VERSION, **plain(value)}), indent=indent)


def decode(kind: type[T], data: bytes) -> T:
    """Raises ValueError unless it is such a value of this version."""
    value, version = _read(data)
    if version != VERSION:
        raise ValueError(f"not of version {VERSION}" if version is None else f"of version {version!r}")
    return checked(kind, value)


def save(path: Path, value: object) -> None:
    write_durably(path, encode(value, indent=1))


def _read(data: bytes) -> tuple[Any, object]:
    """A JSON value and its version, None without one. Raises ValueError for invalid JSON."""
    try:
        value = msgspec.json.decode(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error
    return value, value.get("v") if isinstance(value, dict) else None


def _plain(value: object) -> object:
    """Encode types that msgspec does not know: sections of a suite's file, and paths."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else str(value)


def _special(kind: type[Any], value: Any) -> object:
    """Decode what `_plain` encoded."""
    return kind.model_validate(value) if issubclass(kind, BaseModel) else kind(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    sweep_id: str
    created_s: float
    job: str
    """Absolute path of the job file."""
    text: str
    overrides: tuple[str, ...]
    cleared: tuple[str, ...]
    """Overrides that remove the job's own faults."""
    reference_key: str
    """Key of the one reference of all drills in the cache (`supervise.early_end.reference_keys`)."""
    survey: str
    """Id of the run that found the points, which holds the reference leg."""
    workers: int
    final_step: int
    passages: int
    """Number of different points that the survey passed, from which `points` were chosen."""
    steps: tuple[int, ...]
    points: tuple[Point, ...]
    tried: Mapping[str, PointResult] = field(default_factory=dict)
    """By the point's id."""

    def overrides_of(self, point: Point) -> list[str]:
        return [*self.overrides, *self.cleared, scheduled(point.schedule)]

    @property
    def left(self) -> list[Point]:
        return [point for point in self.points if point.id not in self.tried]

    @property
    def status(self) -> VerdictStatus:
        """The worst status of the points tried; PASS if none was."""
        seen = {tried.status for tried in self.tried.values()}
        return "FAIL" if "FAIL" in seen else "INCONCLUSIVE" if "INCONCLUSIVE" in seen else "PASS"

    @property
    def exit_code(self) -> int:
        """PASS's when every point was tried and passed, FAIL's when one failed, else INCONCLUSIVE's."""
        whole = self.tried and not self.left
        return EXIT_CODES[self.status if whole or self.status == "FAIL" else "INCONCLUSIVE"]

    def to_json(self) -> dict[str, object]:
        return {"v": VERSION, **plain(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class SuitePlan:
    """A suite's request, completely planned."""

    suite_id: str
    name: str
    path: str
    """Absolute path of the suite's file."""
    created_s: float
    night: str
    seed: int | None
    shard: str | None
    fail_fast: bool
    by_hand: bool
    """Only some drills were chosen by name: such a run does not count as a night."""
    history: str
    drills: tuple[PlannedDrill, ...]
    """In the order in which they are begun."""
    notes: tuple[str, ...] = ()
    comparison: Comparison | None = None
    """How the drills' losses are compared, with its first drill decided; None: they are not compared."""
    files: Mapping[str, str | None] = field(default_factory=dict)
    """Digests of the files it was planned from, by absolute path."""

    def __post_init__(self) -> None:
        """Raises ValueError when drills share a name, which identifies their results."""
        if len({drill.name for drill in self.drills}) < len(self.drills):
            raise ValueError("two drills have one name")

    def to_json(self) -> dict[str, object]:
        return {"v": VERSION, **plain(self)}


_Kept = TypeVar("_Kept", Sweep, SuitePlan)


@dataclass(frozen=True, slots=True)
class _Folder(Generic[_Kept]):
    path: Path
    what: ClassVar[str]
    kind: ClassVar[type[Any]]

    @property
    def file(self) -> Path:
        return self.path / f"{self.what}.json"

    @classmethod
    def new(cls, root: Path, name: str) -> Self:
        """Raises UsageError when no folder can be made."""
        return cls(new_folder(root / f"{cls.what}s", name))

    @classmethod
    def find(cls, root: Path, ref: str, of: Path) -> Self:
        """The folder of the file `of` that `ref` names: an id, a unique prefix of one, or "latest". Raises UsageError."""
        created_s: dict[Path, float] = {}
        for path in (root / f"{cls.what}s").glob("*"):
            try:
                kept = cls(path).load()
            except UsageError:
                if path.name == ref:
                    raise
                continue  # damaged or of another version: the others can still be used
            if (kept.job if isinstance(kept, Sweep) else kept.path) == str(of.resolve()):
                created_s[path] = kept.created_s
        if (found := called(ref, created_s)) is not None:
            return cls(found)
        names = ", ".join(sorted(path.name for path in created_s)[-5:])
        raise UsageError(
            f"no {cls.what} {ref!r} of {of} under {root}",
            hint=f"there are {names}" if names else "without --resume a new one begins",
        )

    def save(self, value: _Kept) -> None:
        save(self.file, value)

    def load(self) -> _Kept:
        """Raises UsageError when it holds no value that this version can continue with."""
        again = f"start the {self.what} again"
        try:
            data = self.file.read_bytes()
            if (found := _read(data)[1]) not in (None, VERSION):
                raise UsageError(
                    f"{self.file} has version {found!r}, this chaosrun reads version {VERSION}",
                    hint=f"continue with the version of chaosrun that began the {self.what}, or {again}",
                )
            return decode(self.kind, data)
        except (OSError, ValueError) as error:
            raise UsageError(f"{self.path} holds no {self.what} that can be read ({error})", hint=again) from error

    def locked(self) -> AbstractContextManager[int]:
        """Lock it for this process. Raises UsageError while another process holds it."""
        return locked(self.path / "lock", f"{self.what} {self.path.name} is being carried out")

    def resume_command(self, of: str) -> str:
        where = root_arguments(self.path.parent.parent)
        return shlex.join(["chaosrun", self.what, shortest(Path(of)), "--resume", self.path.name, *where])


class SweepFolder(_Folder[Sweep]):
    what = "sweep"
    kind = Sweep


class SuiteBegan(Event, frozen=True, kw_only=True, tag="suite.began"):
    """A process has begun to run the suite."""


class SuiteEnded(Event, frozen=True, kw_only=True, tag="suite.ended"):
    """The process has stopped running the suite."""


class DrillStarted(Event, frozen=True, kw_only=True, tag="drill.started"):
    name: str
    run: str


class DrillEnded(Event, frozen=True, kw_only=True, tag="drill.ended"):
    name: str
    result: object
    """A `results.DrillResult`, as JSON values."""


SUITE_EVENTS = msgspec.json.Decoder(SuiteBegan | SuiteEnded | DrillStarted | DrillEnded)


@dataclass(slots=True)
class Progress:
    started: dict[str, str] = field(default_factory=dict)
    """Run directory by drill, of the latest start."""
    results: dict[str, DrillResult] = field(default_factory=dict)
    """Without cancelled drills, which are still to be run."""
    took_s: float = 0.0


class SuiteFolder(_Folder[SuitePlan]):
    what = "suite"
    kind = SuitePlan

    journal = Below("journal.jsonl")
    index_html = Below("index.html")
    junit_xml = Below("suite.junit.xml")
    summary_md = Below("summary.md")

    def progress(self) -> Progress:
        """Raises UsageError when the journal is damaged other than at its end."""
        done = Progress()
        try:
            events = list(read_records(self.journal, SUITE_EVENTS)) if self.journal.is_file() else []
            for former, event in pairwise(events):
                # The time before a process began does not count.
                done.took_s += 0.0 if isinstance(event, SuiteBegan) else max(0.0, event.time_s - former.time_s)
            for event in events:
                if isinstance(event, DrillStarted):
                    done.started[event.name] = event.run
                elif isinstance(event, DrillEnded):
                    result = checked(DrillResult, event.result)
                    if not result.cancelled:
                        done.results[result.name] = result
        except (DamagedRecordError, ValueError) as error:
            raise UsageError(f"{self.journal} is damaged: {error}", hint="start the suite again") from error
        return done
