"""JSON Schemas (draft 2020-12) of what chaosrun reads and writes, for editors and other programs.

They are made from the models that parse the files, and refuse the same shapes: an unknown key, a wrong type, a value out of
bounds. They do not check how keys go together, and cannot tell 2.0 from 2.
"""

from typing import Any, Literal

from pydantic.json_schema import GenerateJsonSchema, JsonSchemaMode


class _Schema(GenerateJsonSchema):
    def generate(self, schema: Any, mode: JsonSchemaMode = "validation") -> dict[str, Any]:
        return {"$schema": self.schema_dialect, **super().generate(schema, mode=mode)}

    def field_title_should_be_set(self, schema: Any) -> bool:
        """No titles for fields: they would only repeat the key."""
        return False


def schema(of: Literal["job", "suite", "verdict", "preflight"]) -> dict[str, Any]:
    """The schema of a job file, a suite, a verdict or a preflight's result."""
    if of == "verdict":
        from chaosrun.verify.schema import verdict_schema

        return verdict_schema()
    if of == "preflight":
        from chaosrun.preflight.result import result_adapter

        made = result_adapter().json_schema(mode="serialization", schema_generator=_Schema)
        title = "A chaosrun preflight's result"  # what `chaosrun preflight -o json` prints
    else:
        from chaosrun.spec.model import JobSpec
        from chaosrun.spec.suite import SuiteSpec

        made = (JobSpec if of == "job" else SuiteSpec).model_json_schema(schema_generator=_Schema)
        title = f"A chaosrun {of}"
    for part in made.get("$defs", {}).values():
        part.pop("title", None)  # it is the name of an internal class
    return {**made, "title": title}
