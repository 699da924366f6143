"""Single values of a spec: their types, bounds, and the words of an error about one.

It must not know what a job is. `Section` is the frozen mapping that every part of a spec is made of.
"""

import os
import re
from collections.abc import Callable, Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import InitErrorDetails, PydanticCustomError

JOB_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
SIZE = re.compile(r"(?P<amount>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[kKMGT]i?B)")
SIZE_UNITS = {
    prefix + kind: base**power
    for power, prefixes in enumerate(("kK", "M", "G", "T"), start=1)
    for prefix in prefixes
    for kind, base in (("B", 1000), ("iB", 1024))
}
DURATION = re.compile(r"(?P<amount>[0-9]+(\.[0-9]+)?)\s*(?P<unit>ms|s|m|h|d)")
DURATION_UNITS_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
SHARE = re.compile(r"(?P<percent>[0-9]+(\.[0-9]+)?)\s*%")
RENDEZVOUS = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})


def wrong(expected: str) -> PydanticCustomError:
    """An error of one value: `expected` completes "<name> must be …"."""
    # A lone surrogate in a key would break pydantic's own message.
    return PydanticCustomError("wrong_value", "{expected}", {"expected": expected.encode(errors="backslashreplace").decode()})


def conflict(key: str | None, reason: str, hint: str) -> InitErrorDetails:
    """An error between fields, shown at `key` (None: at the whole mapping). `reason` is the sentence, `hint` the remedy."""
    return InitErrorDetails(type=_refusal(reason, hint), loc=() if key is None else (key,), input=None)


def _refusal(reason: str, hint: str) -> PydanticCustomError:
    return PydanticCustomError("conflict", "{reason}", {"reason": reason, "hint": hint})


def must(fits: Callable[[Any], object], expected: str) -> Callable[[Any], Any]:
    """A validator that returns a value unchanged if it `fits`, and else raises that it "must be `expected`"."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise wrong(expected)
        return value

    return check


some = must(lambda value: value or not isinstance(value, list | tuple), "a list with at least one entry")
"""Checked before the entries are validated: a wrong entry does not make the list empty."""


def job_name(text: str) -> str:
    """The text without characters that a job's name may not contain."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:64] or "job"


def _seconds(value: Any) -> float:
    expected = "a time greater than 0: seconds, or text such as 90s, 10m, 2h"
    if isinstance(value, str) and (match := DURATION.fullmatch(value.strip())):
        value = float(match["amount"]) * DURATION_UNITS_S[match["unit"]]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise wrong(expected)
    return float(value)


def seconds_of(text: str) -> float:
    """`90s`, `10m`, `0.5` of a command as seconds. Raises ValueError, which says what is expected."""
    try:
        return _seconds(float(text) if NUMBER.fullmatch(text) else text)
    except PydanticCustomError as error:
        raise ValueError(error.message()) from error


def _variable_name(value: str) -> str:
    if not value or "=" in value or "\0" in value:
        raise wrong("the name of an environment variable")
    if value in RENDEZVOUS:
        raise _refusal(f"{value} is set by chaosrun, for each rank and attempt", "leave it out of env")
    return value


def _output(value: str) -> str:
    path = os.path.normpath(value)
    if path.startswith(("/", "..")) or path == ".":
        reason = "outputs are relative to the job's directory, and lie below it"
        hint = "where the script is given a path, write {output} in its place: a folder of each leg's own"
        raise _refusal(reason, hint)
    return path


def _share(value: Any) -> float:
    if isinstance(value, str) and (match := SHARE.fullmatch(value.strip())) and 0 <= float(match["percent"]) <= 100:
        return float(match["percent"]) / 100
    if isinstance(value, float) and 0 <= value <= 1:
        return value
    raise wrong("a part of the whole, such as 25%")


def _memory(value: Any) -> int | str:
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and value >= 0):
        return value
    if isinstance(value, str) and (match := SIZE.fullmatch(value.strip())):
        return int(float(match["amount"]) * SIZE_UNITS[match["unit"]])
    raise wrong("'auto', or a size such as 8GiB")


def _confirmations(value: Any) -> int:
    if isinstance(value, bool | int) and value >= 0:
        return int(value)
    raise wrong("true, false, or how many runs without faults are to agree, such as 3")


