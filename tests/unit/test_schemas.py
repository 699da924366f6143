"""The JSON Schemas say what the parser does: what both accept, and what is refused for its shape."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from pydantic import BaseModel, ValidationError

from chaosrun import cli
from chaosrun.integrations.schemas import schema
from chaosrun.spec.model import VERBATIM, JobSpec
from chaosrun.spec.places import SourceText
from chaosrun.spec.suite import SuiteSpec
from chaosrun.spec.tree import plain, read_tree
from tests.unit.fuzzing import AMOUNTS, tried

ROOT = Path(__file__).parents[2]
JOBS = sorted(ROOT.glob("jobs/*/job.yaml"))
SUITES = sorted(ROOT.glob("configs/*.yaml"))

RICH: dict[str, Any] = {
    "name": "probe",
    "script": "train.py",
    "args": ["--epochs", 3, "--on", True],
    "env": {"HF_HUB_OFFLINE": 1},
    "workers": 2,
    "per_worker": {"cpu": 1.5, "gpu": "auto"},
    "seed": 1,
    "deterministic": "warn",
    "max_steps": 60,
    "checkpoint": {"every_steps": 10, "keep": 2, "storage": "elsewhere", "classes": ["package.module.Class"]},
    "data": {"resume": "skip", "probe": False},
    "faults": {
        "seed": 3,
        "schedule": [
            {"kind": "preempt", "rank": 1, "at_step": 7, "grace": "5s"},
            {"rank": "random", "at_once": 2, "every_steps": 20, "until_step": 40},
            {"kind": "flip_bit", "state": "moment", "tensor": "weight", "bit": 3, "at_step": 9, "phase": "optimizer"},
            {"kind": "slow", "factor": 2.5, "steps": 3, "at_step": 9, "attempt": 1, "occurrence": 2},
            {"kind": "stop", "after": 2.5},
        ],
        "random": {"count": 2, "between": [1, 60], "phase": "reduce"},
        "replay": {"trace": "trace.csv", "compress": 60, "start": "1h", "until": "2h", "onto": "nodes"},
        "allow_cluster_faults": False,
    },
    "recovery": {"max_restarts": 0, "hang_timeout": 90, "backoff": "500ms", "preload": ["torchvision"]},
    "verify": {"losses": {"atol": 1.5, "rtol": 0}, "confirm": False},
    "timeout": "2h",
}
"""Every part of a job file that has a shape of its own."""
SUITE: dict[str, Any] = {
    "name": "nightly",
    "job": "job.yaml",
    "drills": [
        {"name": "first", "expect": "FAIL"},
        {"name": "second", "job": "other.yaml", "set": {"workers": 4}, "expect": {"verdict": "FAIL", "kind": "data order"}},
    ],
    "comparison": {"first": "first", "atol": 0.5, "beyond": ["second"]},
}
VALUES = (None, True, False, 0, 1, -1, 2.5, -0.5, 2**40, "", "x", "5s", "0s", "1.5 h", "all", "random", [], {}, [1, 2], ["x"])


def shapes_refused(value: Any, model: type[BaseModel]) -> list[str]:
    """What the parser finds wrong in a YAML text that says `value`, but for how keys go together."""
    root, problems = read_tree(SourceText(label="job.yaml", text=json.dumps(value)))
    assert root is not None and not problems
    try:
        model.model_validate(plain(root, verbatim=VERBATIM if model is JobSpec else frozenset()))
    except ValidationError as error:
        return [f"{entry['loc']}: {entry['msg']}" for entry in error.errors() if entry["type"] != "conflict"]
    return []


def changed(whole: Any) -> st.SearchStrategy[Any]:
    """`whole` with one value replaced, taken away, or put under a key that is not there."""

    def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
        inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        return [path, *(found for key, part in inner for found in places(part, (*path, key)))]

    def change(place: tuple[str | int, ...], how: str, value: Any) -> Any:
        copy = json.loads(json.dumps(whole))
        if not place:
            return {**copy, "surplus": value}
        parent = copy
        for part in place[:-1]:
            parent = parent[part]
        if how == "replace":
            parent[place[-1]] = value
        elif how == "remove":
            del parent[place[-1]]
        elif isinstance(parent, dict):
            parent["surplus"] = value
        else:
            parent.append(value)
        return copy

    return st.builds(
        change, st.sampled_from(places(whole)), st.sampled_from(["replace", "remove", "add"]), st.sampled_from(VALUES)
    )


@pytest.mark.parametrize("of", ["job", "suite", "verdict", "preflight"])
def test_each_is_a_schema_and_is_printed(of: Any, capsys: pytest.CaptureFixture[str]) -> None:
    Draft202012Validator.check_schema(schema(of))
    assert cli.main(["schema", of]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads(json.dumps(schema(of)))
    assert printed["$schema"] == Draft202012Validator.META_SCHEMA["$id"]


@pytest.mark.parametrize(
    ("path", "of"),
    [*((path, "job") for path in JOBS), *((path, "suite") for path in SUITES)],
    ids=[f"{path.parent.name}/{path.name}" for path in (*JOBS, *SUITES)],
)
def test_every_file_of_ours_fits(path: Path, of: Any) -> None:
    root, _ = read_tree(SourceText(label=str(path), text=path.read_text()))
    assert root is not None
    Draft202012Validator(schema(of)).validate(plain(root))
    with pytest.raises(Exception, match="surplus"):
        Draft202012Validator(schema(of)).validate({**plain(root), "surplus": 1})


def test_every_key_is_explained() -> None:
    for of in (schema("job"), schema("suite")):
        for name, part in {"": of, **of["$defs"]}.items():
            silent = [key for key, about in part.get("properties", {}).items() if not about.get("description")]
            assert not silent, name
            assert part.get("additionalProperties") is False or "properties" not in part, name


@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("timeout", ["1s", "500ms", "1.5 h", " 2d ", 90, 0.5, None], ["0s", "s", "1 year", 0, -1, True, [], "1h30m"]),
        ("workers", [1, 64], [0, -1, "2", 2.5, True, None]),
        ("name", ["a", "A-1_b.c"], ["", "-a", "a b", "a" * 65, 7]),
        ("args", [[], ["--a", 1, 0.5, True, None]], ["--a 1", [["--a"]], [{}], None]),
        ("env", [{}, {"A": 1, "B": False, "C": "x"}], [{"A=B": "1"}, {"": "1"}, {"A": [1]}, []]),
        ("seed", [0, 2**32 - 1], [2**32, -1, "1"]),
        ("per_worker", [{}, {"gpu": 0}, {"gpu": 1}, {"cpu": 0.25}], [{"gpu": 2}, {"gpu": True}, {"cpu": 0}, {"cpus": 1}, None]),
        ("checkpoint", [{"classes": ["a.B", "a.b.C"]}], [{"classes": ["A"]}, {"classes": ["a..B"]}, {"keep": 1}]),
        ("verify", [{"losses": {"atol": 0}}], [{"losses": {"atol": -1}}, {"confirm": "yes"}, {"losses": 0.5}]),
        (
            "faults",
            [{"schedule": [{"at_step": 1, "rank": rank}]} for rank in (0, "all", "random")],
            [{"schedule": [{"at_step": 1, "rank": rank}]} for rank in (-1, "any", None, True, 0.5)],
        ),
        (
            "faults",
            [{"random": {"count": 1, "between": [1, 2]}}],
            [{"random": {"between": [1]}}, {"random": {"between": "1-2"}}],
        ),
        ("faults", [{"preset": "spot"}, {"preset": None}], [{"preset": 1}, {"preset": ["spot"]}]),
    ],
)
def test_forms(key: str, good: list[Any], bad: list[Any]) -> None:
    fits = Draft202012Validator(schema("job"))
    least = {"name": "probe", "script": "train.py", "workers": 2}
    for value in good:
        fits.validate({**least, key: value})
        if value != {"preset": "spot"}:  # a name, that whoever loads a job puts the preset's file in the place of
            assert not shapes_refused({**least, key: value}, JobSpec), value
    for value in bad:
        assert not fits.is_valid({**least, key: value}), value
        assert shapes_refused({**least, key: value}, JobSpec), value


@pytest.mark.parametrize("amount", AMOUNTS)
@pytest.mark.parametrize(("whole", "model", "of"), [(RICH, JobSpec, "job"), (SUITE, SuiteSpec, "suite")])
def test_the_parser_and_the_schema_agree(whole: dict[str, Any], model: type[BaseModel], of: Any, amount: int) -> None:
    fits = Draft202012Validator(schema(of))
    seen = {True: 0, False: 0}

    def agree(value: Any) -> None:
        refused = shapes_refused(value, model)
        assert fits.is_valid(value) == (not refused), (refused, [error.message for error in fits.iter_errors(value)])
        seen[not refused] += 1

    agree(whole)
    tried(amount, changed(whole), agree)
    assert min(seen.values()) > sum(seen.values()) // 20, seen
