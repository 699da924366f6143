"""What a leg is doing, told by its journal and traces so far: the fold, and one sentence an event.

Shared by the live line and `chaosrun status`. It reads what workers and supervisor wrote and must not know how they work.
"""

import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from chaosrun.faults.observed import signal_name
from chaosrun.records.layout import LegLayout
from chaosrun.records.trace import TornRecordError, read_lines
from chaosrun.wording import count

TAIL_BYTES = 1 << 16
LARGEST = sys.float_info.max
ENDED_BY_DEATH = ("user_error", "recovery_failed")
"""Outcomes of a leg whose last attempt's unplanned death says why. Of an inexact restore the verdict says more than it."""
_TYPES: dict[str, Any] = {
    "time_s": int | float,
    "event": str,
    "workers": int,
    "supervisor_pid": int,
    "attempt": int,
    "resume": str | None,
    "resume_step": int,
    "fault": str,
    "rank": int | None,
    "step": int | None,
    "phase": str | None,
    "reason": str | None,
    "outcome": str | None,
    "message": str | None,
    "hint": str | None,
    "final_step": int | None,
    "died_s": int | float | None,
    "requested_s": (int, float, type(None)),
    "killed": list,
    "exit_code": int | None,
    "signal": int | None,
}
"""Keys of the journal's records and what they hold, in whichever event."""
_LANDING = ("fault", "attempt", "rank", "pid", "how", "signal", "exit_code")


@dataclass(frozen=True, slots=True, kw_only=True)
class Landing:
    """A fault that was seen to happen."""

    fault: str
    attempt: int
    rank: int
    pid: int
    how: str
    signal: int | None
    exit_code: int | None
    state: str | None = None
    """Of one that hung: the state in which its process was found, a letter."""


