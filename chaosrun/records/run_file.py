"""run.json, typed, and the other files of a run that hold one JSON object. They may have been changed, cut off or copied:
content that does not match its type is a UsageError that names the file."""

import json
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, cast

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import fields

from chaosrun.errors import ChaosrunError, UsageError
from chaosrun.records.codec import Count, Record, convert, encode
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.wording import LEFT_OUT, SECRET

DAMAGED = "the run is damaged, or was written by another version of chaosrun; submit the job again"
_T = TypeVar("_T")
_R = TypeVar("_R", bound=Struct)
Place = Annotated[str, Meta(min_length=1, pattern="^[^\\x00]*$")]
Early = Literal["never", "long", "always", "watch"]
"""When a chaos leg may end before its training does. long: in a job with many steps; watch: never, but note where it could."""
Kind = Literal["drill", "run"]
"""run: a run in production, one leg without a reference."""


class Reference(Record, frozen=True, kw_only=True, omit_defaults=False):
    """The origin of a run's reference leg."""

    mode: str
    """auto, fresh, or the path of the run whose reference is taken."""
    source: str | None = None
    """The leg that it was copied from; None when it was run for this drill."""
    key: str | None = None
    """Digest of everything that the reference depends on: see `supervise.reference`."""
    replaced: str | None = None
    """How the cached reference differed from a new one, which then replaced it."""

    @property
    def run(self) -> str | None:
        """The run whose reference is taken, if one was named."""
        return None if self.mode in ("auto", "fresh") else Path(self.mode).name


class RunInfo(Record, frozen=True, kw_only=True, omit_defaults=False):
    """run.json: the resolved request for a run."""

    v: Literal[1] = 1
    run_id: str
    created_s: float
    chaosrun: str = ""
    """The version of chaosrun that made the run."""
    job: str
    """Of the job file: an absolute path, as are `directory` (where the job's relative paths start) and `script`."""
    directory: str
    script: str
    overrides: tuple[str, ...]
    typed: tuple[str, ...] | None = None
    """The command-line words of a job that was given without a job file."""
    spec: dict[str, Any]
    """The `JobSpec` as JSON values."""
    reference: Reference
    storage: dict[str, Place | None]
    """By leg, where its checkpoints are; None: in the leg's own directory."""
    storage_nonce: str | None = None
    """The nonce in owner.json, see `Owner`."""
    irreproducible: str | None
    """How two runs without faults differed, if they did."""
    wanders: str | None = None
    """The first quantity in which they differed."""
    kind: Kind = "drill"
    address: str | None = None
    """Of the Ray cluster that it was told to join."""
    metrics: str | None = None
    """[HOST:]PORT at which the supervisor serves /metrics."""
    masked: tuple[str, ...] = ()
    """The script's own loads, which have no effect because chaosrun restores: "torch.load, line 12"."""
    early: Early = "never"
    """When its chaos leg may end before its training does."""
    confirmed: Count = 0
    """Number of repeated runs without faults that were equal."""

    @property
    def name(self) -> str:
        return self.spec["name"]

    @property
    def shown_overrides(self) -> tuple[str, ...]:
        """The overrides without the values of variables that may be secrets: reports are shared."""
        return tuple(map(_shown, self.overrides))


def _shown(override: str) -> str:
    place, _, value = override.partition("=")
    folder, _, name = place.rpartition(".")
    names = re.findall(r"\w+", value) if name == "env" else [name] if folder.endswith("env") else []
    return f"{place}={LEFT_OUT}" if any(map(SECRET.search, names)) else override


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    run_id: str
    name: str
    status: str
    """PASS, FAIL, INCONCLUSIVE, "running", "interrupted" (no supervisor and no verdict), or "damaged"."""
    created_s: float
    path: Path
    outcome: str | None = None
    """How the leg behind the verdict ended, which distinguishes kinds of INCONCLUSIVE; None without a verdict."""
    exit_code: int | None = None
    """Exit code of the verdict, or of the error that ended the last supervisor."""


def read_json(data: bytes) -> Any:
    """A JSON value. Raises ValueError for bytes that are not JSON, or are nested too deep."""
    try:
        return json.loads(data)
    except RecursionError as error:
        raise ValueError("nested too deep") from error


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in one of a run's files. Raises UsageError, naming the file, when there is none."""
    try:
        value = read_json(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UsageError(
            f"{path.parent} is not a run: {path.name} is missing", hint="`chaosrun list` shows the runs"
        ) from error
    except ValueError as error:
        raise UsageError(f"{path} is damaged: not JSON ({error})", hint=_way_on(path)) from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="`chaosrun list` shows the runs") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path} is damaged: not a JSON object", hint=_way_on(path))
    return value


