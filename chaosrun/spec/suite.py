"""A suite: several drills, the combinations each is done in, and what is expected of it. Its model, and how a file is read.

Every drill's job file is loaded here, with its changes applied, so that all errors are reported before anything starts. Must
not know what a drill does.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, WithJsonSchema
from pydantic_core import InitErrorDetails

from chaosrun.spec.fields import Count, JobName, Number, Section, Text, conflict, must, some, wrong
from chaosrun.spec.files import SUITE, expect_kind, read_source
from chaosrun.spec.fragment import flow as bare
from chaosrun.spec.job_file import Job, load_job
from chaosrun.spec.matrix import MOST_DRILLS, Combination, axes_of, combinations, matches, matrix_problem, named
from chaosrun.spec.places import Place, Problem, refusal, spec_error
from chaosrun.spec.tree import Mapping, MappingEntry, Node, Scalar, child, find, flow, plain, read_tree
from chaosrun.spec.tree import Sequence as List
from chaosrun.spec.validation import problems_of

SMALLEST_SUITE = "the least a suite holds: name: nightly, job: job.yaml, drills: [{name: first, expect: PASS}]"
OWN_FAULTS = "job"
"""`faults: job`: those of the job file, whatever the suite has for other drills."""


_mapping = must(lambda value: isinstance(value, dict), "a mapping of keys of the job file to values, such as {workers: 4}")
_condition = must(_mapping, "a mapping of at least one key of the matrix to its value, such as {workers: 1}")
_faults = must(
    lambda value: isinstance(value, str | dict) and value,
    "the name of a preset, its file, job, or a mapping as faults of a job file",
)


def _axes(value: Any) -> Any:
    for key, choices in _mapping(value).items():
        if not isinstance(choices, list | dict):
            raise wrong(f"a mapping of keys to lists of values: {key} has none, write it such as {{workers: [1, 2]}}")
    return value


def _verdict_alone(value: Any) -> Any:
    """`expect: PASS` is short for `expect: {verdict: PASS}`."""
    return {"verdict": value} if isinstance(value, str) else value


class Expectation(Section):
    verdict: Literal["PASS", "FAIL", "INCONCLUSIVE"] = Field(description="the verdict the drill must end with")
    kind: Text | None = Field(default=None, description="what must differ first, such as data order")
    cause: Text | None = Field(
        default=None, description="the verdict's cause: its code (docs/causes.md), or words that its sentence must contain"
    )
    exit_code: Count | None = Field(default=None, description="the exit code that the drill must have")


Expected = Annotated[
    Expectation, BeforeValidator(_verdict_alone, json_schema_input_type=Expectation | Literal["PASS", "FAIL", "INCONCLUSIVE"])
]
Changes = Annotated[dict[str, Any], BeforeValidator(_mapping)]
Axes = Annotated[
    dict[str, Any],
    BeforeValidator(_axes),
    WithJsonSchema(
        {
            "type": "object",
            "additionalProperties": {"anyOf": [{"type": "array", "minItems": 1}, {"type": "object", "minProperties": 1}]},
        }
    ),
]
Faults = Annotated[Any, BeforeValidator(_faults), WithJsonSchema({"type": ["string", "object"]})]


class CaseSpec(Section):
    """Changes for combinations with certain values."""

    when: Annotated[dict[str, Any], BeforeValidator(_condition)] = Field(
        description="values of the matrix, such as {workers: 1, faults: spot}", json_schema_extra={"minProperties": 1}
    )
    set: Changes = Field(default={}, description="changes to the job file, over all others")
    expect: Expected | None = Field(default=None, description="the verdict expected there")


class _Crossed(Section):
    """Keys that a suite may set for all its drills, and a drill for itself."""

    set: Changes = Field(default={}, description="changes to the job file, such as {workers: 4, faults.seed: 7}")
    faults: Faults | None = Field(
        default=None,
        description="in the place of the job's own: a preset's name (spot, flaky-node, torture) or file, a mapping as in a job "
        "file, or job for the job's own",
    )
    matrix: Axes | None = Field(
        default=None,
        description="values for keys of the job file, faults, or arguments of the script, such as {workers: [1, 2], faults: "
        "[spot, torture], --loader-workers: [0, 2]}; a drill for each combination",
    )
    exclude: tuple[Changes, ...] = Field(default=(), description="combinations left out, such as {workers: 1, faults: spot}")
    include: tuple[Changes, ...] = Field(default=(), description="further combinations, such as {workers: 3, faults: torture}")
    cases: tuple[CaseSpec, ...] = Field(default=(), description="what is different for some combinations: when, set, expect")


class DrillSpec(_Crossed):
    name: JobName = Field(description="the drill's name in this suite")
    job: Text | None = Field(default=None, description="its job file, relative to the suite; default: the suite's job")
    expect: Expected = Field(
        default=Expectation(verdict="PASS"),
        description="PASS, FAIL or INCONCLUSIVE, or a mapping {verdict, kind, cause, exit_code}",
    )


class Comparison(Section):
    """Compares the loss trajectories of the drills' reference legs to that of one of them."""

    first: Text | None = Field(default=None, description="the drill that the others are compared with; default: the first")
    atol: Annotated[Number, Field(ge=0)] = Field(default=0.0, description="largest absolute difference of a step's loss")
    beyond: tuple[Text, ...] = Field(default=(), description="controls: drills whose losses must lie beyond the tolerance")


