"""Where each file of a run lives. The only place that spells a path inside a run directory."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from chaosrun.records.object_urls import ObjectPlace, is_url

CHECKPOINT_NAME = re.compile(r"step-([0-9]{8})")
ATTEMPT_NAME = re.compile(r"[0-9]{3,}")
DIAGNOSIS = "diagnosis"
MANIFEST_NAME = "MANIFEST.json"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def checkpoint_step(name: str) -> int | None:
    """The step of a checkpoint directory's name, None when the name is not one of ours."""
    match = CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match else None


RUN = "run"
"""The only leg of a run in production."""
LEGS = ("reference", "chaos", "confirm", RUN)
"""In the order in which a run has them."""


@lru_cache(maxsize=4096)
def _joined(folder: Path, name: str) -> Path:
    return folder / name


class Below:
    """A file or directory of a layout, by its path below that one's `path`, or its `storage` where it has one."""

    def __init__(self, name: str, *, stored: bool = False) -> None:
        self._name, self._stored = name, stored

    def __get__(self, layout: Any, kind: object = None) -> Path:
        return _joined((self._stored and layout.storage) or layout.path, self._name)


class OfRank:
    """Likewise a file that each rank, or node, has of its own; called with its number."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: Any, kind: object = None) -> Callable[[int], Path]:
        return lambda rank: _joined(layout.path, self._name.format(rank))


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """One incarnation of all workers: `attempts/NNN/`."""

    path: Path

    trace = OfRank("rank-{}.trace")
    effects = OfRank("rank-{}.effects")
    """The first thing that the script did to the world outside; none where nothing was seen."""
    log = OfRank("rank-{}.log")
    launcher_log = OfRank("launcher-{}.log")
    """What the command of a node printed, and its ranks until they began to train."""
    heartbeat = OfRank("rank-{}.heartbeat")
    end = OfRank("rank-{}.end.json")
    opened = OfRank("rank-{}.opened.jsonl")
    """Files that the rank read although another leg had left them, where it did; see `records.opened`."""
    points = OfRank("rank-{}.points.jsonl")
    """What a surveyed rank came by, one JSON line {phase, step, target} each; see `faults.points`."""
    operations = OfRank("rank-{}.operations.jsonl")
    """What a rank's script did to files in saves that were traced; see `records.operations`."""
    inspection = OfRank("rank-{}.inspection")
    """Directory of the moments that a replay wrote down; see `records.inspection`."""


@dataclass(frozen=True, slots=True)
class LegLayout:
    """One supervised execution of the job. `storage`: where checkpoints, staging and quarantine lie if elsewhere, on one file
    system; `objects`: where checkpoints are in an object store, of which the leg's directory then holds copies."""

    path: Path
    storage: Path | None = None
    objects: ObjectPlace | None = None

    @classmethod
    def at(cls, path: Path, place: str | None, env: Mapping[str, str] | None = None) -> Self:
        """`place`: as `place` of another one says, which may have crossed to another process."""
        if place is not None and is_url(place):
            return cls(path, objects=ObjectPlace(place, tuple((env or {}).items())))
        return cls(path, Path(place) if place else None)

    @property
    def place(self) -> str | None:
        """Directory or URL of the checkpoints; None: in the leg's own directory."""
        return self.objects.url if self.objects else str(self.storage) if self.storage else None

    journal = Below("journal.jsonl")
    faults = Below("faults")
    notes = Below("faults/notes")
    """Directory of what faults that leave their rank alive were seen to do; see `records.markers`."""

    def outputs_before(self, fault: str) -> Path:
        """Copy of the script's outputs, from before the save in which this fault cut the power."""
        return self.faults / f"{fault}.outputs"

    def complete(self, group: str | None, attempt: int) -> Path:
        """Is there when all faults of this group have come to their points in this attempt."""
        return self.faults / f"{(group or '').replace('/', '-')}.attempt-{attempt}.complete"

    environment = Below("environment.json")
    repeats = Below("repeats.json")
    """Of a reference that another whole leg was equal to: which run showed it."""
    left = Below("left.json")
    """Of a script that saves by itself: what its files of tensors held at the end."""
    began = Below("began.json")
    """Of a leg that does not begin at the beginning; see `records.began`."""
    checkpoints = Below("checkpoints", stored=True)
    staging = Below("staging", stored=True)
    quarantine = Below("quarantine", stored=True)
    output = Below("output")
    """The script's own, `CHAOSRUN_OUTPUT`: no other leg looks into it."""
    work = Below("folders/above/work")
    """The working folder of a script that saves by itself: links to the job's, two folders above (`..`), and what it writes."""

    def filled_in(self, text: str) -> str:
        """With `{output}` replaced."""
        return text.replace("{output}", str(self.output.absolute()))

    tensors = Below("tensors")
    """Raw bytes of inspected tensors by their digest."""

    def attempt(self, number: int) -> AttemptLayout:
        return AttemptLayout(_joined(self.path, f"attempts/{number:03d}"))

    def attempts(self) -> list[int]:
        """Numbers of the attempts that have a directory, ascending."""
        folder = self.path / "attempts"
        if not folder.is_dir():
            return []
        return sorted(int(entry.name) for entry in folder.iterdir() if ATTEMPT_NAME.fullmatch(entry.name))


@dataclass(frozen=True, slots=True)
class RunLayout:
    """One drill: `<root>/runs/<run id>/`."""

    path: Path

    @property
    def run_id(self) -> str:
        return self.path.name

    job_yaml = Below("job.yaml")
    run_json = Below("run.json")
    """Resolved spec, where it came from, the command, versions: what `resume` and `verify` need."""
    plan_json = Below("plan.json")
    verdict_json = Below("verdict.json")
    report_html = Below("report.html")
    report_md = Below("report.md")
    junit_xml = Below("junit.xml")
    report_txt = Below("report.txt")
    tensorboard = Below("tensorboard")
    """Directory of event files; see `report.tensorboard`."""
    diagnosis = Below(DIAGNOSIS)
    """Directory of the replays of the latest `chaosrun diagnose`; they are legs like the run's own."""
    diagnosis_json = Below("diagnosis.json")

    def replay(self, name: str, storage: Path | None = None) -> LegLayout:
        return self.leg(f"{DIAGNOSIS}/{name}", storage)

    supervisor_json = Below("supervisor.json")
    """Who last supervised the run and how that ended; see `records.supervision`."""
    supervisor_log = Below("supervisor.log")
    """What a supervisor of its own process said on stdout and stderr; see `chaosrun.supervise.process`."""
    lock = Below("lock")

    def leg(self, name: str, storage: Path | None = None) -> LegLayout:
        return LegLayout(self.path / name, storage)

    @property
    def main(self) -> str:
        """The leg that is asked about: under faults, or in production."""
        return RUN if (self.path / RUN).is_dir() else "chaos"

    @property
    def reference(self) -> LegLayout:
        return self.leg("reference")
