"""Turns a failed validation into problems with a place, a plain sentence and the nearest valid name.

Reads the model's own fields for names and descriptions, so that a new field needs no words here.
"""

import copy
import difflib
import re
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Mapping as AnyMapping
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Place, Problem
from chaosrun.spec.tree import Mapping, find

Location = tuple[str | int, ...]
Context = dict[str, Any]
"""What pydantic tells of an error beside its place."""

EXPECTED: dict[str, Callable[[Context], str]] = {
    "int_type": lambda _: "a whole number",
    "float_type": lambda _: "a number",
    "string_type": lambda _: "text",
    "bool_type": lambda _: "true or false",
    "tuple_type": lambda _: "a list",
    "dict_type": lambda _: "a mapping",
    "model_type": lambda _: "a mapping",
    "finite_number": lambda _: "a finite number",
    "string_too_short": lambda _: "text that is not empty",
    "greater_than": lambda ctx: f"greater than {ctx['gt']:g}",
    "greater_than_equal": lambda ctx: f"at least {ctx['ge']:g}",
    "less_than": lambda ctx: f"less than {ctx['lt']}",
    "less_than_equal": lambda ctx: f"at most {ctx['le']}",
    "literal_error": lambda ctx: _one_of(_choices(ctx)),
    "wrong_value": lambda ctx: ctx["expected"],
}
"""Pydantic's error types that this spec can raise, as what completes "<name> must be …"."""
MEANT = {"step": "at_step", "at": "at_step", "every": "every_steps", "type": "kind", "ranks": "rank", "delay": "after"}
"""Words that mean a key to which they are not the most similar in spelling."""
MOST_CHOICES = 8
"""More are too many for a sentence: the nearest is named, else all of them in the hint."""


def problems_of(
    error: ValidationError, root: Mapping, model: type[BaseModel] = JobSpec, *, values: Any = None
) -> list[Problem]:
    """Every error of a validation of `root` by `model` as a problem. A missing key that is present but misspelt is reported
    once, as the misspelling. With the validated `values`, also conflicts between keys that an unknown key had hidden."""
    details = error.errors(include_url=False)
    missing = {entry["loc"] for entry in details if entry["type"] == "missing"}
    problems: list[Problem] = []
    for entry in details:
        if entry["type"] == "extra_forbidden":
            problem, meant = _unknown_key(entry["loc"], root, model)
            missing.discard(meant)
            problems.append(problem)
    for entry in details:
        if entry["type"] not in ("extra_forbidden", "missing"):
            problems.append(_wrong_value(entry, root, model))
    problems += [_missing_key(location, root, model) for location in sorted(missing, key=str)]
    problems += [_wrong_value(entry, root, model) for entry in _hidden_conflicts(details, values, model)]
    return problems


def nearest(word: str, names: Iterable[str]) -> str | None:
    """The valid name that `word` probably stands for. Case and dashes do not count."""
    spelt = {name.lower(): name for name in names}
    found = difflib.get_close_matches(word.lower().replace("-", "_"), list(spelt), n=1, cutoff=0.6)
    return spelt[found[0]] if found else None


def _hidden_conflicts(details: list[ErrorDetails], values: Any, model: type[BaseModel]) -> Iterator[ErrorDetails]:
    """Conflicts between keys that would be reported if no key were unknown, for any meaning of the unknown keys."""
    unknown = [entry["loc"] for entry in details if entry["type"] == "extra_forbidden"]
    if values is None or not unknown:
        return
    known = {(entry["loc"], entry["msg"]) for entry in details}
    guesses = {location: _guess(location, model) for location in unknown}
    left_out, put_right = _conflicts(values, dict.fromkeys(unknown), model), _conflicts(values, guesses, model)
    for told, entry in left_out.items():
        if told in put_right and told not in known:
            yield entry


def _conflicts(
    values: Any, keys: AnyMapping[Location, str | None], model: type[BaseModel]
) -> dict[tuple[Location, str], ErrorDetails]:
    """Conflicts that remain when these keys are renamed, or (None) removed."""
    values = copy.deepcopy(values)
    for location, name in keys.items():
        parent = values
        for part in location[:-1]:
            parent = parent[part]
        value = parent.pop(location[-1])
        if name is not None:
            parent.setdefault(name, value)
    try:
        model.model_validate(values)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return {(entry["loc"], entry["msg"]): entry for entry in found if entry["type"] == "conflict"}
    return {}


