"""Load a job file: read, parse, override, validate. Handles the files that a job names; all errors are reported at once."""

import os
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as AnyMapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from chaosrun.errors import SpecError
from chaosrun.records.object_urls import is_url, why_no_store
from chaosrun.spec.bounds import out_of_reach
from chaosrun.spec.command_line import TypedJob
from chaosrun.spec.files import JOB, expect_kind, read_named, read_source, why_unwritable
from chaosrun.spec.launch import attaches, first_file, launch_problems, meaningless, own_loads
from chaosrun.spec.model import VERBATIM, JobSpec
from chaosrun.spec.overrides import PART, apply_changes, apply_overrides
from chaosrun.spec.places import Objection, Place, Problem, SourceText, spec_error
from chaosrun.spec.preset import with_preset
from chaosrun.spec.tree import Mapping, MappingEntry, Scalar, child, find, name_in, plain, read_tree
from chaosrun.spec.tree import Sequence as List
from chaosrun.spec.validation import problems_of

LARGEST_TRACE_BYTES = 64 << 20
SMALLEST_JOB = "the least a job file holds: name: probe, script: train.py, workers: 2, each on its own line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A loaded job file: its meaning and the places of its parts."""

    spec: JobSpec
    path: Path
    """The job file; for a job given on the command line its working directory."""
    directory: Path
    """Absolute; the script and other relative paths of the spec start here."""
    script_path: Path
    """Absolute: the file that begins the training if known, else the job file."""
    text: str
    """The file's text, without overrides."""
    tree: Mapping
    """The tree of the spec, overrides included: where each value was written."""
    trace: SourceText | None = None
    """The recorded trace that its faults replay."""
    typed: TypedJob | None = None
    """The job given on the command line, where there is no job file."""

    @property
    def masked(self) -> tuple[str, ...]:
        """Where the script loads checkpoints itself although chaosrun restores: a drill does not test this."""
        return own_loads(self.script_path) if self.spec.by == "chaosrun" else ()

    def problem(self, entry: str, message: str, hint: str | None = None) -> Problem:
        """A problem at a path of the job file such as "faults.schedule[0]"."""
        parts = PART.finditer(entry)
        path = tuple(part["name"] if part["name"] else int(part["index"]) for part in parts)
        key, node = find(self.tree, path)
        # An entry of a list has no key; its text, or the first line of that, is shown.
        return Problem(place=key or node.place, message=message, hint=hint)


def load_job(job: Path | TypedJob, overrides: Sequence[str] = (), changes: AnyMapping[str, MappingEntry] | None = None) -> Job:
    """Read a job file, or a job given on the command line, and apply the `changes` of a suite and the `overrides` ("workers=4",
    "faults.schedule[0].rank=1").

    Raises SpecError with every wrong place of the file and the overrides, UsageError when the file cannot be read.
    """
    if isinstance(job, TypedJob):
        path = beside = job.directory
        source = SourceText(label=job.label, text=job.text(anywhere=True), is_file=False)
    else:
        path, beside = job, job.parent
        source = read_source(job, JOB)
    file_root, problems = read_tree(source)
    if not isinstance(job, TypedJob):
        expect_kind(job, JOB, file_root, problems)
    if not isinstance(file_root, Mapping):
        raise spec_error(problems or [_no_mapping(source, file_root)])
    changed_root, not_changed = apply_changes(file_root, changes or {})
    root, rejected = apply_overrides(changed_root, overrides)
    root, unknown = with_preset(root, beside)
    rejected = [*not_changed, *rejected, *unknown]
    directory, astray = _directory(root, beside)
    spec, invalid, values = None, list[Problem](), plain(root, verbatim=VERBATIM)
    try:
        spec = JobSpec.model_validate(values)
    except ValidationError as error:
        invalid = problems_of(error, root, values=values)
    told = {problem.place for problem in problems}
    if not astray:
        invalid += [*launch_problems(root, directory), *_unwritable(root, directory)]
    trace, unreadable = _trace(root, beside)
    invalid += [*astray, *unreadable]
    script = first_file(root, directory)
    if spec is None:
        invalid += out_of_reach(root)
    else:
        spec = _resolved(spec, script)
        invalid += meaningless(root, spec.by, script)
    problems = [*problems, *rejected, *(problem for problem in invalid if problem.place not in told)]
    if spec is None or problems:
        raise spec_error(problems)
    return Job(
        spec=spec,
        path=path,
        directory=directory,
        script_path=script or path.resolve(),
        text=source.text,
        tree=root,
        trace=trace,
        typed=job if isinstance(job, TypedJob) else None,
    )


