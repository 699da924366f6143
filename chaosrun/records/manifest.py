"""The manifest: the list of a checkpoint's files, written last. Owns its schema and bytes, touches no files.

`to_bytes` is canonical and contains its own sha256, and `from_bytes` accepts nothing else: one flipped bit is found.
"""

import hashlib
import json
from typing import Annotated, Any, Literal, Self

import msgspec
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from chaosrun.errors import UsageError
from chaosrun.records.layout import MANIFEST_NAME


def check_member_name(name: str) -> str:
    """Return `name` if it is a plain relative path (a/b.bin) inside a checkpoint, raise ValueError if not."""
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name or "\\" in name:
        raise ValueError(f"{name!r} is not a plain relative path")
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        raise ValueError(f"{name!r} is not UTF-8")
    if name == MANIFEST_NAME:
        raise ValueError("a manifest does not list itself")
    return name


MemberName = Annotated[str, AfterValidator(check_member_name)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class FileEntry(_Frozen):
    size: int = Field(ge=0)
    """Bytes."""
    xxh3: str = Field(pattern=r"^[0-9a-f]{32}$")
    """128 bits: detects damage by storage as well as sha256 does, twelve times as fast."""


class ManifestPosition(_Frozen):
    """Epoch (from 0), completed batches in it, completed optimizer steps."""

    epoch: int = Field(ge=0)
    batches: int = Field(ge=0)
    step: int = Field(ge=0)


class Manifest(_Frozen):
    v: Literal[2] = 2
    step: int = Field(ge=0)
    position: ManifestPosition
    world_size: int = Field(ge=1)
    attempt: int = Field(ge=0)
    time_s: float
    job_fingerprint: str
    files: dict[MemberName, FileEntry]
    digests: dict[str, Any]
    """JSON values only: digests of the live state at the save."""

    @model_validator(mode="after")
    def _one_step(self) -> Self:
        if self.position.step != self.step:
            raise ValueError(f"position is at step {self.position.step}, the manifest at step {self.step}")
        return self

    def to_bytes(self) -> bytes:
        # Not mode="json": that would write a NaN as null instead of refusing it.
        fields = self.model_dump()
        checksum = hashlib.sha256(_canonical(fields)).hexdigest()
        return _canonical({**fields, "sha256": checksum}) + b"\n"

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """Raises ValueError, saying why, for bytes that `to_bytes` did not write, UsageError for an earlier chaosrun's."""
        try:
            fields = json.loads(data)
        except ValueError as error:
            raise ValueError(f"not JSON ({error})") from error
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        fields.pop("sha256", None)
        if fields.get("v") == 1:
            raise UsageError(
                "this checkpoint's manifest is of version 1: an earlier chaosrun wrote it",
                hint="continue with the version of chaosrun that began the run, or begin the run anew",
            )
        try:
            manifest = cls.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)[0]
            place = ".".join(str(part) for part in first["loc"])
            raise ValueError(f"{place}: {first['msg']}" if place else first["msg"]) from error
        if manifest.to_bytes() != data:
            raise ValueError("changed since it was written (its own sha256 does not match)")
        return manifest


def _canonical(fields: dict[str, object]) -> bytes:
    # The same bytes as json.dumps(indent=1), which is slow pure Python: a manifest of a thousand ranks is long.
    return msgspec.json.format(json.dumps(fields, sort_keys=True, allow_nan=False).encode(), indent=1)
