"""What is exported: a job or a suite, what it needs of a machine, and the commands that run it."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from chaosrun.errors import UsageError
from chaosrun.integrations.export.rendering import checked
from chaosrun.spec.model import JobSpec
from chaosrun.spec.source import load_job, read_source
from chaosrun.spec.suite import load_suite
from chaosrun.spec.tree import Mapping, read_tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A job, or a suite with the largest of what its drills need."""

    name: str
    path: Path
    """Absolute."""
    project: Path
    """Absolute: the repository that the file lies in, else the working directory; the file is below it."""
    suite: bool
    overrides: tuple[str, ...]
    workers: int
    cpu: float
    """Of one worker."""
    gpu: int | Literal["auto"]
    """Of one worker."""
    timeout_s: float | None

    @property
    def inside(self) -> str:
        """The file's path from the project, with slashes."""
        return self.path.relative_to(self.project).as_posix()

    def command(self, path: str) -> list[str]:
        """What runs it, the file being at `path`; options may follow."""
        if path.startswith("-"):
            path = f"./{path}"
        return ["chaosrun", "suite" if self.suite else "submit", path, *self.overrides]

    def cpus(self, workers: int) -> int:
        """Whole CPUs for so many workers."""
        return max(1, math.ceil(workers * self.cpu))


def read_subject(path: Path, overrides: Sequence[str] = ()) -> Subject:
    """Read a job file or a suite. Raises SpecError and UsageError, as `submit` and `suite` would."""
    suite = _is_suite(path)
    if suite and overrides:
        raise UsageError(f"{path} is a suite, which takes no changes ({overrides[0]})", hint="write them into the suite")
    if suite:
        loaded = load_suite(path)
        name, specs = loaded.spec.name, [drill.job.spec for drill in loaded.drills]
    else:
        job = load_job(path, overrides)
        name, specs = job.spec.name, [job.spec]
    absolute = Path(os.path.abspath(path))
    for text in (str(absolute), *overrides):
        checked(text, "the path" if text == str(absolute) else "the change")
    return Subject(
        name=name,
        path=absolute,
        project=_project(absolute),
        suite=suite,
        overrides=tuple(overrides),
        workers=max(spec.workers for spec in specs),
        cpu=max(spec.per_worker.cpu for spec in specs),
        gpu=_gpu(specs),
        timeout_s=None if suite else specs[0].timeout,
    )


def _is_suite(path: Path) -> bool:
    """By its keys: a job has a script. Of a file that is neither, the job's errors say what one is."""
    root, _ = read_tree(read_source(path, "job file or suite"))
    return isinstance(root, Mapping) and "script" not in root.entries and bool({"drills", "matrix"} & root.entries.keys())


def _gpu(specs: Sequence[JobSpec]) -> int | Literal["auto"]:
    asked = {spec.per_worker.gpu for spec in specs}
    return 1 if 1 in asked else "auto" if "auto" in asked else 0


def _project(path: Path) -> Path:
    folders = path.parents
    found = next((folder for folder in folders if (folder / ".git").exists()), None)
    here = Path.cwd()
    return found or (here if here in folders else path.parent)