def _resolved(spec: JobSpec, script: Path | None) -> JobSpec:
    """The spec with `resume.by: auto` decided."""
    if spec.resume.by != "auto":
        return spec
    by = "chaosrun" if spec.script and script and attaches(script) else "script"
    return spec.model_copy(update={"resume": spec.resume.model_copy(update={"by": by})})


def _directory(root: Mapping, beside: Path) -> tuple[Path, list[Problem]]:
    """Where the job's relative paths start, absolute."""
    node = child(root, "directory")
    directory = beside / name_in(node)
    if node is None or os.path.isdir(directory):
        return directory.resolve(), []
    hint = "directory is a path relative to the job file"
    return directory, [Problem(place=node.place, message=f"no such directory: {directory}", hint=hint)]


def _unwritable(root: Mapping, directory: Path) -> Iterator[Problem]:
    """Problems of paths in the job file that cannot be written to."""
    storage, outputs = child(root, "checkpoint", "storage"), child(root, "outputs")
    name = name_in(storage)
    if storage is not None and is_url(name):
        why, hint = why_no_store(name) or ("", "")
        if why:
            yield Problem(place=storage.place, message=f"checkpoint.storage {name}: {why}", hint=hint)
    elif storage is not None and name and (why := why_unwritable(directory / name)):
        hint = "name a directory that exists or can be made, on storage that all nodes share"
        path = directory / name
        yield Problem(place=storage.place, message=f"checkpoint.storage {path} cannot be written: {why}", hint=hint)
    for node in outputs.items if isinstance(outputs, List) else ():
        parents = (directory / name_in(node)).parents if name_in(node) else ()
        if file := next(filter(os.path.isfile, parents), None):
            hint = "outputs are files and folders that the script makes"
            yield Problem(place=node.place, message=f"{file} is a file: nothing can be written below it", hint=hint)


def refused(job: Job, others: Sequence[Problem], objections: Sequence[Objection], hint: str) -> SpecError:
    """The planner's objections as one error, each at the place of its entry, with the job's other problems `others`."""
    problems = [job.problem(each.entry, str(each)) for each in objections]
    return SpecError(spec_error([*others, *problems]).message, hint=hint)


def _no_mapping(source: SourceText, root: object) -> Problem:
    start = Place(source=source, line=0, column=0, end=1)
    if root is None:
        return Problem(place=start, message="the job file is empty", hint=SMALLEST_JOB)
    what = "a single value" if isinstance(root, Scalar) else "a list"
    return Problem(place=start, message=f"a job file holds keys and values, this one holds {what}", hint=SMALLEST_JOB)


def _trace(root: Mapping, directory: Path) -> tuple[SourceText | None, list[Problem]]:
    """The trace that the file replays, and the problems of its name or its file."""
    node = child(root, "faults", "replay", "trace")
    if node is None or not name_in(node):
        return None, []
    path = directory / name_in(node)
    if os.path.isfile(path) and path.stat().st_size > LARGEST_TRACE_BYTES:
        message = f"the trace {path} is larger than {LARGEST_TRACE_BYTES >> 20} MiB"
        return None, [Problem(place=node.place, message=message, hint="name a trace, or cut this one")]
    return read_named(node, path, "trace")