_job_name = must(JOB_NAME.fullmatch, "1 to 64 letters, digits, '.', '_' or '-', beginning with a letter or digit")
_no_nul = must(lambda value: "\0" not in value, "text without NUL characters")
_rank = must(
    lambda value: value in ("random", "all") or (isinstance(value, int) and not isinstance(value, bool) and value >= 0),
    "'random', 'all' or a rank, counted from 0",
)
_kept = must(
    lambda value: value in ("auto", "all") or (type(value) is int and value >= 2), "'auto', 'all' or a number from 2 on"
)
_standby = must(lambda value: value == "all" or (type(value) is int and value >= 0), "'all' or a number of nodes")
_gpus = must(
    lambda value: value in ("auto", 0, 1) and not isinstance(value, bool | float),
    "'auto', 0 or 1: a worker trains on one device",
)
_class_name = must(
    lambda value: "." in value and all(part.isidentifier() for part in value.split(".")),
    "the name of a class with its module, such as package.module.Class",
)


def _words_or_number(*words: str, least: int = 0) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": [*words]}, {"type": "integer", "minimum": least}]})


def _two(expected: str) -> BeforeValidator:
    return BeforeValidator(must(lambda value: isinstance(value, list | tuple) and len(value) == 2, expected))


Count = Annotated[int, Field(strict=True, ge=0)]
Positive = Annotated[int, Field(strict=True, ge=1)]
Seed = Annotated[int, Field(strict=True, ge=0, lt=2**32)]  # numpy takes no larger one
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Flag = Annotated[bool, Field(strict=True)]
Text = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_no_nul)]
Output = Annotated[str, Field(strict=True, min_length=1), AfterValidator(_no_nul), AfterValidator(_output)]
"""A file or folder below the job's directory."""
Confirmations = Annotated[
    int, BeforeValidator(_confirmations), WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "integer", "minimum": 0}]})
]
"""How often; true is once."""
Kept = Annotated[Literal["auto", "all"] | int, BeforeValidator(_kept), _words_or_number("auto", "all", least=2)]
"""How many checkpoints."""
Memory = Annotated[
    Literal["auto"] | int,
    BeforeValidator(_memory),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["auto"]},
                {"type": "integer", "minimum": 0},
                {"type": "string", "pattern": r"^\s*[0-9]+(\.[0-9]+)?\s*[kKMGT]i?B\s*$"},
            ]
        }
    ),
]
"""Bytes."""
Standby = Annotated[Literal["all"] | int, BeforeValidator(_standby), _words_or_number("all")]
"""How many nodes."""

# A JSON Schema must be given what a Python validator allows or refuses.
JobName = Annotated[
    str, Field(strict=True), AfterValidator(_job_name), WithJsonSchema({"type": "string", "pattern": f"^{JOB_NAME.pattern}$"})
]
_ARGUMENT = {"type": ["string", "number", "boolean", "null"]}
Argument = Annotated[str, Field(strict=True), AfterValidator(_no_nul), WithJsonSchema(_ARGUMENT)]
"""Text; a job file may leave out its quotes (`spec.model.VERBATIM`)."""
Duration = Annotated[
    float,
    BeforeValidator(_seconds),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "number", "exclusiveMinimum": 0},
                {"type": "string", "pattern": r"^\s*(?=[0-9.]*[1-9])[0-9]+(\.[0-9]+)?\s*(ms|s|m|h|d)\s*$"},
            ]
        }
    ),
]
"""Seconds. A job file may also write 500ms, 90s, 10m, 2h, 1d."""
Rank = Annotated[int | Literal["random", "all"], BeforeValidator(_rank), _words_or_number("random", "all")]
Device = Annotated[Literal["auto", 0, 1], BeforeValidator(_gpus)]
ClassName = Annotated[
    str,
    Field(strict=True),
    AfterValidator(_class_name),
    WithJsonSchema({"type": "string", "pattern": r"^[^\W\d]\w*(\.[^\W\d]\w*)+$"}),
]
Variables = Annotated[
    dict[Annotated[str, AfterValidator(_variable_name)], Argument],
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[^=\u0000]+$", "not": {"enum": sorted(RENDEZVOUS)}},
            "additionalProperties": _ARGUMENT,
        }
    ),
]
StepRange = Annotated[tuple[Positive, Positive], _two("two steps, first and last, such as [1, 60]")]
Share = Annotated[
    float, BeforeValidator(_share), WithJsonSchema({"type": "string", "pattern": r"^\s*(100|[0-9]{1,2}(\.[0-9]+)?)\s*%\s*$"})
]
"""A part of a whole, 0 to 1. A file writes it as 25%."""
Stretch = Annotated[tuple[Share, Share], _two("two parts of the training, from and to, such as [20%, 80%]")]
"""Where a stretch of the training begins and ends."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    def conflicts(self) -> Iterable[InitErrorDetails]:
        """Contradictions between fields that are each valid by themselves."""
        return ()

    @model_validator(mode="after")
    def _without_conflicts(self) -> Self:
        if found := list(self.conflicts()):
            raise ValidationError.from_exception_data(type(self).__name__, found)
        return self