def read_record(path: Path, kind: type[_R]) -> _R:
    """The record in one of a run's files. Raises UsageError as `read_object`, and for a record of another kind."""
    found = read_object(path)
    try:
        return convert(found, kind)
    except ValueError as error:
        known = next((field.default for field in fields(kind) if field.name == "v"), None)
        if (version := found.get("v", known)) != known:
            message = f"{path} was written by another chaosrun (version {version!r:.20}, this one reads version {known})"
            raise UsageError(message, hint="read the run with the chaosrun that wrote it, or submit the job again") from error
        raise UsageError(f"{path} is damaged: {error}", hint=_way_on(path)) from error


def readable(read: Callable[[], _T], problems: list[str]) -> _T | None:
    """What `read` returns; None, and a problem more, for a damaged file."""
    try:
        return read()
    except ChaosrunError as error:
        problems.append(error.message)
        return None


def _way_on(path: Path) -> str:
    """A hint for a run of which one file is damaged."""
    run = run_argument(RunLayout(path.parent))
    match path.name:
        case "verdict.json":
            return f"its records are what counts: `chaosrun verify {run}` judges them again"
        case "supervisor.json":
            return f"it only says how the last supervisor ended: `chaosrun resume {run}` continues the run"
        case _:
            return DAMAGED


def read_run(run: RunLayout) -> RunInfo:
    """run.json. Raises UsageError when the directory is no run, or the file is not one of a run."""
    info = read_record(run.run_json, RunInfo)
    if not isinstance(info.spec.get("name"), str):
        raise UsageError(f"{run.run_json} is damaged: spec is not what a run has", hint=DAMAGED)
    return info


def write_run(run: RunLayout, info: RunInfo) -> None:
    write_record(run.run_json, info)


def write_record(path: Path, record: Record) -> None:
    """Write a record as a whole file, durably and indented for human readers."""
    write_durably(path, msgspec.json.format(encode(record), indent=1))


def recorded_leg(run: RunLayout, info: RunInfo, name: str) -> LegLayout:
    """A leg of the run, for reading, with its checkpoints where run.json says they are."""
    env: object = info.spec.get("env")
    return LegLayout.at(run.path / name, info.storage.get(name), cast("dict[str, str]", env) if isinstance(env, dict) else None)


def own_leg(run: RunLayout, info: RunInfo, name: str) -> LegLayout:
    """A leg of the run, for writing and clearing. Raises UsageError unless this very run made the place: no link, and storage
    that it owns. With a copied run.json, another run's checkpoints must not be taken for this run's."""
    leg = recorded_leg(run, info, name)
    storage = leg.storage
    astray = storage is not None and (not storage.is_absolute() or ".." in storage.parts)
    if leg.place is not None and (astray or leg.place.split("/")[-2:] != [run.run_id, name]):
        raise UsageError(
            f"{run.run_json}: the checkpoints of leg {name} lie in {leg.place}, which is not this run's",
            hint="a run cannot be resumed under another name: submit the job again",
        )
    for path in (leg.path, leg.checkpoints.parent, leg.checkpoints, leg.staging, leg.quarantine):
        if path.is_symlink():
            raise UsageError(
                f"{path} is a symbolic link: a run writes only in its own directory",
                hint="remove the link; checkpoint.storage puts checkpoints elsewhere",
            )
    return leg


class Owner(Record, frozen=True, kw_only=True, omit_defaults=False):
    """owner.json of a checkpoint directory outside the run: which run owns it. run.json is no proof: it may be a copy."""

    v: Literal[1] = 1
    run: str
    """Absolute path."""
    nonce: str
    """The same as in run.json."""


def claim(storage: Path, run: RunLayout) -> str:
    """Record that the run has made this directory; returns the nonce. Raises OSError."""
    owner = new_owner(run)
    write_record(_owner_json(storage), owner)
    return owner.nonce


def new_owner(run: RunLayout) -> Owner:
    return Owner(run=str(run.path.resolve()), nonce=secrets.token_hex(16))


def is_owner(storage: Path, path: Path, info: RunInfo) -> bool:
    """Whether this directory was made by the run that is, or was, at `path`, with `info` in its run.json."""
    file = _owner_json(storage)
    if storage.is_symlink() or file.is_symlink() or info.storage_nonce is None:
        return False
    try:
        return read_record(file, Owner) == Owner(run=str(path.resolve()), nonce=info.storage_nonce)
    except UsageError:
        return False


def disown(storage: Path) -> None:
    """Remove the directory if only owner.json is left in it."""
    if [entry.name for entry in storage.iterdir()] == [_owner_json(storage).name]:
        _owner_json(storage).unlink()
        storage.rmdir()


def _owner_json(storage: Path) -> Path:
    return storage / "owner.json"
