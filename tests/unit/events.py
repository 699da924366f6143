"""Events of a journal for tests: what a test says nothing about is filled in."""

from pathlib import Path
from typing import Any, get_args

from chaosrun.records.events import JournalEvent
from chaosrun.records.history import LegHistory, history_of
from chaosrun.records.layout import LegLayout

_KINDS: dict[str, Any] = {str(kind.__struct_config__.tag): kind for kind in get_args(JournalEvent)}
_FILLED: dict[str, Any] = {
    "armed": (),
    "attempt": 1,
    "died_s": 0.0,
    "exit_code": None,
    "fault": "F1",
    "first": 0,
    "how": "death",
    "leg": "chaos",
    "message": "",
    "name": "step-00000001",
    "names": (),
    "nodes": {},
    "outcome": "completed",
    "phase": None,
    "pid": 1,
    "pids": {},
    "rank": 0,
    "ranks": (),
    "reason": "",
    "resume": None,
    "resume_step": 0,
    "signal": None,
    "step": None,
    "supervisor_pid": 1,
    "unsynced": "lost",
    "workers": 2,
}


def event(event: str, **fields: Any) -> Any:
    """Its values are not checked before they are read back."""
    kind = _KINDS[event]
    return kind(**{**{name: _FILLED[name] for name in kind.__struct_fields__ if name in _FILLED}, **fields})


def journal(*records: dict[str, Any]) -> list[JournalEvent]:
    return [event(**{"seq": number, "time_s": 1.0, **record}) for number, record in enumerate(records, start=1)]


def history(*records: dict[str, Any]) -> LegHistory:
    """Of a chaos leg whose files are nowhere."""
    return history_of(LegLayout(Path("/nowhere/chaos")), journal(*records), None, [])
