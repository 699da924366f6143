"""Traces, read back as typed values: the lines of one rank in one attempt.

Reading never fails on content: a file is parsed up to its first bad line, and that line becomes a problem. Knows the trace's
schema (chaosrun.records.trace), not what any value should have been.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

from chaosrun.records.layout import checkpoint_step
from chaosrun.records.tail import Tail
from chaosrun.records.trace import TRACE_VERSION, TornRecordError, read_lines

WORD_BYTES = 4
ENDS_BYTES = 1 << 16


def _words(value: Any) -> bytes:
    """base64 of little-endian uint32, one a tensor; kept as bytes, a long run has millions of them."""
    if not isinstance(value, str):
        raise ValueError("expected base64 text")
    try:
        raw = base64.b64decode(value, validate=True)
    except binascii.Error as error:
        raise ValueError(f"not base64 ({error})") from error
    if len(raw) % WORD_BYTES:
        raise ValueError(f"{len(raw)} bytes are no whole number of 32-bit words")
    return raw


def _hex_float(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("expected float.hex() text")
    float.fromhex(value)
    return value


Digest = Annotated[str, Field(min_length=1)]
Digests = Mapping[str, Mapping[str, Digest]]
"""By component and by name inside it."""
Words = Annotated[bytes, BeforeValidator(_words)]
HexFloat = Annotated[str, BeforeValidator(_hex_float)]
Count = Annotated[int, Field(ge=0)]
Ids = tuple[Any, ...] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    epoch: Count
    batches: Count
    step: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRecord:
    v: Literal[1]
    attempt: Count
    rank: Count
    world_size: Annotated[int, Field(ge=1)]
    pid: int
    time_s: float
    position: Position
    restored: str | None
    rng: Digest
    param: Digest
    params: Words
    tensors: tuple[str, ...]
    canary: Digest | None = None
    """None in a trace of a version without canaries."""
    entered_s: float | None = None
    """When the rank had built its training and turned to its checkpoint; None in a trace of a version that did not note it."""
    digests: Digests | None = None
    """Of the state that was restored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRecord:
    """What rank 0 found out about its loader's samples; see chaosrun.observe.probe."""

    items: Literal["independent", "global_rng", "draws", "never_repeats", "unknown"]
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRecord:
    """What the script's samplers and dataset held when an epoch, or the rest of one, was opened."""

    epoch: Count
    own: str | None
    held: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderWorkersRecord:
    epoch: Count
    workers: tuple[Mapping[str, Digest] | None, ...]
    """By worker, a digest of where each stream stands when it begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketsRecord:
    step: Count
    layout: tuple[tuple[int, ...], ...] | None
    primed: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    attempt: Count
    rank: Count
    step: Annotated[int, Field(ge=1)]
    epoch: Count
    batches: Count
    time_s: float
    ids: tuple[Ids, ...] | None
    batch: Annotated[tuple[Digest, ...], Field(min_length=1)]
    rng: Digest
    loss: tuple[HexFloat, ...]
    """Of each micro-batch; empty for a step whose batch the script left out."""
    lr: tuple[HexFloat, ...]
    grad: str
    grads: Words
    """lr, grad and grads are empty for a step in which no optimizer was stepped, and only then."""
    param: Digest
    params: Words
    items: Annotated[int, Field(ge=1)] | None = None
    """Items of the step's window over all ranks; None where losses are means and nothing was counted."""

    @property
    def knows_ids(self) -> bool:
        """The loader told the sample ids of every micro-batch."""
        return self.ids is not None and None not in self.ids and len(self.ids) == len(self.batch)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRecord:
    step: Count
    name: str
    time_s: float
    duration_s: float
    digests: Digests | None = None
    changed: Mapping[str, str] = field(default_factory=dict)
    """What the save itself changed of the live state, by component ("mode": of its modules, which no checkpoint holds)."""
    hooks: tuple[str, ...] = ()
    """Of a save that changed something: the script's hooks."""

    @property
    def effect(self) -> str:
        """ "model 0.bias and 3 more (hooks: rounding)"."""
        hooks = f" (hooks: {', '.join(self.hooks)})" if self.hooks else ""
        return ", ".join(f"{component} {names}" for component, names in self.changed.items()) + hooks


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRecord:
    step: Count
    position: Position
    time_s: float
    digests: Digests
    checkpoint: str | None
    outside: tuple[str, ...] = ()
    """What the training changed and nobody saves; of rank 0 of an undisturbed leg."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankTrace:
    """One trace file. `start` is None when the rank died before it wrote its first line."""

    attempt: int
    rank: int
    start: StartRecord | None = None
    probe: ProbeRecord | None = None
    sources: tuple[SourceRecord, ...] = ()
    loader_workers: tuple[LoaderWorkersRecord, ...] = ()
    buckets: tuple[BucketsRecord, ...] = ()
    steps: tuple[StepRecord, ...] = ()
    checkpoints: tuple[CheckpointRecord, ...] = ()
    end: EndRecord | None = None

    def tensor(self, index: int) -> str | None:
        """Name of the tensor at `index` of `params` and `grads`."""
        return self.start.tensors[index] if self.start and index < len(self.start.tensors) else None


def whole_lines(path: Path, problems: list[str]) -> list[Mapping[str, Any]]:
    """All whole records before the first damaged one."""
    records: list[Mapping[str, Any]] = []
    try:
        records.extend(read_lines(path))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except TornRecordError as error:
        problems.append(str(error))
        records = _before_damage(path)
    return records


def _before_damage(path: Path) -> list[Mapping[str, Any]]:
    records: list[Mapping[str, Any]] = []
    lines = read_lines(path)
    while True:
        try:
            records.append(next(lines))
        except (StopIteration, TornRecordError):
            return records


_START = TypeAdapter(StartRecord)
_PROBE = TypeAdapter(ProbeRecord)
_SOURCE = TypeAdapter(SourceRecord)
_LOADER_WORKERS = TypeAdapter(LoaderWorkersRecord)
_STEP = TypeAdapter(StepRecord)
_BUCKETS = TypeAdapter(BucketsRecord)
_CHECKPOINT = TypeAdapter(CheckpointRecord)
_END = TypeAdapter(EndRecord)

_Line = (
    StartRecord | ProbeRecord | SourceRecord | LoaderWorkersRecord | BucketsRecord | StepRecord | CheckpointRecord | EndRecord
)


def read_trace(path: Path, attempt: int, rank: int, problems: list[str]) -> RankTrace:
    """Parse one file up to its first bad line; that line becomes a problem."""
    return _trace_of(path, whole_lines(path, problems), attempt, rank, problems)


def read_ends(path: Path, attempt: int, rank: int, problems: list[str]) -> RankTrace:
    """Its first line and its last ones, back to a step at least: where the rank began and how far it came, however long the
    trace is."""
    with path.open("rb") as file:
        first, size = file.readline(), path.stat().st_size
    lines, last_bytes = [first.rstrip(b"\n")] if first.endswith(b"\n") else [], ENDS_BYTES
    while lines:
        last = Tail(path, last_bytes=last_bytes).lines(last_bytes + 1)
        if last_bytes >= size or any(b'"kind":"step"' in line for line in last):
            lines += [line for line in last if line != lines[0]]
            break
        last_bytes *= 16
    try:
        records = [value for line in lines if isinstance(value := json.loads(line), dict)]
    except (ValueError, RecursionError) as error:
        problems.append(f"{path}: not a JSON record ({error})")
        records = []
    return _trace_of(path, records, attempt, rank, problems)


def _trace_of(path: Path, lines: Sequence[Mapping[str, Any]], attempt: int, rank: int, problems: list[str]) -> RankTrace:
    trace = RankTrace(attempt=attempt, rank=rank)
    parsed: list[_Line] = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(_parse(line, trace, parsed))
        except ValidationError as error:
            first = error.errors()[0]
            problems.append(f"{path}:{number}: {'.'.join(map(str, first['loc']))}: {first['msg']}")
            break
        except ValueError as error:
            problems.append(f"{path}:{number}: {error}")
            break
    return replace(
        trace,
        start=next((line for line in parsed if isinstance(line, StartRecord)), None),
        probe=next((line for line in parsed if isinstance(line, ProbeRecord)), None),
        sources=tuple(line for line in parsed if isinstance(line, SourceRecord)),
        loader_workers=tuple(line for line in parsed if isinstance(line, LoaderWorkersRecord)),
        buckets=tuple(line for line in parsed if isinstance(line, BucketsRecord)),
        steps=tuple(line for line in parsed if isinstance(line, StepRecord)),
        checkpoints=tuple(line for line in parsed if isinstance(line, CheckpointRecord)),
        end=next((line for line in parsed if isinstance(line, EndRecord)), None),
    )


def _parse(line: Mapping[str, Any], trace: RankTrace, before: Sequence[_Line]) -> _Line:
    """One line after those `before` it. Raises ValueError for a line that is malformed or out of place."""
    kind = line.get("kind")
    if bool(before) == (kind == "start") or (before and isinstance(before[-1], EndRecord)):
        raise ValueError(f"a {kind!r} line is out of place")
    match kind:
        case "start":
            return _start(line, trace.attempt, trace.rank)
        case "step":
            assert isinstance(before[0], StartRecord)
            return _step(line, trace.attempt, trace.rank, len(before[0].tensors))
        case "probe":
            return _PROBE.validate_python(line)
        case "source":
            return _SOURCE.validate_python(line)
        case "loader_workers":
            return _LOADER_WORKERS.validate_python(line)
        case "buckets":
            return _BUCKETS.validate_python(line)
        case "checkpoint":
            record = _CHECKPOINT.validate_python(line)
            if checkpoint_step(record.name) != record.step:
                raise ValueError(f"checkpoint {record.name} is said to be of step {record.step}")
            return record
        case "end":
            return _END.validate_python(line)
        case _:
            raise ValueError(f"unknown kind {kind!r}")


def _start(line: Mapping[str, Any], attempt: int, rank: int) -> StartRecord:
    if line.get("v") != TRACE_VERSION:
        raise ValueError(f"trace version {line.get('v')!r}, this chaosrun reads {TRACE_VERSION}")
    start = _START.validate_python(line)
    if (start.attempt, start.rank) != (attempt, rank):
        raise ValueError(f"the file of attempt {attempt} rank {rank} says it is of attempt {start.attempt} rank {start.rank}")
    if not start.tensors or len(start.params) != len(start.tensors) * WORD_BYTES:
        raise ValueError(f"{len(start.tensors)} tensors are named, {len(start.params) // WORD_BYTES} fingerprinted")
    return start


def _step(line: Mapping[str, Any], attempt: int, rank: int, tensors: int) -> StepRecord:
    step = _STEP.validate_python({**line, "attempt": attempt, "rank": rank})
    if len(step.params) != tensors * WORD_BYTES:
        raise ValueError(f"step {step.step}: {len(step.params) // WORD_BYTES} parameters of {tensors} tensors")
    skipped = not step.grad and not step.grads and not step.lr
    if not skipped and not (step.grad and step.lr and len(step.grads) == tensors * WORD_BYTES):
        raise ValueError(f"step {step.step}: {len(step.grads) // WORD_BYTES} gradients of {tensors} tensors")
    if not step.loss and not skipped:
        raise ValueError(f"step {step.step}: gradients without a loss")
    return step
