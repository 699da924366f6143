"""run.json and the other files of a run that hold one JSON object: read as data, whatever lies there.

run.json may have been changed, cut off or copied from elsewhere: what is read of it has the types that it is used with, else a
UsageError names the file. Owns what every run.json has, not what it means.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.records.layout import LegLayout, RunLayout

DAMAGED = "the run is damaged, or was written by another version of chaosrun; submit the job again"
_KEYS: Mapping[str, type | tuple[type, ...]] = {
    "run_id": str,
    "created_s": (int, float),
    "job": str,
    "directory": str,
    "script": str,
    "overrides": list,
    "spec": dict,
    "reference": dict,
    "storage": dict,
    "irreproducible": (str, type(None)),
}


def read_json(data: bytes) -> Any:
    """A JSON value. Raises ValueError for bytes that are none, those nested beyond reason included."""
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
        raise UsageError(f"{path}: not JSON ({error})", hint="the run is damaged") from error
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}", hint="`chaosrun list` shows the runs") from error
    if not isinstance(value, dict):
        raise UsageError(f"{path}: not a JSON object", hint="the run is damaged")
    return value


def read_run(run: RunLayout) -> dict[str, Any]:
    """run.json. Raises UsageError when the directory is no run, or the file is not one of a run."""
    info = read_object(run.run_json)
    for key, kind in _KEYS.items():
        if key not in info or not isinstance(info[key], kind):
            raise UsageError(f"{run.run_json}: {key} is {_short(info.get(key))}", hint=DAMAGED)
    if not all(isinstance(change, str) for change in info["overrides"]) or not isinstance(info["spec"].get("name"), str):
        raise UsageError(f"{run.run_json}: overrides or spec is not what a run has", hint=DAMAGED)
    for key in ("mode", "source", "key"):
        if not isinstance(info["reference"].get(key), str | None) or info["reference"].get("mode") is None:
            raise UsageError(f"{run.run_json}: reference is {_short(info['reference'])}", hint=DAMAGED)
    return info


def recorded_leg(run: RunLayout, info: Mapping[str, Any], name: str) -> LegLayout:
    """One of the run's own legs, to be read, with its checkpoints where run.json says they are."""
    storage = info.get("storage") or {}
    place = storage.get(name) if isinstance(storage, Mapping) else storage
    if place is not None and (not isinstance(place, str) or not place or "\0" in place):
        raise UsageError(f"{run.run_json}: storage is {_short(storage)}", hint=DAMAGED)
    return run.leg(name, Path(place) if place else None)


def own_leg(run: RunLayout, info: Mapping[str, Any], name: str) -> LegLayout:
    """The same, to be written to and cleared: it has to be a place that this very run made for itself.

    Raises UsageError when its directory is a link, or its storage is not called after the run: a copied or edited run.json must
    not have another's checkpoints taken for our own.
    """
    leg = recorded_leg(run, info, name)
    storage = leg.storage
    if storage is not None and (not storage.is_absolute() or storage.parts[-2:] != (run.run_id, name) or ".." in storage.parts):
        raise UsageError(
            f"{run.run_json}: the checkpoints of leg {name} lie in {storage}, which is not this run's",
            hint="a run cannot be gone on with under another name: submit the job again",
        )
    for path in (leg.path, leg.checkpoints.parent, leg.checkpoints, leg.staging, leg.quarantine):
        if path.is_symlink():
            raise UsageError(
                f"{path} is a symbolic link: a run writes nowhere but in its own directory",
                hint="remove the link; checkpoint.storage puts checkpoints elsewhere",
            )
    return leg


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}…"