class SuiteSpec(_Crossed):
    name: JobName = Field(description="the suite's name")
    job: Text | None = Field(default=None, description="the job file of drills that name none, relative to the suite")
    drills: Annotated[tuple[DrillSpec, ...], BeforeValidator(some)] = Field(
        description="a list of drills", json_schema_extra={"minItems": 1}
    )
    comparison: Comparison | None = Field(default=None, description="how the drills' losses compare: first, atol, beyond")

    def conflicts(self) -> Iterator[InitErrorDetails]:
        names = [drill.name for drill in self.drills]
        if repeated := sorted({name for name in names if names.count(name) > 1}):
            yield conflict("drills", f"two drills are called {repeated[0]!r}", "give every drill its own name")


@dataclass(frozen=True, slots=True, kw_only=True)
class SuiteDrill:
    """One drill of a suite, in one combination of its matrix."""

    name: str
    base: str
    """The name without the combination."""
    place: Place
    """Its place in the suite's file."""
    job: Job
    overrides: tuple[str, ...]
    """Its changes, in the form of overrides of the command line."""
    expect: Expectation
    said: Node
    """The node of its expectation in the suite's file; if it has none, the node around it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    spec: SuiteSpec
    path: Path
    drills: tuple[SuiteDrill, ...]


def load_suite(path: Path) -> Suite:
    """Read a suite and every job file in it.

    Raises SpecError with every wrong place of the first file with errors, UsageError for a file that cannot be read.
    """
    source = read_source(path, SUITE)
    root, problems = read_tree(source)
    expect_kind(path, SUITE, root, problems)
    if not isinstance(root, Mapping):
        start = Place(source=source, line=0, column=0, end=1)
        raise spec_error(problems or [Problem(place=start, message="a suite holds keys and values", hint=SMALLEST_SUITE)])
    if problems:
        raise spec_error(problems)
    try:
        spec = SuiteSpec.model_validate(plain(root))
    except ValidationError as error:
        raise spec_error(problems_of(error, root, SuiteSpec)) from error
    readers = [_Reader(path, root, spec, number) for number in range(len(spec.drills))]
    if unused := list(_unused(root, spec)):
        raise spec_error(unused)
    if (number := sum(len(reader.crossed) for reader in readers)) > MOST_DRILLS:
        _, matrix = find(root, ("matrix",))
        message = f"the suite comes to {number} drills, at most {MOST_DRILLS} can be done"
        raise refusal(matrix.place, message, "leave out values, or split the suite")
    drills = tuple(drill for reader in readers for drill in reader.drills())
    for case in _items(child(root, "cases")):
        if not any(_when(case) in reader.met for reader in readers):
            raise refusal(_when(case).place, "no drill has such a combination", "change when, or remove the case")
    if spec.comparison is not None and (problem := _not_comparable(root, spec.comparison, [drill.name for drill in drills])):
        raise spec_error([problem])
    return Suite(spec=spec, path=path, drills=drills)


def _unused(root: Mapping, spec: SuiteSpec) -> Iterator[Problem]:
    """Keys of the suite's own matrix that no drill uses, as each has its own matrix."""
    if all(drill.matrix is not None for drill in spec.drills):
        for key in ("matrix", "exclude", "include"):
            if (entry := _entry(root, key)) is not None:
                message = f"no drill uses this {key}: each has a matrix of its own"
                yield Problem(place=entry.key, message=message, hint=f"remove it, or put {key} into a drill")


