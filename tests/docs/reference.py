"""The reference parts of docs/job.md, docs/suite.md, docs/faults.md and docs/causes.md, made from what reads those files.

`python -m tests.docs.reference` writes them anew.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from chaosrun.faults.kind import CHECKPOINT_PHASES, EVERYWHERE, PHASES, TRAINING_PHASES, Kind
from chaosrun.faults.kinds import KINDS
from chaosrun.integrations.schemas import schema as schema_of
from chaosrun.spec.faults import FaultOptions
from chaosrun.spec.fields import (
    Argument,
    ClassName,
    Confirmations,
    Duration,
    JobName,
    Kept,
    Memory,
    Rank,
    Share,
    StepRange,
    Stretch,
    Variables,
)
from chaosrun.spec.suite import Axes, Changes, Expected, Faults
from chaosrun.verify.codes import TABLE, public_codes

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
BEGIN, END = "<!-- generated: begin -->\n", "<!-- generated: end -->\n"
MOST_CHOICES = 8
"""Of so many a cell names each; of more it says where they are listed."""
LISTED = {"kind": "a [kind](faults.md#every-kind)", "phase": "a [phase](faults.md#phases)"}

Schema = dict[str, Any]

# Types that have a word of their own, explained at the head of the page.
WORDS: dict[Any, str] = {
    Confirmations: "`true`, `false`, or a whole number ≥ 0",
    Kept: "`auto`, `all` or a whole number ≥ 2",
    Memory: "`auto` or a size, such as `8GiB`, `500MB`, or bytes",
    Duration: "time",
    Rank: "a number from 0, `random` or `all`",
    Share: "part, such as `25%`",
    StepRange: "`[first, last]`",
    Stretch: "`[from, to]`, two parts",
    JobName: "name",
    Argument: "value",
    ClassName: "`package.module.Class`",
    Variables: "mapping of names to values",
    Axes: "mapping of keys to lists of values",
    Changes: "mapping of keys to values",
    Faults: "a preset's name or file, `job`, or a mapping",
    Expected: "`PASS`, `FAIL`, `INCONCLUSIVE`, or a mapping",
}


def key_of(schema: Schema) -> str:
    """Two schemas of one type have one key, whatever is said about the field."""
    return repr(_plain({name: value for name, value in schema.items() if name not in ("default", "description", "title")}))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(value[name]) for name in sorted(value) if name != "$defs"}
    return [_plain(each) for each in value] if isinstance(value, list) else value


TYPES = {key_of(TypeAdapter[Any](kind).json_schema()): words for kind, words in WORDS.items()}


def type_of(name: str, schema: Schema) -> str:
    """In words, for people."""
    schema = _without_null(schema)
    if (words := TYPES.get(key_of(schema))) is not None:
        return words
    if "$ref" in schema or any("$ref" in choice for choice in schema.get("anyOf", ())):
        return "mapping" if "$ref" in schema else "name, file, or mapping"
    if (several := schema.get("anyOf")) is not None:
        return " or ".join(type_of(name, choice) for choice in several)
    if (choices := schema.get("enum")) is not None:
        return LISTED[name] if len(choices) > MOST_CHOICES else ", ".join(f"`{choice}`" for choice in choices)
    match schema.get("type"):
        case "array":
            inner = type_of(name, schema.get("items", {}))
            return "list of " + re.sub(r"^(name|value|mapping)", r"\1s", inner)
        case "boolean":
            return "`true`, `false`"
        case "string":
            return "text"
        case "integer" | "number" as number:
            return " ".join(filter(None, ["whole number" if number == "integer" else "number", _bounds(schema)]))
    return "mapping of keys to values" if schema.get("type") == "object" else str(schema)


def _without_null(schema: Schema) -> Schema:
    if "anyOf" not in schema:
        return schema
    choices = [choice for choice in schema["anyOf"] if choice != {"type": "null"}]
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _bounds(schema: Schema) -> str:
    signs = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    return ", ".join(f"{sign} {schema[bound]:g}" for bound, sign in signs.items() if bound in schema).replace(
        "4.29497e+09", "2³²"
    )


def default_of(schema: Schema, required: bool) -> str:
    if required:
        return "required"
    default = schema.get("default")
    if default is None or (isinstance(default, Mapping) and default):
        return ""
    words = TYPES.get(key_of(_without_null(schema)))
    if words == WORDS[Duration]:
        return f"`{default:g}s`"
    if words == WORDS[Share]:
        return f"`{default:.0%}`"
    if words == WORDS[Stretch]:
        return f"`[{default[0]:.0%}, {default[1]:.0%}]`"
    text = str(default).lower() if isinstance(default, bool) else f"{default:g}" if isinstance(default, float) else str(default)
    return f"`{text}`"


def table(properties: Mapping[str, Schema], required: list[str]) -> Iterator[str]:
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for name, schema in properties.items():
        cells = (f"`{name}`", type_of(name, schema), default_of(schema, name in required), schema["description"])
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def sections(whole: Schema, shared: Mapping[str, Schema]) -> Iterator[str]:
    """A table for the file, then one for each kind of mapping in it, in the order in which one meets them."""
    yield from _section("The file", "", whole, {})
    for part, places in _mappings(whole, whole["$defs"]).items():
        title = ", ".join(f"`{place}`" for place in places)
        about = "" if len({*places.values()}) > 1 else f"{next(iter(places.values()))}."
        yield from _section(title, about[:1].upper() + about[1:], whole["$defs"][part], shared)


def _mappings(schema: Schema, parts: Mapping[str, Schema], path: str = "") -> dict[str, dict[str, str]]:
    """Every part, and what is said of each place that has one: {part: {place: description}}."""
    found: dict[str, dict[str, str]] = {}
    for name, inner in schema["properties"].items():
        for part, is_list in _references(inner):
            place = f"{path}{name}{'[]' if is_list else ''}"
            found.setdefault(part, {})[place] = inner["description"]
            for deeper, places in _mappings(parts[part], parts, f"{place}.").items():
                found[deeper] = found.get(deeper, {}) | places
    return found


def _references(schema: Schema) -> Iterator[tuple[str, bool]]:
    for choice in (schema, *schema.get("anyOf", ())):
        for each, is_list in ((choice, False), (choice.get("items", {}), True)):
            if "$ref" in each:
                yield each["$ref"].rpartition("/")[2], is_list


def _section(title: str, about: str, schema: Schema, shared: Mapping[str, Schema]) -> Iterator[str]:
    properties: Mapping[str, Schema] = schema["properties"]
    has_shared = bool(shared) and shared.keys() <= properties.keys()
    more = " Besides the keys of [every fault](#every-fault):" if has_shared else ""
    own = {name: each for name, each in properties.items() if not has_shared or each != shared.get(name)}
    yield from (f"### {title}", "", *([f"{about}{more}", ""] if about else []))
    yield from table(own, schema.get("required", []))
    yield ""


def job_reference() -> str:
    shared = FaultOptions.model_json_schema()["properties"]
    shared = {name: {key: value for key, value in each.items() if key != "title"} for name, each in shared.items()}
    lines = [*sections(schema_of("job"), shared)]
    lines += ["### Every fault", "", "What is done to whom: keys that scheduled, random and preset faults share.", ""]
    return "\n".join([*lines, *table(shared, []), ""])


def suite_reference() -> str:
    return "\n".join(sections(schema_of("suite"), {}))


def kinds_reference() -> str:
    lines = ["| kind | keys of its own | at | `after`, `mtbf` |", "|---|---|---|---|"]
    for name, kind in KINDS.items():
        keys = ", ".join(f"`{option.removesuffix('_s')}`{_default(option, kind)}" for option in kind.options)
        lines.append(f"| `{name}` | {keys or '–'} | {_places(kind)} | {'yes' if kind.timed else '–'} |")
    return "\n".join([*lines, ""])


def _default(option: str, kind: Kind) -> str:
    value = dict(kind.options)[option]  # type: ignore[index]
    if value is None:
        return ""
    if isinstance(value, float):
        return f" ({value:g} s)" if option.endswith("_s") else f" ({value:g})"
    return f" ({value})"


def _places(kind: Kind) -> str:
    wide = {
        EVERYWHERE: "every phase",
        EVERYWHERE - {"rendezvous"}: "every phase but `rendezvous`",
        TRAINING_PHASES: "a phase of training",
        TRAINING_PHASES | CHECKPOINT_PHASES: "a phase of training or of a checkpoint",
    }
    if kind.phases in wide:
        return wide[kind.phases]
    return ", ".join(
        f"`{phase}`{' (default)' * (len(kind.phases) > 1 and phase == kind.default_phase)}"
        for phase in PHASES
        if phase in kind.phases
    )


def causes_reference() -> str:
    """Every code that a verdict may name. A parameter of its sentence stands in braces."""
    rows = ["| code | sentence | whose fault | hazard |", "|---|---|---|---|"]
    for code in public_codes():
        row = TABLE[code]
        words = "" if row.blame is None else f"{row.blame.words}"
        hazard = "" if row.hazard is None else f"[{row.hazard}](hazards.md#{row.hazard.lower()})"
        sentence = re.sub(r"\{(\w+):[^}]*\}", r"{\1}", row.sentence).replace("|", "\\|")
        rows.append(f"| `{code}` | {sentence} | {words} | {hazard} |")
    return "\n".join(rows)


GENERATED = {
    DOCS / "job.md": job_reference,
    DOCS / "suite.md": suite_reference,
    DOCS / "faults.md": kinds_reference,
    DOCS / "causes.md": causes_reference,
}


def with_reference(text: str, reference: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"there is no {BEGIN.strip()} … {END.strip()}"
    return f"{before}{begin}\n{reference}\n{end}{after}"


if __name__ == "__main__":
    for path, make in GENERATED.items():
        path.write_text(with_reference(path.read_text(), make()))
