"""The files of a new job, made from the templates beside this module, and how they are written: all of them or none.

The templates are ordinary files: the scripts are checked like every other source. Must not import what they import.
"""

import json
import os
import re
import shlex
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from chaosrun.errors import UsageError
from chaosrun.integrations.export import repository_of, workflow
from chaosrun.integrations.schemas import schema
from chaosrun.spec.fields import job_name
from chaosrun.spec.fragment import flow

Template = Literal["accelerate", "trainer", "lightning", "torch"]
CI = Literal["github", "none"]

TEMPLATES = Path(__file__).parent / "templates"
SCHEMA_NAME = "job.schema.json"
LLAMA = "transformers.models.llama.modeling_llama"
NEEDS: Mapping[Template, Mapping[str, str]] = {
    "trainer": {"transformers": "transformers"},
    "lightning": {"pytorch_lightning": "pytorch-lightning", "torchdata": "torchdata"},
}
"""Modules that a template imports, with the names of their packages for pip."""
PRELOADS: Mapping[Template, str] = {
    "trainer": f"transformers.trainer, {LLAMA}",
    "lightning": "pytorch_lightning, torchdata.stateful_dataloader",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaffold:
    directory: Path
    files: Mapping[Path, str]
    """Text by path, in the order in which the paths are printed."""
    warning: str | None = None
    """What has yet to be done so that GitHub finds the workflow."""

    @property
    def job(self) -> Path:
        return self.directory / "job.yaml"


def init(directory: Path, *, template: Template = "accelerate", ci: CI = "github", force: bool = False) -> Scaffold:
    """Write a job that passes as it is. Raises UsageError, with nothing written, where files exist already (unless `force`),
    and when a module that the template needs is not installed."""
    made = _scaffold(directory, template, ci)
    _write(made, force=force)
    return made


def _scaffold(directory: Path, template: Template, ci: CI) -> Scaffold:
    if missing := [called for module, called in NEEDS.get(template, {}).items() if find_spec(module) is None]:
        raise UsageError(
            f"--template {template} needs {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed",
            hint=f"pip install {' '.join(missing)}, or take --template accelerate or torch",
        )
    preload = PRELOADS.get(template)
    more = f"recovery: {{preload: [{preload}]}}   # imported once, not again at each restart\n" if preload else ""
    job = (TEMPLATES / "job.yaml").read_text()
    files = {
        directory / "job.yaml": job.replace("{name}", flow(job_name(directory.resolve().name))).replace("{more}", more),
        directory / "train.py": (TEMPLATES / template / "train.py").read_text(),
        directory / SCHEMA_NAME: json.dumps(schema("job"), indent=1) + "\n",
    }
    warning = None
    if ci == "github":
        files |= _github(directory, template)
        if repository_of(directory.resolve()) is None:
            warning = (
                f"{directory} is in no git repository, and GitHub reads workflows at a repository's top alone: make it one "
                f"(`{shlex.join(['git', 'init', str(directory)])}`), or `init` again, with --force, in one"
            )
    return Scaffold(directory=directory, files=files, warning=warning)


def _write(made: Scaffold, *, force: bool) -> None:
    """Write every file, or none."""
    taken = [path for path in made.files if os.path.lexists(path)]
    if wrong := [path for path in taken if path.is_dir() or path.is_symlink()]:
        raise UsageError(
            f"{', '.join(map(str, wrong))}: not an ordinary file, and never overwritten", hint="name another directory"
        )
    if taken and not force:
        there = ", ".join(map(str, taken))
        hint = "name another directory, or overwrite them with --force"
        raise UsageError(f"already there: {there}; nothing was written", hint=hint)
    staged: list[tuple[str, Path]] = []
    try:
        for path, text in made.files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
            staged.append((name, path))
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                os.fchmod(handle, 0o644)
        while staged:
            name, path = staged[-1]
            os.replace(name, path)
            staged.pop()
    except OSError as error:
        raise UsageError(f"{made.directory} cannot be written: {error.strerror}", hint="name another directory") from error
    finally:
        for name, _ in staged:
            os.unlink(name)


def _github(directory: Path, template: Template) -> dict[Path, str]:
    """The workflow, where GitHub looks for it: at the top of the repository that the directory is in, else in it."""
    here = directory.resolve()
    top = repository_of(here) or here
    inside = here.relative_to(top)
    name = "-".join(("chaosrun", *inside.parts))
    place = Path(".github", "workflows", f"{re.sub(r'[^A-Za-z0-9._-]+', '-', name)}.yml")
    install = " ".join(['python -m pip install "$CHAOSRUN_REQUIREMENT"', *NEEDS.get(template, {}).values()])
    title = " ".join(("chaosrun", *inside.parts))
    return {
        (directory if top == here else top) / place: workflow((inside / "job.yaml").as_posix(), title=title, install=install)
    }
