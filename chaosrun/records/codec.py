"""Encode typed records as bytes, and decode and check them. Knows no particular record.

A file holds one JSON object, or one per line. A last line without a newline was cut off, and is left out. Any other record that
does not match its type is damaged, and reported with file, line and field. Records of version 1 are not read.
"""

import functools
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from chaosrun.errors import RecoveryError

RECORDS_VERSION = 2
"""Version of the journal and the other JSON files of a leg."""

Count = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Text = Annotated[str, Meta(min_length=1)]

_T = TypeVar("_T")


class DamagedRecordError(RecoveryError, ValueError):
    """A record that does not belong in its file: it was damaged, not cut off. The message names file, line and field."""

    ends_the_file = True
    """Whether nothing after it can be read: it is no record at all, or of another version."""


class Record(Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """An immutable value that is written to a file. Fields that hold their default are not written."""


class _Versioned(Struct):
    v: Any = None


changed = msgspec.structs.replace
_making = threading.Lock()


def encode(record: object) -> bytes:
    """The record as JSON; see `as_utf8`."""
    try:
        return msgspec.json.encode(record)
    except UnicodeEncodeError:
        return msgspec.json.encode(as_utf8(msgspec.to_builtins(record, str_keys=True)))


def as_utf8(plain: Any) -> Any:
    """Plain values with texts that UTF-8 can hold. Names of the script's own files may be other bytes, which Python keeps as
    lone surrogates; a record of them must not fail in the script. Of keys that become the same, the last one's value stays."""
    if isinstance(plain, str):
        return plain.encode(errors="backslashreplace").decode()
    if isinstance(plain, Mapping):
        return {as_utf8(key): as_utf8(value) for key, value in plain.items()}
    return [as_utf8(value) for value in plain] if isinstance(plain, list | tuple) else plain


def to_plain(record: Struct) -> dict[str, Any]:
    """The record as JSON values, for a pipe or a page."""
    return msgspec.to_builtins(record, str_keys=True)


@functools.cache
def decoder_of(type_: Any) -> msgspec.json.Decoder[Any]:
    """The decoder of a type, made by one thread at a time: msgspec 0.22 looks up a type's fields at its first use, and two
    threads at once end the process by SIGSEGV."""
    with _making:
        return msgspec.json.Decoder(type_)


def convert(value: object, type_: Any) -> Any:
    """A record from JSON values. Raises ValueError."""
    decoder_of(type_)
    return msgspec.convert(value, type_, strict=True, str_keys=True)


def decode(data: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Decode one record. Raises DamagedRecordError with the error and its place."""
    try:
        return decoder.decode(data)
    except (ValueError, RecursionError) as error:
        version = _version(data)
        if version not in (None, RECORDS_VERSION):
            raise DamagedRecordError(
                f"written by another chaosrun (version {version!r:.20}, this one reads version {RECORDS_VERSION})",
                hint="use the chaosrun that wrote it, or submit the job again",
            ) from error
        damage = DamagedRecordError(_words(error))
        damage.ends_the_file = version is None
        raise damage from error


def read_records(path: Path, decoder: msgspec.json.Decoder[_T]) -> Iterator[_T]:
    """The records of a file, one per line. Raises OSError, and DamagedRecordError naming file and line."""
    for _, found in _numbered(path, decoder):
        if isinstance(found, DamagedRecordError):
            raise found
        yield found


def sound_records(path: Path, decoder: msgspec.json.Decoder[_T], problems: list[str]) -> list[tuple[int, _T]]:
    """The sound records of a file, with their line numbers. A damaged record becomes a problem, as does a missing file. Nothing
    is read after a line of another version, or one that is no record. Raises OSError."""
    sound: list[tuple[int, _T]] = []
    try:
        for number, found in _numbered(path, decoder):
            if isinstance(found, DamagedRecordError):
                problems.append(found.message)
                if found.ends_the_file:
                    break
            else:
                sound.append((number, found))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    return sound


def _numbered(path: Path, decoder: msgspec.json.Decoder[_T]) -> Iterator[tuple[int, _T | DamagedRecordError]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                yield number, decode(line, decoder)
            except DamagedRecordError as error:
                damage = DamagedRecordError(f"{path}:{number}: {error.message}", hint=error.hint)
                damage.ends_the_file = error.ends_the_file
                yield number, damage


def _version(data: bytes) -> object:
    try:
        return msgspec.json.decode(data, type=_Versioned).v
    except (ValueError, RecursionError):
        return None


def _words(error: Exception) -> str:
    if isinstance(error, msgspec.ValidationError):
        return str(error).replace(" - at `$.", " at `")
    return f"not a JSON record ({error or 'nested too deep'})"
