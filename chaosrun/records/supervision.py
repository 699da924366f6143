"""supervisor.json: which process last supervised a run, and how that ended.

The verdict says what came of the drill; this says what came of the process: an error that left no verdict behind (no cluster, a
full disk, an interrupt), for whoever was not there to see it. Without an end, and with nobody holding the run's lock, it was
killed. Written by the holder of the lock alone.
"""

import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from chaosrun import errors
from chaosrun.errors import ChaosrunError, InterruptedRunError, UsageError
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.records.run_file import read_object

VERSION = 1
RUN = "{run}"
"""In a hint: the run, named in the way that it is found from wherever the hint is read."""
_KINDS: Mapping[str, type | tuple[type, ...]] = {
    "pid": int,
    "began_s": (int, float),
    "ended_s": (int, float, type(None)),
    "error": (dict, type(None)),
    "warnings": list,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Supervision:
    pid: int
    began_s: float
    ended_s: float | None
    """None while it lasts, and for good when the process was killed."""
    error: ChaosrunError | None
    """What it ended with; None when it came to a verdict."""
    warnings: tuple[str, ...]
    """What there is to say beside the verdict: reports that could not be written."""


def read_supervision(run: RunLayout) -> Supervision | None:
    """None for a run that nobody ever supervised. Raises UsageError when the file is damaged."""
    if not run.supervisor_json.exists():
        return None
    found = read_object(run.supervisor_json)
    for key, kind in _KINDS.items():
        if key not in found or not isinstance(found[key], kind):
            raise UsageError(f"{run.supervisor_json}: {key} is {found.get(key)!r:.60}", hint="the run is damaged")
    error = None if found["error"] is None else raised_again(found["error"], run)
    return Supervision(
        pid=found["pid"],
        began_s=found["began_s"],
        ended_s=found["ended_s"],
        error=error,
        warnings=tuple(map(str, found["warnings"])),
    )


@contextmanager
def supervision(run: RunLayout) -> Iterator[list[str]]:
    """Write down that this process supervises the run, and at the end how that ended, with the warnings put into the list."""
    warnings: list[str] = []
    facts = {"v": VERSION, "pid": os.getpid(), "began_s": time.time(), "ended_s": None, "error": None, "warnings": warnings}
    _write(run, facts)
    try:
        yield warnings
    except BaseException as error:
        # A full disk, perhaps the very error: it is worth more than the record of it.
        with suppress(OSError):
            _write(run, {**facts, "ended_s": time.time(), "error": described(error, run)})
        raise
    with suppress(OSError):  # the verdict is there, and says all
        _write(run, {**facts, "ended_s": time.time()})


def described(error: BaseException, run: RunLayout) -> dict[str, Any]:
    """An error as JSON values; what is none of ours is a bug, or an interrupt that has not been given its words yet."""
    if isinstance(error, KeyboardInterrupt):
        error = InterruptedRunError("interrupted", hint=f"`chaosrun resume {run_argument(run)}` goes on with the run")
    if not isinstance(error, ChaosrunError):
        error = ChaosrunError(
            f"this is a bug in chaosrun: {type(error).__name__}: {error}",
            hint=f"please report it; where the run was followed by nobody, the traceback is in {run.supervisor_log}",
        )
    hint = None if error.hint is None else error.hint.replace(run_argument(run), RUN)
    return {"kind": type(error).__name__, "message": error.message, "hint": hint, "exit_code": error.exit_code}


def raised_again(about: Mapping[str, Any], run: RunLayout) -> ChaosrunError:
    """The error that `described` made values of."""
    kind = getattr(errors, str(about.get("kind")), None)
    of = kind if isinstance(kind, type) and issubclass(kind, ChaosrunError) else ChaosrunError
    hint = about.get("hint")
    return of(str(about.get("message")), hint=None if hint is None else str(hint).replace(RUN, run_argument(run)))


def _write(run: RunLayout, facts: Mapping[str, Any]) -> None:
    write_durably(run.supervisor_json, json.dumps(facts, indent=1).encode())
