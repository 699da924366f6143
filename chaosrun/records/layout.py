"""Where each file of a run lives. The only place that spells a path inside a run directory."""

import re
from dataclasses import dataclass
from pathlib import Path

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


LEGS = ("reference", "chaos", "confirm")
"""In the order in which a run has them."""


@dataclass(frozen=True, slots=True)
class AttemptLayout:
    """One incarnation of all workers: `attempts/NNN/`."""

    path: Path

    def trace(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.trace.jsonl"

    def log(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.log"

    def launcher_log(self, node_rank: int) -> Path:
        """What the command of a node printed, and its ranks until they began to train."""
        return self.path / f"launcher-{node_rank}.log"

    def heartbeat(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.heartbeat"

    def end(self, rank: int) -> Path:
        return self.path / f"rank-{rank}.end.json"

    def opened(self, rank: int) -> Path:
        """Files that the rank read although another leg had left them, where it did; see `records.opened`."""
        return self.path / f"rank-{rank}.opened.jsonl"

    def points(self, rank: int) -> Path:
        """What a surveyed rank came by, one JSON line {phase, step, target} each; see `faults.points`."""
        return self.path / f"rank-{rank}.points.jsonl"

    def operations(self, rank: int) -> Path:
        """What a rank's script did to files in saves that were traced; see `records.operations`."""
        return self.path / f"rank-{rank}.operations.jsonl"

    def inspection(self, rank: int) -> Path:
        """Directory of the moments that a replay wrote down; see `records.inspection`."""
        return self.path / f"rank-{rank}.inspection"


@dataclass(frozen=True, slots=True)
class LegLayout:
    """One supervised execution of the job: the reference or the chaos leg.

    `storage` is where checkpoints go when `checkpoint.storage` puts them elsewhere; staging and quarantine lie beside
    them, on the same file system, so that a commit is one rename.
    """

    path: Path
    storage: Path | None = None

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def faults(self) -> Path:
        return self.path / "faults"

    @property
    def notes(self) -> Path:
        """Directory of what faults that leave their rank alive were seen to do; see `records.markers`."""
        return self.faults / "notes"

    def outputs_before(self, fault: str) -> Path:
        """Copy of the script's outputs, from before the save in which this fault cut the power."""
        return self.faults / f"{fault}.outputs"

    @property
    def environment(self) -> Path:
        return self.path / "environment.json"

    @property
    def checkpoints(self) -> Path:
        return (self.storage or self.path) / "checkpoints"

    @property
    def staging(self) -> Path:
        return (self.storage or self.path) / "staging"

    @property
    def quarantine(self) -> Path:
        return (self.storage or self.path) / "quarantine"

    @property
    def output(self) -> Path:
        """The script's own, `CHAOSRUN_OUTPUT`: no other leg looks into it."""
        return self.path / "output"

    @property
    def work(self) -> Path:
        """The working folder of a script that saves by itself: links to the job's, and what it writes by relative paths. What
        is in the two folders above the job's is seen where `..` leads."""
        return self.path / "folders" / "above" / "work"

    def filled_in(self, text: str) -> str:
        """With `{output}` replaced."""
        return text.replace("{output}", str(self.output.absolute()))

    @property
    def tensors(self) -> Path:
        """Raw bytes of inspected tensors by their digest."""
        return self.path / "tensors"

    def attempt(self, number: int) -> AttemptLayout:
        return AttemptLayout(self.path / "attempts" / f"{number:03d}")

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

    @property
    def job_yaml(self) -> Path:
        return self.path / "job.yaml"

    @property
    def run_json(self) -> Path:
        """Resolved spec, where it came from, the command, versions: what `resume` and `verify` need."""
        return self.path / "run.json"

    @property
    def plan_json(self) -> Path:
        return self.path / "plan.json"

    @property
    def verdict_json(self) -> Path:
        return self.path / "verdict.json"

    @property
    def report_html(self) -> Path:
        return self.path / "report.html"

    @property
    def report_md(self) -> Path:
        return self.path / "report.md"

    @property
    def junit_xml(self) -> Path:
        return self.path / "junit.xml"

    @property
    def report_txt(self) -> Path:
        return self.path / "report.txt"

    @property
    def tensorboard(self) -> Path:
        """Directory of event files; see `report.tensorboard`."""
        return self.path / "tensorboard"

    @property
    def diagnosis(self) -> Path:
        """Directory of the replays of the latest `chaosrun diagnose`; they are legs like the run's own."""
        return self.path / DIAGNOSIS

    @property
    def diagnosis_json(self) -> Path:
        return self.path / "diagnosis.json"

    def replay(self, name: str, storage: Path | None = None) -> LegLayout:
        return self.leg(f"{DIAGNOSIS}/{name}", storage)

    @property
    def supervisor_json(self) -> Path:
        """Who last supervised the run and how that ended; see `records.supervision`."""
        return self.path / "supervisor.json"

    @property
    def supervisor_log(self) -> Path:
        """What a supervisor of its own process said on stdout and stderr; see `chaosrun.supervise.process`."""
        return self.path / "supervisor.log"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    def leg(self, name: str, storage: Path | None = None) -> LegLayout:
        return LegLayout(self.path / name, storage)

    @property
    def reference(self) -> LegLayout:
        return self.leg("reference")
