"""Files that run a job or a suite elsewhere: in GitHub Actions, as a Ray job, on Kubernetes with KubeRay, in Slurm.

Each has a template in `templates/`; every value of a user passes through a filter that quotes it for the file's language. Must
not know how a drill is run: the files call the `chaosrun` command.
"""

import hashlib
import json
import math
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from chaosrun.errors import UsageError
from chaosrun.records.destination import expect_folder, is_stream, write_to
from chaosrun.spec.files import read_source
from chaosrun.spec.job_file import load_job
from chaosrun.spec.suite import load_suite
from chaosrun.spec.tree import Mapping, read_tree
from chaosrun.wording import count

Kind = Literal["github", "ray", "rayjob", "slurm"]
RUN_WITH: dict[Kind, str] = {
    "github": "commit it, below .github/workflows of the repository",
    "ray": "CHAOSRUN_ROOT=/shared/runs sh {path}",
    "rayjob": "kubectl apply -f {path}",
    "slurm": "sbatch {path}",
}
SCRIPTS = ("ray", "slurm")
MOST_SHARDS = 256
"""Most jobs that one GitHub matrix may have."""
INSTALL = """\
if [ -f requirements.txt ]; then python -m pip install --requirement requirements.txt; fi
python -m pip install "$CHAOSRUN_REQUIREMENT\""""
IMAGE = "chaosrun:latest"
"""The name under which the Dockerfile's first line builds it."""
IN_THE_IMAGE = "/opt/chaosrun"
"""Where the Dockerfile puts the project."""
LONGEST_NAME = 40
"""KubeRay derives names of pods and services from it, which may have 63 characters."""
RAYJOB_SETUP_S, SLURM_SETUP_S = 30 * 60, 15 * 60
"""Time for Ray's start, both legs and the verdict, in addition to the job's own; on Kubernetes also for pulling images."""
SLURM_TIME_S = 2 * 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    kind: Kind
    text: str
    path: Path | None

    @property
    def following(self) -> str:
        """What to do with the file next."""
        return RUN_WITH[self.kind].format(path="FILE" if self.path is None else shlex.quote(str(self.path)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Subject:
    """A job, or a suite with the largest resources that any of its drills needs."""

    name: str
    path: Path
    """Absolute."""
    project: Path
    """Absolute: the repository that the file lies in, else the working directory; the file is below it."""
    suite: bool
    overrides: tuple[str, ...]
    workers: int
    cpu: float
    """For one worker, like `gpu`."""
    gpu: int | Literal["auto"]
    timeout_s: float | None

    @property
    def inside(self) -> str:
        """The file's path from the project, with slashes."""
        return self.path.relative_to(self.project).as_posix()

    def command(self, path: str) -> list[str]:
        """The command line that runs it, with the file at `path`; options may follow."""
        path = f"./{path}" if path.startswith("-") else path
        return ["chaosrun", "suite" if self.suite else "submit", path, *self.overrides]

    def cpus(self, workers: int) -> int:
        """Whole CPUs for so many workers."""
        return max(1, math.ceil(workers * self.cpu))


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
    """The file that runs the job file or suite at `path` in the system `kind`; written to `to`, if given.

    `shards` is for github, `nodes` for slurm, `image` for rayjob. Raises SpecError for errors in the file, UsageError for
    arguments that do not go together, and for an existing `to`.
    """
    for name, value, of in (("shards", shards, "github"), ("nodes", nodes, "slurm"), ("image", image, "rayjob")):
        if value is not None and of != kind:
            raise UsageError(f"--{name} is for `export {of}`, not for {kind}", hint=f"leave out --{name}")
    subject = _read_subject(path, overrides)
    match kind:
        case "github":
            if subject.overrides:
                hint = "write them into the job file, or into a suite"
                raise UsageError(f"a workflow takes no changes ({subject.overrides[0]})", hint=hint)
            title, parts = f"chaosrun {subject.name}", 1 if shards is None else shards
            text = workflow(subject.inside, suite=subject.suite, title=title, shards=parts)
        case "ray":
            text = _render("ray-job.sh.j2", command=subject.command(subject.inside), project=str(subject.project))
        case "rayjob":
            text = _ray_job(subject, image or IMAGE)
        case "slurm":
            text = _batch_script(subject, 1 if nodes is None else nodes)
    if to is not None:
        _write(to, text, executable=kind in SCRIPTS)
    return Exported(kind=kind, text=text, path=to)


def workflow(job: str, *, suite: bool = False, title: str = "chaosrun", shards: int = 1, install: str | None = None) -> str:
    """A GitHub Actions workflow that runs a job's drill, or a suite, each night and on pull requests.

    `job`: path of the job file (with `suite`, of a suite) from the repository's root, with slashes. `install`: shell commands
    that install $CHAOSRUN_REQUIREMENT and what the script needs. Raises UsageError for shards of a job, which is one drill, and
    for names that no script can hold.
    """
    if shards != 1 and not suite:
        raise UsageError("a job is one drill, which cannot be sharded", hint="write a suite, or leave out --shards")
    if not 1 <= shards <= MOST_SHARDS:
        raise UsageError(f"{shards} is not a number of shards", hint=f"give --shards a number from 1 to {MOST_SHARDS}")
    return _render(
        "github.yml.j2",
        job=_checked(job, "the path"),
        # One repository may have several workflows: their caches are their own.
        mark=hashlib.sha256(job.encode()).hexdigest()[:8],
        suite=suite,
        title=_checked(title, "the name"),
        shards=list(range(1, shards + 1)),
        install=(install or INSTALL).strip().splitlines(),
    )


def _ray_job(subject: _Subject, image: str) -> str:
    """A manifest of KubeRay's ray.io/v1 RayJob: a head that supervises, and one pod for each worker.

    Fields as in KubeRay's ray.io_rayjobs.yaml (helm-chart/kuberay-operator/crds), read at commit feaeface.
    """
    # As Kubernetes wants it: RFC 1123, lower case letters, digits and hyphens, a letter first.
    plain = re.sub(r"[^a-z0-9]+", "-", subject.name.lower()).strip("-")
    return _render(
        "rayjob.yaml.j2",
        name=f"chaosrun-{plain}"[:LONGEST_NAME].rstrip("-"),
        # A shell reads the entrypoint, whichever way KubeRay submits it.
        command=subject.command(f"{IN_THE_IMAGE}/{subject.inside}"),
        volume="/mnt/chaosrun",
        image=_checked(image, "the image"),
        ray=version("ray"),
        workers=subject.workers,
        cpu=subject.cpus(1),
        gpu=subject.gpu,
        deadline_s=None if subject.timeout_s is None else int(subject.timeout_s) + RAYJOB_SETUP_S,
    )


def _batch_script(subject: _Subject, nodes: int) -> str:
    """A Slurm batch script: Ray across the job's nodes, and one drill or suite on it, which is resumed after a preemption."""
    if not 1 <= nodes <= subject.workers:
        raise UsageError(
            f"{nodes} nodes are not for {count(subject.workers, 'worker')}",
            hint=f"give --nodes a number from 1 to {subject.workers}",
        )
    a_node = math.ceil(subject.workers / nodes)
    limit_s = math.ceil(SLURM_TIME_S if subject.timeout_s is None else subject.timeout_s + SLURM_SETUP_S)
    return _render(
        "slurm.sh.j2",
        name=subject.name,
        suite=subject.suite,
        command=subject.command(str(subject.path)),
        project=str(subject.project),
        nodes=nodes,
        cpus=subject.cpus(a_node),
        gpu=subject.gpu,
        a_node=a_node,
        time=f"{limit_s // 3600:02}:{limit_s // 60 % 60:02}:{limit_s % 60:02}",
    )


def _render(template: str, **values: object) -> str:
    """`templates/<template>` with these values. A name that the template has and `values` lack is a bug."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("chaosrun.integrations"),
        undefined=StrictUndefined,
        # Jinja's default delimiters have a meaning in shells and at GitHub.
        variable_start_string="<<",
        variable_end_string=">>",
        block_start_string="<%",
        block_end_string="%>",
        comment_start_string="<#",
        comment_end_string="#>",
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Each filter quotes for its own language; none of them needs HTML's escapes.
        autoescape=False,
    )
    environment.filters |= {
        "sh": shlex.quote,
        "words": shlex.join,
        "yaml": lambda value: json.dumps(value, ensure_ascii=False),  # YAML is a superset of JSON
        # GitHub evaluates its expressions first, anywhere in a workflow.
        "action": lambda text: text.replace("${{", "${{ '${{' }}"),
    }
    return environment.get_template(template).render(**values)


def _checked(text: str, what: str) -> str:
    """`text`, to become part of a line. Raises UsageError if it has a line break or another control character."""
    if not text.isprintable():
        raise UsageError(f"{what} {text!r} holds characters that no script can quote", hint="rename it, or give another")
    return text


def _read_subject(path: Path, overrides: Sequence[str]) -> _Subject:
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
    _checked(str(absolute), "the path")
    gpus = {spec.per_worker.gpu for spec in specs}
    here = Path.cwd()
    return _Subject(
        name=name,
        path=absolute,
        project=repository_of(absolute.parent) or (here if here in absolute.parents else absolute.parent),
        suite=suite,
        overrides=tuple(_checked(change, "the change") for change in overrides),
        workers=max(spec.workers for spec in specs),
        cpu=max(spec.per_worker.cpu for spec in specs),
        gpu=1 if 1 in gpus else "auto" if "auto" in gpus else 0,
        timeout_s=None if suite else specs[0].timeout,
    )


def repository_of(folder: Path) -> Path | None:
    """The top of the repository that an absolute folder is in, or will be."""
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)


def _is_suite(path: Path) -> bool:
    """Whether the keys are a suite's: a job has a script. A file that is neither counts as a job, whose errors explain more."""
    root, _ = read_tree(read_source(path, "job file or suite"))
    return isinstance(root, Mapping) and "script" not in root.entries and bool({"drills", "matrix"} & root.entries.keys())


def _write(path: Path, text: str, *, executable: bool) -> None:
    try:
        if is_stream(path):
            write_to(path, text.encode())
            return
        expect_folder(path)
        # "x": an older file that somebody has edited must not be overwritten.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o777 if executable else 0o666), "w") as file:
            file.write(text)
    except FileExistsError as error:
        raise UsageError(f"{path} exists already", hint="remove it, or name another file with --to") from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint="name another file with --to") from error
