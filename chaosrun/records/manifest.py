"""The manifest: the list of a checkpoint's files, written last. Owns its schema and bytes, touches no files.

`to_bytes` is canonical and contains its own sha256, and `from_bytes` accepts nothing else: one flipped bit is found.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

import msgspec

from chaosrun.errors import UsageError
from chaosrun.records.codec import Count, Record, convert, to_plain
from chaosrun.records.layout import MANIFEST_NAME
from chaosrun.records.position import Position


def check_member_name(name: str) -> str:
    """Return `name` if it is a plain relative path (a/b.bin) inside a checkpoint, raise ValueError if not."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a plain relative path")
    if name == MANIFEST_NAME:
        raise ValueError("a manifest does not list itself")
    return name


class FileEntry(Record, frozen=True, kw_only=True):
    size: Count
    """Bytes."""
    xxh3: Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}\Z")]
    """128 bits: detects damage by storage as well as sha256 does, twelve times as fast."""


class Manifest(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[2] = 2
    step: Count
    position: Position
    world_size: Annotated[int, msgspec.Meta(ge=1)]
    attempt: Count
    time_s: float
    job_fingerprint: str
    files: Mapping[str, FileEntry]
    digests: Mapping[str, Any]
    """JSON values only: digests of the live state at the save."""

    def __post_init__(self) -> None:
        for name in self.files:
            check_member_name(name)
        if self.position.step != self.step:
            raise ValueError(f"position is at step {self.position.step}, the manifest at step {self.step}")

    def to_bytes(self) -> bytes:
        fields = msgspec.structs.asdict(self)
        checksum = hashlib.sha256(_canonical(fields)).hexdigest()
        return _canonical({**fields, "sha256": checksum}) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError, saying why, for bytes that `to_bytes` did not write, UsageError for an earlier chaosrun's."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from error
        if isinstance(fields, dict) and fields.get("v") == 1:
            raise UsageError(
                "this checkpoint's manifest is of version 1: an earlier chaosrun wrote it",
                hint="continue with the version of chaosrun that began the run, or begin the run anew",
            )
        manifest = convert(fields, cls)
        if manifest.to_bytes() != data:
            raise ValueError("changed since it was written (its own sha256 does not match)")
        return manifest


def _canonical(fields: dict[str, object]) -> bytes:
    # The same bytes as json.dumps(indent=1), which is slow pure Python: a manifest of a thousand ranks is long.
    return msgspec.json.format(json.dumps(fields, sort_keys=True, allow_nan=False, default=to_plain).encode(), indent=1)