def dotted(location: Location) -> str:
    """("faults", "schedule", 0, "rank") → "faults.schedule[0].rank"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _unknown_key(location: Location, root: Mapping, model: type[BaseModel]) -> tuple[Problem, Location]:
    key, node = find(root, location)
    parent, name = location[:-1], str(location[-1])
    names = list(_section(parent, model).model_fields)
    elsewhere = [path for path in _all_paths(model) if path.rpartition(".")[2] == name]
    guess = _guess(location, model)
    where = f" in {dotted(parent)}" if parent else ""
    message = f"unknown key {name!r}{where}"
    if elsewhere and not guess:
        hint = f"{name} belongs elsewhere: {', '.join(elsewhere)}"
    else:
        message += f", did you mean {guess!r}?" if guess else ""
        hint = f"{'keys of ' + dotted(parent) if parent else 'keys here'}: {', '.join(names)}"
    return Problem(place=key or node.place, message=message, hint=hint), (*parent, guess or "")


def _guess(location: Location, model: type[BaseModel]) -> str | None:
    """The key that an unknown one probably stands for, None if its name belongs elsewhere."""
    name, names = str(location[-1]), list(_section(location[:-1], model).model_fields)
    if MEANT.get(name.lower()) in names:
        return MEANT[name.lower()]
    return None if any(path.rpartition(".")[2] == name for path in _all_paths(model)) else nearest(name, names)


def _missing_key(location: Location, root: Mapping, model: type[BaseModel]) -> Problem:
    parent, name = location[:-1], str(location[-1])
    key, node = find(root, parent)
    description = _section(parent, model).model_fields[name].description
    where = f" in {dotted(parent)}" if parent else ""
    return Problem(place=key or _opening(node.place), message=f"missing key {name!r}{where}", hint=f"{name}: {description}")


def _wrong_value(entry: ErrorDetails, root: Mapping, model: type[BaseModel]) -> Problem:
    location = entry["loc"]
    of_key = location[-1:] == ("[key]",)
    location = location[:-1] if of_key else location
    key, node = find(root, location)
    context: Context = entry.get("ctx", {})
    if entry["type"] == "conflict":
        return Problem(place=key or _opening(node.place), message=context["reason"], hint=context["hint"])
    seen = entry["input"]
    place = key if key and (of_key or node.place.end <= node.place.column) else node.place
    name = dotted(location)
    describe = EXPECTED.get(entry["type"])
    message = f"{name} must be {describe(context)}, not {_shown(seen)}" if describe else f"{name}: {entry['msg']}"
    if entry["type"] == "literal_error" and isinstance(seen, str):
        choices = _choices(context)
        guess = nearest(seen, choices)
        message += f"; did you mean {guess!r}?" if guess else ""
        if not guess and len(choices) > MOST_CHOICES:
            return Problem(place=place, message=message, hint=f"{name.rpartition('.')[2]}: {', '.join(choices)}")
    return Problem(place=place, message=message, hint=_hint(entry["type"], location, seen, model))


def _hint(kind: str, location: Location, seen: Any, model: type[BaseModel]) -> str | None:
    if kind == "string_type" and isinstance(seen, int | float):
        return f'quote it: "{str(seen).lower() if isinstance(seen, bool) else seen}"'
    if kind in ("int_type", "float_type", "bool_type") and isinstance(seen, str) and _reads_as(kind, seen):
        return "remove the quotes"
    if kind == "tuple_type" and isinstance(seen, str) and seen.strip():
        return f"write [{', '.join(seen.split())}]"
    if kind == "bool_type" and seen in ("yes", "on", "no", "off"):
        return f"write {'true' if seen in ('yes', 'on') else 'false'}"
    if seen is None:
        return f"give {dotted(location)} a value, or remove the key"
    names = [part for part in location if isinstance(part, str)]
    field = _section(location[:-1], model).model_fields.get(names[-1]) if names else None
    return f"{names[-1]}: {field.description}" if field and field.description else None


def _one_of(choices: list[str]) -> str:
    return f"one of {', '.join(choices)}" if len(choices) <= MOST_CHOICES else f"one of {len(choices)} words"


def _choices(context: Context) -> list[str]:
    return re.findall(r"'([^']*)'", context["expected"])


def _reads_as(kind: str, text: str) -> bool:
    if kind == "bool_type":
        return text in ("true", "false")
    return text.strip().lstrip("+-").replace(".", "", 1 if kind == "float_type" else 0).isdecimal()


def _shown(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}…"
    if isinstance(value, list | tuple):
        return "a list"
    if isinstance(value, dict):
        return "a mapping"
    return str(value)


def _opening(place: Place) -> Place:
    """The first character of a place: for a whole mapping, whose first line would show too much."""
    return Place(source=place.source, line=place.line, column=place.column, end=place.column + 1)


def _section(location: Location, model: type[BaseModel]) -> type[BaseModel]:
    """The model of the mapping at `location`, or of the nearest one around it."""
    section = model
    for part in location:
        field = section.model_fields.get(part) if isinstance(part, str) else None
        section = (_submodel(field.annotation) if field else None) or section
    return section


def _submodel(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for part in get_args(annotation) if (found := _submodel(part))), None)


def _all_paths(section: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in section.model_fields.items():
        yield prefix + name
        if below := _submodel(field.annotation):
            many = "[]" if get_origin(field.annotation) is tuple else ""
            yield from _all_paths(below, f"{prefix}{name}{many}.")
