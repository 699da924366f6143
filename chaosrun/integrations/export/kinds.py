"""What can be exported, and the text of each."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from chaosrun.errors import UsageError
from chaosrun.records.destination import expect_folder, is_stream, write_to

if TYPE_CHECKING:
    from chaosrun.integrations.export.subject import Subject

Kind = Literal["github", "ray", "rayjob", "slurm"]
RUN_WITH: dict[Kind, str] = {
    "github": "commit it, below .github/workflows of the repository",
    "ray": "CHAOSRUN_ROOT=/shared/runs sh {path}",
    "rayjob": "kubectl apply -f {path}",
    "slurm": "sbatch {path}",
}
SCRIPTS = ("ray", "slurm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    kind: Kind
    text: str
    path: Path | None
    """Where it was written."""

    @property
    def following(self) -> str:
        """What to do with it."""
        return RUN_WITH[self.kind].format(path="FILE" if self.path is None else shlex.quote(str(self.path)))


def export(
    kind: Kind,
    path: Path,
    overrides: Sequence[str] = (),
    *,
    to: Path | None = None,
    shards: int | None = None,
    nodes: int | None = None,
    image: str | None = None,
) -> Exported:
    """What runs the job file or suite at `path` in the system `kind`; written to `to`, if given.

    `shards` is for github, `nodes` for slurm, `image` for rayjob. Raises SpecError for what is wrong in the file, UsageError
    for what does not go together, and for an existing `to`.
    """
    from chaosrun.integrations.export.subject import read_subject

    for name, value, of in (("shards", shards, "github"), ("nodes", nodes, "slurm"), ("image", image, "rayjob")):
        if value is not None and of != kind:
            raise UsageError(f"--{name} is for `export {of}`, not for {kind}", hint=f"leave out --{name}")
    text = _text(kind, read_subject(path, overrides), shards=shards, nodes=nodes, image=image)
    if to is not None:
        _write(to, text, executable=kind in SCRIPTS)
    return Exported(kind=kind, text=text, path=to)


def _text(kind: Kind, subject: "Subject", *, shards: int | None, nodes: int | None, image: str | None) -> str:
    if kind == "github":
        from chaosrun.integrations.export.github import workflow

        if subject.overrides:
            raise UsageError(
                f"a workflow takes no changes ({subject.overrides[0]})", hint="write them into the job file, or into a suite"
            )
        return workflow(
            subject.inside, suite=subject.suite, title=f"chaosrun {subject.name}", shards=1 if shards is None else shards
        )
    if kind == "slurm":
        from chaosrun.integrations.export.slurm import script

        return script(subject, nodes=1 if nodes is None else nodes)
    from chaosrun.integrations.export.ray import IMAGE, ray_job, submission

    return submission(subject) if kind == "ray" else ray_job(subject, image=image or IMAGE)


def _write(path: Path, text: str, *, executable: bool) -> None:
    try:
        if is_stream(path):
            write_to(path, text.encode())
            return
        expect_folder(path)
        # "x": what somebody has made of an older one is not ours to overwrite.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o777 if executable else 0o666), "w") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already", hint="remove it, or name another file with --to") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file with --to") from error
