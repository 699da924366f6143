"""Events of a journal for tests: what a test says nothing about is filled in."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from chaosrun.records.events import JournalEvent
from chaosrun.records.heartbeat import Heartbeat
from chaosrun.records.history import LegHistory, history_of
from chaosrun.records.layout import LegLayout
from chaosrun.records.traces import Block, Position, RankTrace, StartRecord, StepRecord
from chaosrun.report.picture import LegPicture, fired, lanes_of

_KINDS: dict[str, Any] = {str(kind.__struct_config__.tag): kind for kind in get_args(JournalEvent)}
_FILLED: dict[str, Any] = {
    **dict.fromkeys(("message", "reason", "what", "why"), ""),
    **dict.fromkeys(("first", "last", "rank", "resume_step", "states", "steps"), 0),
    **dict.fromkeys(("attempt", "pid", "supervisor_pid"), 1),
    **dict.fromkeys(("exit_code", "phase", "resume", "signal", "step"), None),
    **dict.fromkeys(("armed", "names", "ranks"), ()),
    **{"fault": "F1", "how": "death", "leg": "chaos", "name": "step-00000001", "outcome": "completed", "quantity": "rng"},
    **{"died_s": 0.0, "nodes": {}, "pids": {}, "unsynced": "lost", "workers": 2},
}

_OWN: dict[str, dict[str, Any]] = {"recovery.diverged": {"step": 1, "code": "rng_not_restored"}}


def event(event: str, **fields: Any) -> Any:
    """Its values are not checked before they are read back."""
    kind = _KINDS[event]
    fields = {**_OWN.get(event, {}), **fields}
    return kind(**{**{name: _FILLED[name] for name in kind.__struct_fields__ if name in _FILLED}, **fields})


def journal(*records: dict[str, Any]) -> list[JournalEvent]:
    return [event(**{"seq": number, "time_s": 1.0, **record}) for number, record in enumerate(records, start=1)]


def history(*records: dict[str, Any]) -> LegHistory:
    """Of a chaos leg whose files are nowhere."""
    return history_of(LegLayout(Path("/nowhere/chaos")), journal(*records), None, [])


def steps_of(records: Sequence[StepRecord]) -> dict[str, Any]:
    """In no file."""
    blocks = [Block(records[0].step, len(records), 0, 0, (), False, b"", b"")] if records else []
    return {"blocks": tuple(blocks), "read": lambda _, count: records[:count]}


def trace(attempt: int, rank: int, steps: range, *, began_s: float = 10.0, step_s: float = 0.5) -> RankTrace:
    """Of a rank that went on from the step before these."""
    position = Position(epoch=0, batches=0, step=steps.start - 1)
    about = {"attempt": attempt, "rank": rank, "world_size": 2, "pid": 1, "time_s": began_s, "restored": None, "rng": "r"}
    words: dict[str, Any] = {"epoch": 0, "batches": 1, "ids": None, "batch": ("b",), "rng": "r", "loss": (), "lr": ()}
    words |= {"grad": "", "grads": b"", "param": "p", "params": bytes(4), "attempt": attempt, "rank": rank}
    start = StartRecord(v=3, **about, position=position, param="p", params=bytes(4), tensors=("w",))  # pyright: ignore[reportArgumentType]
    done = tuple(StepRecord(step=step, time_s=began_s + step * step_s, **words) for step in steps)
    return RankTrace(attempt=attempt, rank=rank, start=start, **steps_of(done))


def leg_picture(
    records: Sequence[dict[str, Any]], *traces: RankTrace, beats: Mapping[int, Heartbeat] | None = None, **about: Any
) -> LegPicture:
    """What these files come to."""
    known = history(*records)
    attempts = (
        replace(attempt, traces={each.rank: each for each in traces if each.attempt == attempt.number})
        for attempt in known.attempts
    )
    whole = replace(known, attempts=tuple(attempts))
    seen = {"faults": fired(whole.journal), "name": "chaos", **about}
    return LegPicture(history=whole, lanes=lanes_of(whole, beats or {}), **seen)