_EVIDENCE = {
    "note": "seen before and after",
    "hang": "stopped first",
    "node": "gone with its node",
    "successor": "seen by the next supervisor",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class UnplannedDeath:
    attempt: int
    rank: int | None
    step: int | None
    reason: str
    error: str | None
    """What was raised."""
    traceback: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LegProgress:
    """One leg as of its last journal record."""

    leg: str
    workers: int | None = None
    supervisor_pid: int | None = None
    attempt: int = 0
    """0 before the first one."""
    resumed_from: str | None = None
    resumed_step: int = 0
    landed: tuple[Landing, ...] = ()
    unplanned: tuple[UnplannedDeath, ...] = ()
    quarantined: int = 0
    outcome: str | None = None
    message: str | None = None
    hint: str | None = None
    final_step: int | None = None
    last: str = ""
    last_s: float = 0.0
    damage: str | None = None
    """Why the journal could not be read to its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeen:
    """The newest step that a trace file shows."""

    step: int
    time_s: float


def advance(progress: LegProgress, record: dict[str, Any]) -> LegProgress:
    """The leg's progress after one more journal record. Unknown events only change what happened last.

    Raises KeyError when a known event lacks what the journal's schema promises.
    """
    changes: dict[str, Any] = {"last": sentence(record), "last_s": float(record.get("time_s", progress.last_s))}
    match record.get("event"):
        case "leg.started":
            changes |= {"workers": record.get("workers"), "supervisor_pid": record.get("supervisor_pid")}
        case "supervisor.resumed":
            # The leg goes on: what an earlier supervisor wrote as its end no longer holds.
            changes |= {"supervisor_pid": record.get("supervisor_pid"), "outcome": None, "message": None, "hint": None}
        case "attempt.starting":
            changes |= {"attempt": record["attempt"], "resumed_from": record["resume"], "resumed_step": record["resume_step"]}
        case "fault.observed" if (record.get("found") or {}).get("problem"):
            pass  # looked at, and not found to have happened
        case "fault.observed" if all(landing.fault != record["fault"] for landing in progress.landed):
            state = (record.get("found") or {}).get("state") if record.get("how") == "hang" else None
            landing = Landing(**{key: record[key] for key in _LANDING}, state=state)
            changes["landed"] = (*progress.landed, landing)
        case "death.unplanned":
            error = record.get("error") or {}
            said = {key: record[key] for key in ("attempt", "rank", "step", "reason")}
            raised = ": ".join(str(error[key]) for key in ("type", "message") if error.get(key)) or None
            death = UnplannedDeath(**said, error=raised, traceback=error.get("traceback"))
            changes["unplanned"] = (*progress.unplanned, death)
        case "checkpoint.quarantined":
            changes["quarantined"] = progress.quarantined + 1
        case "leg.finished":
            changes |= {key: record.get(key) for key in ("outcome", "message", "hint", "final_step")}
        case _:
            pass
    return replace(progress, **changes)


def read_progress(leg: str, layout: LegLayout) -> LegProgress:
    """The progress that a leg's journal shows up to its end, or to the first damaged line; nothing yet without a journal."""
    progress = LegProgress(leg=leg)
    if not layout.journal.exists():
        return progress
    try:
        for record in read_lines(layout.journal):
            progress = advance(progress, sound(record))
    except TornRecordError as error:
        return replace(progress, damage=str(error))
    except KeyError as error:
        return replace(progress, damage=f"{layout.journal}: a record lacks {error}")
    except (AttributeError, TypeError, ValueError) as error:
        # One that holds other types than the journal's schema promises.
        damage = f"{layout.journal}: a record is not what it should be ({type(error).__name__}: {error})"
        return replace(progress, damage=damage)
    return progress


def sound(record: dict[str, Any]) -> dict[str, Any]:
    """Raises TypeError for a record whose values are not of the types that are made something of, or no finite floats."""
    for key, kind in _TYPES.items():
        value = record.get(key)
        if key in record and (not isinstance(value, kind) or (isinstance(value, int | float) and not abs(value) <= LARGEST)):
            raise TypeError(f"{key} is {value!r:.60}")
    return record


def sentence(record: dict[str, Any]) -> str:
    """One journal record as a clause for people, without the leg's name."""

    def get(key: str) -> Any:
        return record.get(key)

    match record.get("event"):
        case "run.created":
            return f"created in {get('path')}"
        case "control.failed":
            return f"{get('message')}: the run cannot be cancelled or struck from elsewhere"
        case "reference.cached":
            return "taken from the cache: this job has been run undisturbed before"
        case "reference.replaced":
            return f"the one in the cache differs from a run made now ({get('difference')}): replaced"
        case "reference.uncached":
            return f"not kept in the cache for other drills: {get('message')}"
        case "leg.started":
            return f"started, {count(get('workers'), 'worker')}"
        case "supervisor.resumed":
            return f"a new supervisor took over (pid {get('supervisor_pid')})"
        case "placement.acquired":
            return _placed(record)
        case "staging.cleared":
            return f"cleared away what was left half-written: {', '.join(get('names') or [])}"
        case "checkpoint.quarantined":
            return f"checkpoint {get('name')} quarantined: {get('reason')}"
        case "attempt.starting":
            how = ", with TORCH_DISTRIBUTED_DEBUG=DETAIL" if get("distributed_debug") else ""
            return f"attempt {get('attempt')} starts from {get('resume') or 'the beginning'}{how}"
        case "attempt.started":
            return f"attempt {get('attempt')} runs, {count(len(get('pids') or {}), 'process', 'processes')}"
        case "worker.exited":
            return f"attempt {get('attempt')}: rank {get('rank')} {_end_of_worker(record)}"
        case "fault.requested":
            return f"{get('fault')} fired: rank {get('rank')}, {_where(record)}"
        case "fault.observed":
            what = _EVIDENCE.get(str(get("how")), _end_of_worker(record))
            if problem := (get("found") or {}).get("problem"):
                return f"{get('fault')} did not happen as planned: {problem}"
            return f"{get('fault')} landed: rank {get('rank')} {what} (pid {get('pid')})"
        case "fault.injected":
            return f"{get('fault')} injected: {get('what')}"
        case "fault.withdrawn":
            return f"{get('fault')} has not struck ({get('reason')}): it is to strike again"
        case "supervisor.ended":
            return f"{', '.join(get('faults') or [])} ended the supervisor (pid {get('pid')}): another one takes over"
        case "hang.declared":
            return str(get("message"))
        case "death.unplanned":
            return _unplanned(record)
        case "attempt.stopped":
            killed = get("killed") or []
            more = f"; killed {'ranks' if len(killed) > 1 else 'rank'} {', '.join(map(str, killed))}" if killed else ""
            reason = f": {get('reason')}" if get("reason") else ""
            return f"attempt {get('attempt')} stopped{reason}{more}"
        case "leg.finished":
            return _end_of_leg(record)
        case other:
            return str(other)


def _placed(record: Mapping[str, Any]) -> str:
    nodes = record.get("nodes") or {}
    ranks = sum(len(entry["ranks"]) for entry in nodes.values())
    more = "; oversubscribed: more workers than cores" if record.get("oversubscribed") else ""
    return f"{count(ranks, 'rank')} placed on {count(len(nodes), 'node')}{more}"


def _unplanned(record: Mapping[str, Any]) -> str:
    rank, step, error = (record.get(key) for key in ("rank", "step", "error"))
    cause = _first_line(f"{error.get('type')}: {error.get('message')}") if error else record.get("reason")
    who = "attempt failed" if rank is None else f"unplanned death of rank {rank}"
    return f"{who}{'' if step is None else f' at step {step}'}: {cause}"


def _end_of_leg(record: Mapping[str, Any]) -> str:
    outcome, message = str(record.get("outcome")).replace("_", " "), record.get("message")
    # What the newest checkpoint has: where a leg ended that did not complete is not known to the journal.
    newest, saved = record.get("final_step"), " at step" if outcome == "completed" else ", saved up to step"
    needless = not message or outcome in ("completed", message)
    return f"{outcome}{f'{saved} {newest}' if newest else ''}" + ("" if needless else f": {_first_line(str(message))}")


def last_step(trace: Path) -> StepSeen | None:
    """The newest `step` line of a trace file, read from its end; None when there is no file or no step in it yet.

    A torn last line is left out. Raises TornRecordError for any other line that is not a JSON object, OSError when the file
    exists and cannot be read.
    """
    for record in _lines_from_the_end(trace):
        if record.get("kind") == "step":
            return StepSeen(step=int(record["step"]), time_s=float(record["time_s"]))
    return None


def _where(record: dict[str, Any]) -> str:
    step, phase = record.get("step"), record.get("phase")
    at = "" if step is None else f"step {step}"
    return ", ".join(part for part in (at, "" if phase == "step" else str(phase or "from outside")) if part)


def _end_of_worker(record: dict[str, Any]) -> str:
    if record.get("signal"):
        return f"died of {signal_name(record['signal'])}"
    code = record.get("exit_code")
    if code is None:
        return "was lost with its node's fork server"
    return "ended" if code == 0 else f"exited with code {code}"


def _first_line(text: str) -> str:
    lines: Iterable[str] = text.strip().splitlines()
    return next(iter(lines), "")


def _lines_from_the_end(path: Path) -> Iterator[dict[str, Any]]:
    """JSON objects of a JSON-lines file, newest first, reading no more of it than the caller asks for."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        end = file.seek(0, os.SEEK_END)
        carried = b""
        torn = True
        while end > 0:
            start = max(0, end - TAIL_BYTES)
            file.seek(start)
            block = file.read(end - start) + carried
            end, carried = start, b""
            if torn:
                whole = block.rfind(b"\n")
                if whole < 0:
                    continue
                block, torn = block[:whole], False
            lines = block.split(b"\n")
            if start:
                # The first piece may begin before this block.
                carried = lines.pop(0)
            for line in reversed(lines):
                yield _object(path, line)


def _object(path: Path, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TornRecordError(f"{path}: not a JSON record ({error})") from error
    if not isinstance(record, dict):
        raise TornRecordError(f"{path}: not a JSON object")
    return record