def _not_comparable(root: Mapping, comparison: Comparison, names: Sequence[str]) -> Problem | None:
    for name in [*([comparison.first] if comparison.first else []), *comparison.beyond]:
        if name not in names:
            key, _ = find(root, ("comparison",))
            assert key is not None
            message = f"comparison names {name!r}, which is no drill of this suite"
            return Problem(place=key, message=message, hint=f"drills: {', '.join(names[:12])}{'…' * (len(names) > 12)}")
    return None


class _Reader:
    """Reads one entry of `drills` into its drills."""

    def __init__(self, path: Path, root: Mapping, spec: SuiteSpec, number: int) -> None:
        self._path = path
        self._root = root
        self._suite = spec
        self._drill = spec.drills[number]
        self._here = find(root, ("drills", number))[1]
        self.crossed = self._combinations()
        self.met: list[Node] = []
        """The cases that some combination has matched."""

    def drills(self) -> Iterator[SuiteDrill]:
        job = self._job()
        crossed = self.crossed
        cases = list(self._cases())
        self.met = [_when(node) for _, node in cases if any(matches(_when(node), each) for each in crossed)]
        for _, node in cases[len(self._suite.cases) :]:
            if _when(node) not in self.met:
                message = f"drill {self._drill.name!r} has no such combination"
                raise refusal(_when(node).place, message, self._known(crossed))
        names = [named(self._drill.name, each) for each in crossed]
        for name, each in zip(names, crossed, strict=True):
            if names.count(name) > 1:
                raise refusal(self._here.place, f"two combinations are called {name!r}", "leave one out, or label the values")
            yield self._one(job, name, each, [(case, node) for case, node in cases if matches(_when(node), each)])

    def _job(self) -> Path:
        named_job = self._drill.job or self._suite.job
        if named_job is None:
            message = f"drill {self._drill.name!r} has no job file, and the suite names none"
            raise refusal(self._here.place, message, "add job: …/job.yaml to the suite or to the drill")
        path = self._path.parent / named_job
        if not os.path.isfile(path):
            where = _entry(self._here if self._drill.job else self._root, "job")
            assert where is not None
            raise refusal(where.key, f"no such job file: {path}", "job is relative to the suite")
        return path

    def _combinations(self) -> list[Combination]:
        """The combinations of the drill's own matrix, else of the suite's; the suite's `exclude` and `include` belong to its
        matrix."""
        whose = (self._here,) if self._drill.matrix is not None else (self._root, self._here)
        if (problem := matrix_problem(matrix := child(whose[0], "matrix"))) is not None:
            raise spec_error([problem])
        axes = axes_of(matrix)
        exclude, include = ([item for each in whose for item in _items(child(each, key))] for key in ("exclude", "include"))
        everything = combinations(axes)
        for item in exclude:
            if not any(matches(item, each) for each in everything):
                raise refusal(item.place, "there is no such combination to leave out", self._known(everything))
        crossed = combinations(axes, exclude, include)
        if not crossed:
            message = f"drill {self._drill.name!r} has no combination left"
            raise refusal(self._here.place, message, "leave out an entry of exclude")
        return crossed

    def _cases(self) -> Iterator[tuple[CaseSpec, Mapping]]:
        """The suite's cases, then the drill's: later ones win."""
        for section, cases in ((self._root, self._suite.cases), (self._here, self._drill.cases)):
            for case, node in zip(cases, _items(child(section, "cases")), strict=True):
                assert isinstance(node, Mapping)
                yield case, node

    def _one(self, job: Path, name: str, combination: Combination, cases: Sequence[tuple[CaseSpec, Mapping]]) -> SuiteDrill:
        changes: dict[str, MappingEntry] = {}
        for section in (self._root, self._here):
            changes |= _entries(child(section, "set"))
            if (entry := _entry(section, "faults")) is not None:
                changes = _with_faults(changes, entry, job)
        for key, choice in combination.items():
            entry = MappingEntry(key=choice.key, value=choice.value)
            changes = _with_faults(changes, entry, job) if key == "faults" else {**changes, key: entry}
        for _, node in cases:
            changes |= _entries(child(node, "set"))
        own = (self._drill.expect, self._here)
        expect, whose = next(((case.expect, node) for case, node in reversed(cases) if case.expect is not None), own)
        loaded = load_job(job, changes=changes)
        overrides = [f"{key}={_said(entry.value)}" for key, entry in changes.items() if not key.startswith("-")]
        if len(overrides) < len(changes):
            overrides = [each for each in overrides if not each.startswith("args=")]
            overrides.append(f"args={json.dumps(list(loaded.spec.args), ensure_ascii=False)}")
        about = {
            "name": name,
            "base": self._drill.name,
            "place": self._here.place,
            "expect": expect,
            "said": child(whose, "expect") or whose,
        }
        return SuiteDrill(**about, job=loaded, overrides=tuple(overrides))

    def _known(self, crossed: Sequence[Combination]) -> str:
        if crossed == [{}]:
            return "it has no matrix"
        return f"combinations: {', '.join(named('', each) for each in crossed[:8])}{'…' * (len(crossed) > 8)}"


