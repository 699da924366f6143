"""The generated parts are what the parser says today, and they leave nothing out."""

from pathlib import Path

import pytest
from pydantic import BaseModel

from chaosrun.faults.kind import PHASES
from chaosrun.faults.kinds import KINDS
from chaosrun.records.order import DataResume
from chaosrun.spec.fields import Section
from chaosrun.spec.model import JobSpec
from chaosrun.spec.suite import SuiteSpec
from tests.docs.reference import DOCS, GENERATED, default_of, job_reference, type_of, with_reference


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_a_page_says_what_the_parser_says(page: Path) -> None:
    text = page.read_text()
    assert with_reference(text, GENERATED[page]()) == text, "python -m tests.docs.reference writes it anew"


def models(model: type[BaseModel], met: set[type[BaseModel]]) -> set[type[BaseModel]]:
    """This one and every one below it."""
    if model not in met:
        met.add(model)
        for field in model.model_fields.values():
            for part in _parts(field.annotation):
                models(part, met)
    return met


def _parts(annotation: object) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    return [part for inner in getattr(annotation, "__args__", ()) for part in _parts(inner)]


@pytest.mark.parametrize(("page", "model"), [("job.md", JobSpec), ("suite.md", SuiteSpec)])
def test_every_key_has_a_row(page: str, model: type[BaseModel]) -> None:
    text = (DOCS / page).read_text()
    found = models(model, set())
    assert len(found) > 3
    for part in found:
        for key in part.model_fields:
            assert f"| `{key}` | " in text, f"{part.__name__}.{key}"


def test_every_kind_phase_and_protocol_has_a_row() -> None:
    faults, job = (DOCS / "faults.md").read_text(), (DOCS / "job.md").read_text()
    for name in KINDS:
        assert faults.count(f"\n| `{name}` | ") == 2, name
    for phase in PHASES:
        family, _, rest = phase.partition(".")
        assert f"`{phase}`" in faults or f"`.{phase.rpartition('.')[2]}`" in faults, (family, rest)
    for protocol in DataResume.__args__:
        assert f"\n| `{protocol}` | " in job


@pytest.mark.parametrize(
    ("schema", "words", "default"),
    [
        ({"type": "integer", "minimum": 2, "default": 3}, "whole number ≥ 2", "`3`"),
        ({"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "null"}], "default": None}, "number > 0", ""),
        ({"type": "boolean", "default": True}, "`true`, `false`", "`true`"),
        ({"enum": ["a", "b"], "type": "string", "default": "a"}, "`a`, `b`", "`a`"),
        ({"type": "array", "items": {"$ref": "#/$defs/X"}, "default": []}, "list of mappings", "`[]`"),
    ],
)
def test_types_in_words(schema: dict[str, object], words: str, default: str) -> None:
    assert (type_of("key", schema), default_of(schema, required=False)) == (words, default)


def test_a_changed_field_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    before = job_reference()
    monkeypatch.setattr(JobSpec.model_fields["timeout"], "description", "something else")
    JobSpec.model_rebuild(force=True)
    try:
        changed = job_reference()
    finally:
        monkeypatch.undo()
        JobSpec.model_rebuild(force=True)
    assert "something else" in changed and job_reference() == before
