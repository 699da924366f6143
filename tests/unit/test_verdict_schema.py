"""The JSON Schema of verdict.json: real verdicts are what it says, and nothing is in them that it does not say."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from legs import Bugs, drop, edit_journal, edit_trace, only, put, write_run

from chaosrun.verify.check import CheckResult, Divergence
from chaosrun.verify.row import Blame
from chaosrun.verify.schema import verdict_schema
from chaosrun.verify.summaries import AttemptSummary, FaultOutcome
from chaosrun.verify.verdict import Verdict, judge

SCHEMA = verdict_schema()
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)


def wrong(value: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(value)]


def written(verdict: Verdict) -> Any:
    """As it is read back from verdict.json."""
    return json.loads(json.dumps(verdict.to_json()))


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[Verdict]:
    folder = tmp_path_factory.mktemp("verdicts")

    def judged(name: str, **how: Any) -> Verdict:
        return judge(write_run(folder / name, reference_bugs=Bugs(), **how))

    damaged = write_run(folder / "damaged")
    edit_trace(damaged, "chaos", 2, 1, only("step", put(loss=["nan", "inf"]), step=7))
    unfinished = write_run(folder / "unfinished")
    edit_journal(unfinished, "chaos", only("leg.finished", drop))
    failed = write_run(folder / "failed")
    edit_journal(failed, "chaos", only("leg.finished", put(outcome="user_error", message="rank 1 raised ValueError")))
    return [
        judged("pass"),
        judged("rng", bugs=Bugs(keep_rng=False)),
        judged("data", bugs=Bugs(skip_off=1)),
        judged("position", bugs=Bugs(batches_off=-2)),
        judged("state", bugs=Bugs(keep_registered=False)),
        judged("lost", bugs=Bugs(lost_fault="F2")),
        judged("none", kills=()),
        *map(judge, (damaged, unfinished, failed)),
    ]


def test_it_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert SCHEMA["$schema"].endswith("2020-12/schema")


def test_real_verdicts(verdicts: list[Verdict]) -> None:
    assert {verdict.status for verdict in verdicts} == {"PASS", "FAIL", "INCONCLUSIVE"}
    assert {verdict.outcome for verdict in verdicts} == {"completed", "user_error", None}
    assert [wrong(written(verdict)) for verdict in verdicts] == [[]] * len(verdicts)


def test_an_attempt_at_every_field(verdicts: list[Verdict]) -> None:
    """Each object's fields are the schema's, all of them required and no others."""
    at = SCHEMA["properties"]
    described = {
        CheckResult: at["checks"]["items"],
        Divergence: at["divergence"]["anyOf"][0],
        FaultOutcome: at["faults"]["items"],
        AttemptSummary: at["attempts"]["items"],
        Blame: at["blame"],
    }
    for kind, schema in described.items():
        typed = {field.name for field in fields(kind)} - {"cause", *(["reason"] if kind is Divergence else [])}
        told = {name for name in schema["properties"] if not isinstance(getattr(kind, name, None), property)}
        assert told == typed, kind
    assert list(at) == list(verdicts[0].to_json())
    for schema in (SCHEMA, *described.values()):
        assert (schema["required"], schema["additionalProperties"]) == (list(schema["properties"]), False)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ((), {"surprise": 1}),
        (("checks", 0), {"surprise": 1}),
        (("divergence",), {"surprise": 1}),
        (("faults", 0), {"surprise": 1}),
        (("attempts", 0), {"surprise": 1}),
        (("blame",), {"surprise": 1}),
        ((), {"status": "MAYBE"}),
        ((), {"v": 2}),
        ((), {"steps": -1}),
        (("checks", 0), {"status": "perhaps"}),
        (("divergence",), {"kind": "mood"}),
        (("faults", 0), {"kind": "meteor"}),
        (("attempts", 0), {"recovery_s": "soon"}),
    ],
)
def test_what_it_refuses(verdicts: list[Verdict], place: tuple[str | int, ...], value: dict[str, Any]) -> None:
    whole = written(next(verdict for verdict in verdicts if verdict.divergence))
    part = whole
    for key in place:
        part = part[key]
    part |= value
    assert wrong(whole)


def test_a_field_that_the_schema_lacks_is_noticed(verdicts: list[Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    before = Verdict.to_json
    monkeypatch.setattr(Verdict, "to_json", lambda self: {**before(self), "mood": "good"})
    assert wrong(written(verdicts[0])) == ["$: Additional properties are not allowed ('mood' was unexpected)"]


def test_units_are_told() -> None:
    """Whatever is a time says so, and so does what is a number in disguise."""
    attempt = SCHEMA["properties"]["attempts"]["items"]["properties"]
    assert "seconds" in attempt["recovery_s"]["anyOf"][0]["description"]
    assert "float.hex()" in SCHEMA["properties"]["divergence"]["anyOf"][0]["properties"]["seen"]["description"]


def test_the_written_file_is_what_the_schema_says(verdicts: list[Verdict], tmp_path: Path) -> None:
    import subprocess
    import sys

    schema, file = tmp_path / "schema.json", tmp_path / "verdict.json"
    schema.write_text(json.dumps(SCHEMA))
    file.write_text(json.dumps(replace(verdicts[1], warnings=("one",)).to_json()))
    command = [sys.executable, "-m", "check_jsonschema", "--schemafile", str(schema), str(file)]
    answer = subprocess.run(command, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stdout
