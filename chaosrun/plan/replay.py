"""Recorded preemption traces: parses the times of node losses, and turns them into faults. Pure.

    bamboo    CSV without a header; per line: time since the beginning (seconds, or hours), number of live nodes
    parcae    a JSON list a line: [milliseconds, "add" | "remove" | …, {"nodes": [names]}]
    skypilot  one JSON object: {"metadata": {"gap_seconds": s}, "data": [number of live nodes, …]}

A loss is a drop in the number of live nodes, or nodes that are removed by name. The return of nodes is not replayed: the job
resumes with as many workers as before, as soon as it can.
"""

import json
import math
import random
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault
from chaosrun.plan.sampling import distinct
from chaosrun.spec.faults import ReplaySpec
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import LINE_BREAK, Place, SourceText, refusal

SHORTEST_S = 0.001
"""Faults come in steps of one millisecond."""
MOST_NODES = 10**9
_TIME = re.compile(r"\d{1,18}(\.\d*)?([eE][+-]?\d{1,3})?")
_NODES = re.compile(r"\d{1,9}")
_ITEM = re.compile(r"[^\s,\]]+")
_UNIT_S = {"seconds": 1.0, "hours": 3600.0}
_PARCAE_EVENTS = ("add", "remove", "no-op", "migration")


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    time_s: float
    """Time since the beginning of the recording."""
    count: int
    nodes: tuple[int, ...] | None = None
    """The lost nodes, numbered in the order of their first mention; None if the recording has no names."""
    line: int
    """Line of the file, from 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    losses: tuple[Loss, ...]
    length_s: float


def replayed(spec: JobSpec, entry: ReplaySpec, trace: SourceText) -> list[Fault]:
    """A fault for each loss within the window, at its own time over `compress`. A named node always stands for the same rank
    (its number modulo the workers), others for ranks drawn by `faults.seed`. Raises SpecError for a wrong line of the trace,
    UsageError when nothing is lost in the window."""
    recording = read_recording(trace, entry.format, entry.unit)
    chance = random.Random(spec.faults.seed)
    start_s, until_s = entry.start or 0.0, math.inf if entry.until is None else entry.until
    faults: list[Fault] = []
    for loss in recording.losses:
        if not start_s <= loss.time_s < until_s:
            continue
        if loss.nodes is None:
            ranks = distinct(min(loss.count, spec.workers), spec.workers, chance)
        else:
            ranks = sorted({node % spec.workers for node in loss.nodes})
        after_s = max(SHORTEST_S, round((loss.time_s - start_s) / entry.compress, 3))
        source = f"faults.replay, line {loss.line}"
        faults += (
            Fault(id="", kind=entry.strikes, rank=rank, phase=None, after_s=after_s, required=False, source=source)
            for rank in ranks
        )
    if not faults:
        window = (
            ""
            if entry.start is None and entry.until is None
            else f" from {start_s:g} s to {min(until_s, recording.length_s):g} s"
        )
        raise UsageError(
            f"faults.replay: {trace.label} records no loss of a node{window}",
            hint=f"it is {recording.length_s:g} s long and has {len(recording.losses)} losses: change start and until",
        )
    return faults


def detect(text: str) -> str:
    """The format of a text, from its first character."""
    return {"{": "skypilot", "[": "parcae"}.get(text.lstrip()[:1], "bamboo")


def read_recording(trace: SourceText, form: str = "auto", unit: str = "seconds") -> Recording:
    """Parse a trace. Raises SpecError with the place of the first error, UsageError for a unit that the format cannot have."""
    form = detect(trace.text) if form == "auto" else form
    if unit != "seconds" and form != "bamboo":
        raise UsageError(
            f"faults.replay: {trace.label} is written as {form}, which has its own unit of time",
            hint="unit is for bamboo's files: remove it, or name the format",
        )
    levels = list(_READERS[form](trace, _UNIT_S[unit]))
    if not levels:
        raise _wrong(trace, 0, "the trace is empty", "a trace has a line for each change in the number of live nodes")
    losses: list[Loss] = []
    for before, now in pairwise(levels):
        if now.time_s < before.time_s:
            raise _wrong(trace, now.line - 1, f"time goes back, from {before.time_s:g} s to {now.time_s:g} s", "sort the lines")
        if now.removed is None and now.live < before.live:
            losses.append(Loss(time_s=now.time_s, count=before.live - now.live, line=now.line))
        elif now.removed:
            losses.append(Loss(time_s=now.time_s, count=len(now.removed), nodes=now.removed, line=now.line))
    return Recording(losses=tuple(losses), length_s=levels[-1].time_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Level:
    """The number of live nodes from this time on."""

    time_s: float
    live: int
    removed: tuple[int, ...] | None = None
    """Named nodes that were removed at this time; None if nodes have no names."""
    line: int


def _bamboo(trace: SourceText, unit_s: float) -> Iterator[_Level]:
    hint = "a line holds a time and a number of live nodes, such as 21529,4, and there is no header"
    for number, text in enumerate(LINE_BREAK.split(trace.text)):
        if not text.strip():
            continue
        parts = [part.strip() for part in text.split(",")]
        if len(parts) != 2:
            raise _wrong(trace, number, f"{len(parts)} column{'s' * (len(parts) != 1)} where 2 are expected", hint)
        time, live = parts
        if not _TIME.fullmatch(time) or not math.isfinite(float(time) * unit_s):
            raise _wrong(trace, number, f"{_shown(time)} is no time", hint)
        if not _NODES.fullmatch(live):
            raise _wrong(trace, number, f"{_shown(live)} is not a number of nodes", hint)
        yield _Level(time_s=float(time) * unit_s, live=int(live), line=number + 1)


def _parcae(trace: SourceText, _: float) -> Iterator[_Level]:
    hint = 'a line is a list such as [60000, "remove", {"nodes": ["node-3"]}]'
    numbers: dict[str, int] = {}
    alive: set[str] = set()
    for number, text in enumerate(LINE_BREAK.split(trace.text)):
        if not text.strip():
            continue
        event = _json(trace, text, number)
        if not isinstance(event, list) or len(event) != 3 or not isinstance(event[2], dict):
            raise _wrong(trace, number, "not a list of a time, an event and its facts", hint)
        time_ms, what, facts = event
        if not _is_number(time_ms):
            raise _wrong(trace, number, f"{_shown(time_ms)} is no time in milliseconds", hint)
        if what not in _PARCAE_EVENTS:
            raise _wrong(trace, number, f"{_shown(what)} is not an event", f"events are {', '.join(_PARCAE_EVENTS)}")
        names = facts.get("nodes")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise _wrong(trace, number, "its nodes are not a list of names", hint)
        if odd := _odd_names(what, names, alive):
            raise _wrong(trace, number, odd, "each node is added once before it is removed once")
        removed: tuple[int, ...] = ()
        if what == "add":
            alive.update(names)
            for name in names:
                numbers.setdefault(name, len(numbers))
        elif what == "remove":
            alive.difference_update(names)
            removed = tuple(sorted(numbers[name] for name in names))
        yield _Level(time_s=time_ms / 1000, live=len(alive), removed=removed, line=number + 1)


def _odd_names(what: str, names: list[str], alive: set[str]) -> str | None:
    if what in ("add", "remove") and len(set(names)) < len(names):
        return "it names a node twice"
    wrong = sorted(name for name in names if (name in alive) == (what == "add")) if what in ("add", "remove") else []
    if not wrong:
        return None
    return f"{_shown(wrong[0])} is {'added, and is there already' if what == 'add' else 'removed, and is not there'}"


def _skypilot(trace: SourceText, _: float) -> Iterator[_Level]:
    hint = 'the file is an object such as {"metadata": {"gap_seconds": 600}, "data": [4, 4, 3]}'
    whole = _json(trace, trace.text, 0)
    metadata = whole.get("metadata") if isinstance(whole, Mapping) else None
    gap_s = metadata.get("gap_seconds") if isinstance(metadata, Mapping) else None
    if not isinstance(whole, Mapping) or not _is_number(gap_s) or not gap_s:
        raise _wrong(trace, _line_of(trace, "gap_seconds"), "no metadata with gap_seconds, a number greater than 0", hint)
    data = whole.get("data")
    if not isinstance(data, list) or not data:
        raise _wrong(trace, _line_of(trace, "data"), "no data, a list of numbers of live nodes", hint)
    lines = _lines_of_items(trace, len(data))
    for place, live in enumerate(data):
        if type(live) is not int or not 0 <= live <= MOST_NODES:
            raise _wrong(trace, lines[place], f"data[{place}]: {_shown(live)} is not a number of nodes", hint)
        yield _Level(time_s=place * float(gap_s), live=live, line=lines[place] + 1)


_READERS: Mapping[str, Callable[[SourceText, float], Iterator[_Level]]] = {
    "bamboo": _bamboo,
    "parcae": _parcae,
    "skypilot": _skypilot,
}


def _json(trace: SourceText, text: str, first_line: int) -> Any:
    def refuse(constant: str) -> Any:
        raise ValueError(f"{constant} is not a number")

    try:
        return json.loads(text, parse_constant=refuse)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        raise _wrong(
            trace, line, f"not JSON: {error.msg}", "check brackets, quotes and commas", column=error.colno - 1
        ) from error
    except (ValueError, RecursionError) as error:
        reason = "it nests too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
        raise _wrong(trace, first_line, f"not JSON that can be read: {reason}", "check its numbers and brackets") from error


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 10**15


def _line_of(trace: SourceText, key: str) -> int:
    """The line, from 0, of a key of a JSON object; the first line when the key is missing."""
    found = re.search(rf'"{key}"\s*:', trace.text)
    return trace.text.count("\n", 0, found.start()) if found else 0


def _lines_of_items(trace: SourceText, count: int) -> list[int]:
    """The lines, from 0, of the numbers in the list called data. In doubt, a number counts as on the list's own line."""
    begin = re.search(r'"data"\s*:\s*\[', trace.text)
    if begin is None:
        return [0] * count
    breaks = [found.start() for found in re.finditer("\n", trace.text)]
    items = _ITEM.finditer(trace.text, begin.end())
    lines = [bisect_left(breaks, item.start()) for item in islice(items, count)]
    return lines if len(lines) == count else [bisect_left(breaks, begin.end())] * count


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}…"


def _wrong(trace: SourceText, line: int, message: str, hint: str, *, column: int = 0) -> Exception:
    end = column + 1 if column else max(1, len(trace.line(line).rstrip()))
    return refusal(Place(source=trace, line=line, column=column, end=end), message, hint)
