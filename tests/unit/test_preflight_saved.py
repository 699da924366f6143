"""A preflight's result as JSON: it is what the schema says, is read back as it was, and what is wrong with a file is told."""

import json
from dataclasses import fields, replace
from typing import Any

import jsonschema
import pytest

from chaosrun.errors import UsageError
from chaosrun.integrations.schemas import schema
from chaosrun.preflight.model import Measure, Rows
from chaosrun.preflight.result import DERIVED, EXIT_UNFIT, RESULT_VERSION, CheckRun, Result, from_json, to_json
from tests.unit.fuzzing import AMOUNTS, changed_value, tried
from tests.unit.preflight_results import left_out, lost, node, odd_bits, result, sound, swap

VALIDATOR = jsonschema.Draft202012Validator(schema("preflight"))
NODES = [node(number) for number in (1, 2, 3)]


def mixed(**changes: Any) -> Result:
    bad = [odd_bits("gpu-002"), *lost("gpu-003"), swap("gpu-001"), *left_out("gpu-002", "FAIL of bits: repeats", "network")]
    return result(NODES, [*sound(NODES), *bad], **changes)


def written(value: Result) -> Any:
    """As another program finds it in a file."""
    return json.loads(json.dumps(to_json(value), allow_nan=False))


def wrong(value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(value)]


@pytest.mark.parametrize(
    "known",
    [
        mixed(),
        mixed(strict=True, job="job.yaml", baseline="old.json", address="10.0.0.1:6379"),
        mixed(arguments=("job.yaml", "workers=4"), options=("--level", "quick"), choice=("--only", "bits")),
        result(NODES, sound(NODES)),
        result([], [], checks=(), facts={}),
    ],
)
def test_it_is_what_the_schema_says_and_is_read_back(known: Result) -> None:
    value = written(known)
    assert wrong(value) == []
    assert from_json(value) == known
    assert written(from_json(value)) == value


def test_what_is_derived_is_in_it_and_is_not_believed() -> None:
    value = written(mixed())
    assert (value["fit"], value["exit_code"]) == (False, EXIT_UNFIT)
    assert value["good"] == ["gpu-001"]
    assert value["against"]["gpu-002"] == ["bits: repeats (cuda:3)"] and "gpu-001" not in value["against"]
    assert written(replace(mixed(), nodes=(*NODES, node(4))))["unchecked"] == ["gpu-004"]
    statuses = value["statuses"]
    assert (statuses["bits"], statuses["devices"], statuses["host"]) == ("FAIL", "ERROR", "WARN")
    assert from_json({**value, "fit": True, "exit_code": 0, "good": ["gpu-002"]}) == mixed()


def test_what_is_derived_is_all_that_is_not_read_back() -> None:
    assert set(written(mixed())) - {field.name for field in fields(Result)} == {*DERIVED}


def test_every_field_is_explained() -> None:
    whole = schema("preflight")
    assert whole["properties"]["v"]["const"] == RESULT_VERSION
    for part in (whole, *whole["$defs"].values()):
        silent = [name for name, about in part.get("properties", {}).items() if not about.get("description")]
        assert not silent
        assert part.get("additionalProperties") is False or "properties" not in part


def test_numbers_and_text_that_json_does_not_know() -> None:
    endless = Measure(number=float("inf"), unit="s", better="lower")
    odd = Rows(check="host", name="a\udcffb", node="gpu-001").passed(measure=endless)
    facts: dict[str, Any] = {"host": {"worst": float("nan"), "pair": (1, 2), "\udcff": {3: "x"}}}
    value = written(result(NODES, [odd], facts=facts))
    assert wrong(value) == []
    assert value["findings"][0]["measure"] is None and value["findings"][0]["name"] == "a\\udcffb"
    assert value["facts"] == {"host": {"worst": "nan", "pair": [1, 2], "\\udcff": {"3": "x"}}}
    assert written(from_json(value)) == value


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "is not a result of a preflight"),
        ([], "is not a result of a preflight"),
        ({"v": 1}, "is not a result of a preflight"),
        ({**to_json(mixed()), "kind": "verdict"}, "is not a result of a preflight"),
        ({**to_json(mixed()), "v": 1}, "is of version 1; this chaosrun knows version 2"),
        ({**to_json(mixed()), "surplus": 1}, "is damaged: surplus"),
        ({**to_json(mixed()), "level": "slow"}, "is damaged: level"),
        ({**to_json(mixed()), "seconds": "1"}, "is damaged: seconds"),
        ({**to_json(mixed()), "findings": [{**to_json(mixed())["findings"][-1], "reason": "", "status": "SKIP"}]}, "damaged"),
        ({**to_json(mixed()), "findings": [{**to_json(mixed())["findings"][0], "status": "FAIL"}]}, "must explain itself"),
    ],
)
def test_what_is_no_result_is_refused(value: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says) as refused:
        from_json(value, "old.json")
    assert refused.value.message.startswith("old.json ") and refused.value.hint


@pytest.mark.parametrize("amount", AMOUNTS)
def test_a_changed_file_is_refused_or_read(amount: int) -> None:
    whole = written(replace(mixed(), findings=mixed().findings[-6:], checks=(CheckRun(name="bits", about="bits"),)))

    def read(value: Any) -> None:
        try:
            known = from_json(value)
        except UsageError:
            return
        assert wrong(written(known)) == []

    tried(amount, changed_value(whole), read)
