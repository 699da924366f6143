"""JSON Schemas (draft 2020-12) of what chaosrun reads and writes, for editors and other programs.

Made from the models that parse the files: what these refuse for its shape (an unknown key, a wrong type, a value out of bounds)
the schema refuses, too. It knows nothing of how keys go together, and cannot tell 2.0 from 2.
"""

from typing import Any, Literal

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode


class _Schema(GenerateJsonSchema):
    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        return {"$schema": self.schema_dialect, **super().generate(schema, mode=mode)}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """A key needs no second name."""
        return False


def schema(of: Literal["job", "suite", "verdict", "preflight"]) -> dict[str, Any]:
    """Of a job file, a suite, a verdict or a preflight's result."""
    return {"job": job_schema, "suite": suite_schema, "verdict": verdict_schema, "preflight": preflight_schema}[of]()


def job_schema() -> dict[str, Any]:
    """Of a job file."""
    from chaosrun.spec.model import JobSpec

    return _schema(JobSpec, "A chaosrun job")


def suite_schema() -> dict[str, Any]:
    """Of a suite."""
    from chaosrun.spec.suite import SuiteSpec

    return _schema(SuiteSpec, "A chaosrun suite")


def verdict_schema() -> dict[str, Any]:
    """Of verdict.json."""
    from chaosrun.verify.schema import verdict_schema as of_verdict

    return of_verdict()


def preflight_schema() -> dict[str, Any]:
    """Of what `chaosrun preflight -o json` prints."""
    from chaosrun.preflight.result import result_adapter

    schema = result_adapter().json_schema(mode="serialization", schema_generator=_Schema)
    return _titled(schema, "A chaosrun preflight's result")


def _schema(model: type[BaseModel], title: str) -> dict[str, Any]:
    return _titled(model.model_json_schema(schema_generator=_Schema), title)


def _titled(schema: dict[str, Any], title: str) -> dict[str, Any]:
    for part in schema.get("$defs", {}).values():
        part.pop("title", None)  # the name of a class of ours
    return {**schema, "title": title}
