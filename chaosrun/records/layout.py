"""The path of each file of a run. Only this module spells paths inside a run directory."""

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
    """The step in the name of a checkpoint directory; None if chaosrun gives no such name."""
    match = CHECKPOINT_NAME.fullmatch(name)
    return int(match[1]) if match else None


RUN = "run"
"""The only leg of a run in production."""
LEGS = ("reference", "chaos", "confirm", RUN)
"""In the order in which a run makes them."""


@lru_cache(maxsize=4096)
def _joined(folder: Path, name: str) -> Path:
    return folder / name


class Below:
    """A file or directory of a layout, at this path below the layout's `path`, or below its `storage` if it has one."""

    def __init__(self, name: str, *, stored: bool = False) -> None:
        self._name, self._stored = name, stored

    def __get__(self, layout: Any, kind: object = None) -> Path:
        return _joined((self._stored and layout.storage) or layout.path, self._name)


class OfRank:
    """A file of a layout that exists for each rank, or node; called with its number."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, layout: Any, kind: object = None) -> Callable[[int], Path]:
        return lambda rank: _joined(layout.path, self._name.format(rank))


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """The directory of one attempt: `attempts/NNN/`."""

    path: Path

    trace = OfRank("rank-{}.trace")
    effects = OfRank("rank-{}.effects")
    """The first effect of the script outside its process; no file if none was seen."""
    log = OfRank("rank-{}.log")
    launcher_log = OfRank("launcher-{}.log")
    """Output of a node's command, and of its ranks until they began to train."""
    heartbeat = OfRank("rank-{}.heartbeat")
    end = OfRank("rank-{}.end.json")
    opened = OfRank("rank-{}.opened.jsonl")
    """Files of other legs, or of earlier attempts, that the rank read, if any; see `records.opened`."""
    points = OfRank("rank-{}.points.jsonl")
    """Points that a surveyed rank reached, one JSON line {phase, step, target} each; see `faults.points`."""
    operations = OfRank("rank-{}.operations.jsonl")
    """File operations of a rank's script in traced saves; see `records.operations`."""
    saved = Below("saved")
    """Empty; touched whenever a script's own save begins on any rank."""
    inspection = OfRank("rank-{}.inspection")
    """Directory of the moments that a replay wrote; see `records.inspection`."""


@dataclass(frozen=True, slots=True)
class LegLayout:
    """One supervised execution of the job. `storage`: where checkpoints, staging and quarantine are if elsewhere, on one file
    system; `objects`: the place of checkpoints in an object store; the leg's directory then holds copies."""

    path: Path
    storage: Path | None = None
    objects: ObjectPlace | None = None

    @classmethod
    def at(cls, path: Path, place: str | None, env: Mapping[str, str] | None = None) -> Self:
        """`place`: the `place` of another layout, perhaps sent from another process."""
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
    """Directory of notes: the effects of faults that leave their rank alive; see `records.markers`."""

    def outputs_before(self, fault: str) -> Path:
        """A copy of the script's outputs from before the save in which this fault cut the power."""
        return self.faults / f"{fault}.outputs"

    def complete(self, group: str | None, attempt: int) -> Path:
        """A file that exists once all faults of this group have reached their points in this attempt."""
        return self.faults / f"{(group or '').replace('/', '-')}.attempt-{attempt}.complete"

    environment = Below("environment.json")
    repeats = Below("repeats.json")
    """Which run repeated this reference with an equal leg; only then does the file exist."""
    inputs = Below("inputs.json")
    """Digests of the job's own sources; see `records.inputs`."""
    left = Below("left.json")
    """Contents of files of tensors at the end, if the script saves by itself; see `records.left`."""
    began = Below("began.json")
    """Checkpoints that a leg was given to begin with; see `records.began`."""
    checkpoints = Below("checkpoints", stored=True)
    staging = Below("staging", stored=True)
    quarantine = Below("quarantine", stored=True)
    output = Below("output")
    """The script's own output folder, `CHAOSRUN_OUTPUT`: no other leg reads it."""
    work = Below("folders/above/work")
    """Working folder of a script that saves by itself: links to the job's, also in two folders above (`..`), and its files."""

    def filled_in(self, text: str) -> str:
        """The text with `{output}` replaced."""
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
    """Resolved spec, its source, the command, versions: everything that `resume` and `verify` need."""
    plan_json = Below("plan.json")
    verdict_json = Below("verdict.json")
    report_html = Below("report.html")
    report_md = Below("report.md")
    junit_xml = Below("junit.xml")
    report_txt = Below("report.txt")
    tensorboard = Below("tensorboard")
    """Directory of event files; see `report.tensorboard`."""
    diagnosis = Below(DIAGNOSIS)
    """Directory of the replays of the latest `chaosrun diagnose`, which are legs, too."""
    diagnosis_json = Below("diagnosis.json")

    def replay(self, name: str, storage: Path | None = None) -> LegLayout:
        return self.leg(f"{DIAGNOSIS}/{name}", storage)

    supervisor_json = Below("supervisor.json")
    """Who last supervised the run and how that ended; see `records.supervision`."""
    supervisor_log = Below("supervisor.log")
    """stdout and stderr of a supervisor in a separate process; see `chaosrun.supervise.process`."""
    lock = Below("lock")

    def leg(self, name: str, storage: Path | None = None) -> LegLayout:
        return LegLayout(self.path / name, storage)

    @property
    def main(self) -> str:
        """The main leg: the one under faults, or in production."""
        return RUN if (self.path / RUN).is_dir() else "chaos"

    @property
    def reference(self) -> LegLayout:
        return self.leg("reference")
