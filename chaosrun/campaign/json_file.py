"""What sweeps and suites keep on disk: one typed value and its version a file, or a line, checked when it is read."""

import json
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from chaosrun.errors import UsageError
from chaosrun.records.journal import write_durably
from chaosrun.records.run_file import read_json

T = TypeVar("T")


@cache
def _adapter(kind: type[Any]) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def plain(value: object) -> Any:
    """A dataclass as JSON values."""
    return _adapter(type(value)).dump_python(value, mode="json")


def checked(kind: type[T], value: object) -> T:
    """The dataclass that `plain` made the value of. Raises ValueError when it is another's."""
    return _adapter(kind).validate_json(json.dumps(value), strict=True)


def encode(value: object, version: int, *, indent: int | None = None) -> bytes:
    separators = (",", ":") if indent is None else None
    return json.dumps({"v": version, **plain(value)}, indent=indent, separators=separators).encode()


def decode(kind: type[T], data: bytes, version: int) -> T:
    """Raises ValueError for what is no such value of this version."""
    if _version(data) != version:
        raise ValueError(f"not of version {version}")
    try:
        return _adapter(kind).validate_json(data, strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error


def _version(data: bytes) -> object:
    value = read_json(data)
    return value.get("v") if isinstance(value, dict) else None


def save(path: Path, value: object, version: int) -> None:
    write_durably(path, encode(value, version, indent=1))


def load(path: Path, kind: type[T], *, version: int, what: str) -> T:
    """Raises UsageError when it holds no value that this version can read; `what` would be begun anew: a sweep, a suite."""
    again = f"begin the {what} anew"
    try:
        data = path.read_bytes()
        found = _version(data)
        if found is not None and found != version:
            raise UsageError(
                f"{path} has version {found!r}, this chaosrun reads version {version}",
                hint=f"go on with the chaosrun that began the {what}, or {again}",
            )
        return decode(kind, data, version)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path.parent} holds no {what} that can be read ({error})", hint=again) from error