def _with_faults(changes: dict[str, MappingEntry], entry: MappingEntry, job: Path) -> dict[str, MappingEntry]:
    """The changes for a preset's name, or for a mapping as in a job file. Keeps the job's seed unless the mapping has one."""
    others = {key: value for key, value in changes.items() if key != "faults" and not key.startswith("faults.preset")}
    if isinstance(entry.value, Mapping):
        if "seed" in entry.value.entries:
            return {**others, "faults": entry}
        before = load_job(job, changes={key: value for key, value in changes.items() if not key.startswith("-")})
        seed = before.spec.faults.seed
        faults = entry.value.having("seed", entry.key, Scalar(place=entry.key, value=seed, text=str(seed)))
        mine = {key: value for key, value in others.items() if not key.startswith("faults.")}
        return {**mine, "faults": MappingEntry(key=entry.key, value=faults)}
    name = entry.value
    if not isinstance(name, Scalar) or name.value == OWN_FAULTS:
        return others
    if name.place.source.is_file and ("/" in name.text or name.text.endswith((".yaml", ".yml"))):
        path = str((Path(name.place.source.label).parent / name.text).absolute())
        name = Scalar(place=name.place, value=path, text=path)
    return {**others, "faults.preset": MappingEntry(key=entry.key, value=name)}


def _said(value: Node) -> str:
    return bare(value.value) if isinstance(value, Scalar) and isinstance(value.value, str) else flow(value)


def _when(case: Node) -> Node:
    return child(case, "when") or case


def _entry(section: Node, key: str) -> MappingEntry | None:
    return section.entries.get(key) if isinstance(section, Mapping) else None


def _entries(node: Node | None) -> dict[str, MappingEntry]:
    return dict(node.entries) if isinstance(node, Mapping) else {}


def _items(node: Node | None) -> tuple[Node, ...]:
    return node.items if isinstance(node, List) else ()
