"""What a leg wrote down, read back as typed values: its journal, its attempts with their traces, its environment.

Reading never fails on content: whatever is damaged, missing or contradictory lands in `LegHistory.problems`, and a leg with
problems is never judged to be exact. Knows the record schemas (chaosrun.records), not what any value should have been.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaosrun.errors import RecoveryError
from chaosrun.records.journal import JOURNAL_VERSION, OUTCOMES, Outcome
from chaosrun.records.layout import LegLayout
from chaosrun.records.traces import EndRecord, RankTrace, read_trace, whole_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The death of one process, from `worker.exited`."""

    rank: int
    pid: int
    exit_code: int | None
    signal: int | None
    died_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One incarnation: what the journal says of it, and the traces its ranks left."""

    number: int
    resume: str | None
    resume_step: int
    pids: Mapping[int, int]
    exits: tuple[Exit, ...]
    unplanned: tuple[Mapping[str, Any], ...]
    stopped: str | None
    """Reason of `attempt.stopped`."""
    quarantined: tuple[str, ...]
    """Checkpoints set aside between the attempt before this one and this one."""
    traces: Mapping[int, RankTrace]

    def start_of(self, rank: int) -> int:
        """Step this rank went on from: what it says itself, else what the journal ordered."""
        trace = self.traces.get(rank)
        return trace.start.position.step if trace and trace.start else self.resume_step


@dataclass(frozen=True, slots=True, kw_only=True)
class LegHistory:
    name: str
    layout: LegLayout
    journal: tuple[Mapping[str, Any], ...] = ()
    attempts: tuple[Attempt, ...] = ()
    environment: Mapping[str, Any] | None = None
    problems: tuple[str, ...] = ()

    @property
    def finished(self) -> Mapping[str, Any] | None:
        """The `leg.finished` that closes the journal; None while the leg runs, or went on after one (`chaosrun resume`)."""
        if not self.journal or self.journal[-1]["event"] != "leg.finished":
            return None
        return self.journal[-1]

    @property
    def outcome(self) -> Outcome | None:
        return self.finished["outcome"] if self.finished else None

    @property
    def ends(self) -> Mapping[int, EndRecord]:
        """`end` records of the last attempt by rank."""
        return {rank: trace.end for rank, trace in self.attempts[-1].traces.items() if trace.end} if self.attempts else {}

    def events(self, name: str) -> tuple[Mapping[str, Any], ...]:
        return tuple(record for record in self.journal if record["event"] == name)

    def trace(self, attempt: int, rank: int) -> RankTrace | None:
        for entry in self.attempts:
            if entry.number == attempt:
                return entry.traces.get(rank)
        return None


def read_leg(layout: LegLayout) -> LegHistory:
    """Read everything a leg left under `layout`. Raises OSError only when a file that exists cannot be read."""
    problems: list[str] = []
    journal = _read_journal(layout.journal, problems)
    return LegHistory(
        name=layout.path.name,
        layout=layout,
        journal=journal,
        attempts=_attempts(layout, journal, problems),
        environment=_read_environment(layout.environment, problems),
        problems=tuple(problems),
    )


_JOURNAL_KEYS: Mapping[str, Mapping[str, type | tuple[type, ...]]] = {
    "attempt.starting": {"attempt": int, "resume": (str, type(None)), "resume_step": int, "armed": list},
    "attempt.started": {"attempt": int, "pids": dict},
    "worker.exited": {
        "attempt": int,
        "rank": int,
        "pid": int,
        "exit_code": (int, type(None)),
        "signal": (int, type(None)),
        "died_s": (int, float),
    },
    "fault.injected": {"fault": str},
    "fault.requested": {
        "fault": str,
        "attempt": int,
        "rank": int,
        "step": (int, type(None)),
        "phase": (str, type(None)),
    },
    "fault.observed": {
        "fault": str,
        "attempt": int,
        "rank": int,
        "pid": int,
        "how": str,
        "exit_code": (int, type(None)),
        "signal": (int, type(None)),
    },
    "fault.withdrawn": {"fault": str, "reason": str},
    "hang.declared": {"attempt": int, "first": int, "ranks": list},
    "death.unplanned": {"attempt": int, "rank": (int, type(None)), "reason": str},
    "attempt.stopped": {"attempt": int, "reason": str},
    "staging.cleared": {"names": list},
    "checkpoint.quarantined": {"name": str, "reason": str},
    "leg.finished": {"outcome": str, "message": (str, type(None))},
}
"""What the checks read of each event. Other events are kept unread."""


MOST_ATTEMPTS = 10**9


def journal_records(path: Path) -> list[Mapping[str, Any]]:
    """The records of a journal that is to be gone on with. Raises RecoveryError when it is damaged."""
    problems: list[str] = []
    records = list(_read_journal(path, problems))
    if problems:
        hint = "submit the job again; this run cannot be gone on with"
        raise RecoveryError(f"the journal is damaged: {problems[0]}", hint=hint)
    return records


def _read_journal(path: Path, problems: list[str]) -> tuple[Mapping[str, Any], ...]:
    journal: list[Mapping[str, Any]] = []
    for number, record in enumerate(whole_lines(path, problems), start=1):
        complaint = _journal_complaint(number, record)
        if complaint:
            problems.append(f"{path}:{number}: {complaint}")
        else:
            journal.append(record)
    return tuple(journal)


def _journal_complaint(number: int, record: Mapping[str, Any]) -> str | None:
    if record.get("v") != JOURNAL_VERSION:
        return f"journal version {record.get('v')!r}, this chaosrun reads {JOURNAL_VERSION}"
    if record.get("seq") != number:
        return f"seq is {record.get('seq')!r} where {number} follows: a record is missing"
    if not isinstance(record.get("event"), str) or not isinstance(record.get("time_s"), int | float):
        return "no event or no time_s"
    for key, kind in _JOURNAL_KEYS.get(record["event"], {}).items():
        if key not in record or not isinstance(record[key], kind):
            return f"{record['event']}: {key} is {record.get(key)!r}"
    if record["event"] == "attempt.started" and not all(
        rank.isascii() and rank.isdecimal() and isinstance(pid, int) for rank, pid in record["pids"].items()
    ):
        return f"attempt.started: pids is {record['pids']!r}"
    if "attempt" in record and not (type(record["attempt"]) is int and 0 < record["attempt"] < MOST_ATTEMPTS):
        return f"{record['event']}: attempt is {record['attempt']!r:.40}"
    if record["event"] == "fault.observed" and not _is_sighting(record.get("found")):
        return f"fault.observed: found is {record['found']!r:.200}"
    if record["event"] == "attempt.starting" and not all(isinstance(fault, str) for fault in record["armed"]):
        return f"attempt.starting: armed is {record['armed']!r}"
    if record["event"] == "leg.finished" and record["outcome"] not in OUTCOMES:
        return f"unknown outcome {record['outcome']!r}"
    return None


def _is_sighting(found: Any) -> bool:
    """What its parts say is looked at by those who ask for them, see `plan.evidence`."""
    if not isinstance(found, dict | None):
        return False
    end, note = (found or {}).get("end"), (found or {}).get("note")
    whole = end is None or (isinstance(end, dict) and "status" in end and isinstance(end.get("error", 0), str | None))
    return whole and isinstance(note, dict | None)


def _read_environment(path: Path, problems: list[str]) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        problems.append(f"{path}: not JSON ({error})")
        return None
    if not isinstance(value, dict):
        problems.append(f"{path}: not a JSON object")
        return None
    return value


def _attempts(layout: LegLayout, journal: Iterable[Mapping[str, Any]], problems: list[str]) -> tuple[Attempt, ...]:
    records = list(journal)
    starting = [record for record in records if record["event"] == "attempt.starting"]
    numbers = [record["attempt"] for record in starting]
    if numbers != sorted(set(numbers)):
        problems.append(f"attempts start in the order {numbers}")
    by_attempt: dict[int, list[Mapping[str, Any]]] = {}
    for record in records:
        if "attempt" in record:
            by_attempt.setdefault(record["attempt"], []).append(record)
    for number in sorted({*layout.attempts(), *by_attempt} - set(numbers)):
        problems.append(f"attempt {number} left records, but the journal never started it")
    quarantines = [record for record in records if record["event"] == "checkpoint.quarantined"]
    found: list[Attempt] = []
    since = 0
    for record in starting:
        own = by_attempt[record["attempt"]]
        found.append(
            Attempt(
                number=record["attempt"],
                resume=record["resume"],
                resume_step=record["resume_step"],
                pids={
                    int(rank): pid
                    for entry in own
                    if entry["event"] == "attempt.started"
                    for rank, pid in entry["pids"].items()
                },
                exits=tuple(_exit(entry) for entry in own if entry["event"] == "worker.exited"),
                unplanned=tuple(entry for entry in own if entry["event"] == "death.unplanned"),
                stopped=next((entry["reason"] for entry in own if entry["event"] == "attempt.stopped"), None),
                quarantined=tuple(entry["name"] for entry in quarantines if since < entry["seq"] < record["seq"]),
                traces=_read_traces(layout, record["attempt"], problems),
            )
        )
        since = record["seq"]
        problems.extend(_strange_processes(found[-1]))
    return tuple(found)


def _strange_processes(attempt: Attempt) -> Iterator[str]:
    for rank, trace in attempt.traces.items():
        started = attempt.pids.get(rank)
        if trace.start and started is not None and trace.start.pid != started:
            yield f"attempt {attempt.number} rank {rank} was process {started}, its trace is of process {trace.start.pid}"


def _exit(record: Mapping[str, Any]) -> Exit:
    return Exit(
        rank=record["rank"],
        pid=record["pid"],
        exit_code=record.get("exit_code"),
        signal=record.get("signal"),
        died_s=record["died_s"],
    )


def _read_traces(layout: LegLayout, attempt: int, problems: list[str]) -> Mapping[int, RankTrace]:
    traces: dict[int, RankTrace] = {}
    for path in sorted(layout.attempt(attempt).path.glob("rank-*.trace.jsonl")):
        rank_text = path.name.removeprefix("rank-").removesuffix(".trace.jsonl")
        if not (rank_text.isascii() and rank_text.isdecimal()):
            problems.append(f"{path}: not the name of a trace")
            continue
        traces[int(rank_text)] = read_trace(path, attempt, int(rank_text), problems)
    return traces
