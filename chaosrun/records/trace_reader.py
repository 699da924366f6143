"""Reading a trace up to its first bad record, which becomes a problem; a last record that was cut off is left out.

A block whose bytes match its footer is not decoded: its steps are read on access.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

from chaosrun.records import trace_blocks, traces
from chaosrun.records.codec import DamagedRecordError, changed
from chaosrun.records.layout import LegLayout

ENDS_BYTES = 1 << 15
OPENED_BLOCKS = 2048
"""Number of decoded blocks in the cache, for all traces together."""
_L = TypeVar("_L")


def read_trace(path: Path, attempt: int, rank: int, problems: list[str]) -> traces.RankTrace:
    """Read one trace up to its first bad record, which becomes a problem."""
    return _whole(path, attempt, rank, problems).trace


def _whole(path: Path, attempt: int, rank: int, problems: list[str]) -> "_Found":
    found = _Found(path, attempt, rank)
    try:
        found.read(path.read_bytes(), 0, b"")
    except FileNotFoundError:
        earlier = path.with_suffix(".trace.jsonl")
        told = f"written by an earlier chaosrun (a trace of version 2, this one reads version {traces.TRACE_VERSION})"
        problems.append(f"{earlier}: {told}" if earlier.exists() else f"{path.name} is missing")
    except ValueError as error:
        problems.append(f"{path}: record {found.number + 1}: {getattr(error, 'message', error)}")
    return found


def read_ends(path: Path, attempt: int, rank: int, problems: list[str]) -> traces.RankTrace:
    """The first record of a trace and its last ones, back at least to a step, without digests; cheap even for a long trace."""
    size, last = path.stat().st_size, ENDS_BYTES
    while last < size:
        found, data = _Found(path, attempt, rank), _bytes_at(path, size - last)
        try:
            found.begin()
            # Read from after the first block end found here.
            if behind := next(_footers(data, 0), None):
                _, end, content = behind
                found.read(data, end, trace_blocks.unpacked_footer(content).running, size - last)
        except ValueError as error:
            problems.append(f"{path}: {getattr(error, 'message', error)}")
            return found.trace
        if found.blocks:
            break
        last *= 4
    else:
        found = _whole(path, attempt, rank, problems)
    found.blocks = found.blocks[-2:]
    return found.trace


def trace_files(leg: LegLayout) -> list[tuple[int, int, Path]]:
    """Attempt, rank and path of each trace of a leg."""
    found = ((number, path) for number in leg.attempts() for path in leg.attempt(number).path.glob("rank-*.trace"))
    named = ((number, path.stem.removeprefix("rank-"), path) for number, path in found)
    return sorted((number, int(rank), path) for number, rank, path in named if rank.isascii() and rank.isdecimal())


def read_start(path: Path) -> traces.StartRecord | None:
    """The start record of a trace; None if there is none, or none yet."""
    with suppress(ValueError, OSError):
        record = _first(path)
        return record if isinstance(record, traces.StartRecord) else None
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMoment:
    """The state between two steps of a trace, with which a resume at this point must begin."""

    step: int
    weights: str
    optimizer: str
    rates: tuple[str, ...] | None
    """Learning rates that this step used; before the first step, those at its forward pass."""
    rates_after: tuple[str, ...] | None = None
    """Learning rates that the next step used. None after the last step, like all values of the next step."""
    rng_after: str | None = None
    rng_within: str | None = None
    """Random streams with which a restart from a save inside the next step begins."""
    data_after: str | None = None
    batches_after: tuple[str, ...] = ()
    """Inputs of all forward passes that the next step made."""
    settings_after: str | None = None
    weights_after: str | None = None
    """Weights that the script changed before the next step, if it did."""
    stepped: tuple[str, ...] = ()
    """If there are several optimizers, those that made this step."""


def read_moments(path: Path, *, at_most: int | None = None) -> list[TraceMoment]:
    """The moments of one trace, from its start up to the first damaged record; empty if there is no trace."""
    moments: list[TraceMoment] = []
    with suppress(DamagedRecordError, FileNotFoundError):
        for record in all_records(path, 0, 0):
            if isinstance(record, traces.StartRecord):
                step = record.position.step
                rates = record.rates or None if step == 0 else None
                moments.append(TraceMoment(step=step, weights=record.param, optimizer=record.state, rates=rates))
            elif isinstance(record, traces.HoldingsRecord) and moments and record.streams:
                moments[-1] = replace(moments[-1], rng_within=record.streams)
            elif isinstance(record, traces.StepRecord) and moments:
                rates = record.lr or moments[-1].rates
                after = {"rates_after": rates, "rng_after": record.rng, "data_after": record.batch[0]}
                begun = {"batches_after": record.batch, "weights_after": record.began or None}
                moments[-1] = replace(moments[-1], **after, **begun, settings_after=record.settings)
                if len(moments) == at_most:
                    break
                stood = {"weights": record.param, "optimizer": record.state, "rates": rates, "stepped": record.stepped}
                moments.append(TraceMoment(step=record.step, **stood))
    return moments


def all_records(path: Path, attempt: int, rank: int) -> Iterator[traces.Line]:
    """Every record of a trace in time order. Raises DamagedRecordError, FileNotFoundError."""
    reading = trace_blocks.Reading(attempt, rank, names={})
    try:
        for _, content in trace_blocks.frames(path.read_bytes()):
            if record := reading.record(content):
                yield record
    except ValueError as error:
        raise DamagedRecordError(f"{path}: {getattr(error, 'message', error)}") from error


@lru_cache(maxsize=OPENED_BLOCKS)
def _opened(
    path: Path, attempt: int, rank: int, tensors: tuple[str, ...], block: traces.Block, count: int
) -> Sequence[traces.StepRecord]:
    try:
        reading = trace_blocks.Reading(attempt, rank, tensors)
        region = _bytes_at(path, block.at, block.size)
        contents = (content for _, content in trace_blocks.frames(region) if trace_blocks.is_step(content))
        steps = [reading.step(content) for content in islice(contents, count)]
        if [record.step for record in steps] != list(block.steps[:count]):
            raise ValueError("other steps lie there")
    except ValueError as error:
        raise DamagedRecordError(f"{path}: steps {block.first} to {block.last}: {error}") from error
    return steps


class _Found:
    def __init__(self, path: Path, attempt: int, rank: int) -> None:
        self.number = 0
        """Number of sound records."""
        self.blocks: list[traces.Block] = []
        self._path, self._attempt, self._rank = path, attempt, rank
        self._lines: list[traces.Line] = []
        self._names: trace_blocks.Names | None = {}

    @property
    def start(self) -> traces.StartRecord | None:
        return next(_of(traces.StartRecord, self._lines), None)

    @property
    def trace(self) -> traces.RankTrace:
        tensors = self.start.tensors if self.start else ()
        late = {each.step: each.digests for each in _of(traces.CommittedRecord, self._lines) if each.digests}
        states = [
            changed(each, digests=late[each.step]) if isinstance(each, traces.CheckpointRecord) and each.step in late else each
            for each in _of(traces.StateRecord, self._lines)
        ]
        return traces.RankTrace(
            attempt=self._attempt,
            rank=self._rank,
            start=self.start,
            probe=next(_of(traces.ProbeRecord, self._lines), None),
            sources=tuple(_of(traces.SourceRecord, self._lines)),
            loader_workers=tuple(_of(traces.LoaderWorkersRecord, self._lines)),
            buckets=tuple(_of(traces.BucketsRecord, self._lines)),
            blocks=tuple(self.blocks),
            read=partial(_opened, self._path, self._attempt, self._rank, tensors),
            states=tuple(states),
            checkpoints=tuple(_of(traces.CheckpointRecord, states)),
            commits=tuple(_of(traces.CommittedRecord, self._lines)),
            saves=tuple(_of(traces.SaveRecord, self._lines)),
            saved=tuple(_of(traces.SavedRecord, self._lines)),
            holdings=tuple(_of(traces.HoldingsRecord, self._lines)),
            end=next(_of(traces.EndRecord, self._lines), None),
        )

    def begin(self) -> None:
        """Read the first record of the file and skip those after it. Raises ValueError, OSError."""
        if first := _first(self._path):
            self._take(first)
        self._names = None

    def read(self, data: bytes, at: int, running: bytes, offset: int = 0) -> None:
        """Read from the beginning of a block on. `offset`: where `data` begins in the file. Raises ValueError."""
        for head, end, content in _footers(data, at):
            region, block = memoryview(data)[at:head], trace_blocks.unpacked_footer(content)
            if block.at != at + offset or block != trace_blocks.summed(block, running, region):
                break
            self._full(block, region)
            at, running = end, block.running
        self._rest(memoryview(data)[at:], at + offset)

    def _full(self, block: traces.Block, region: memoryview) -> None:
        """Take a block that matches its footer, without decoding its steps."""
        for place in block.others:
            _, content = next(trace_blocks.frames(region, place))
            self._take(trace_blocks.unpacked_record(content, self._names))
        self._expect_started("step")
        self.blocks.append(block)
        self.number += block.count

    def _rest(self, data: memoryview, at: int) -> None:
        """Read what follows the last full block, record by record."""
        scribe, size = trace_blocks.Scribe(), 0
        reading = trace_blocks.Reading(self._attempt, self._rank, self.start.tensors if self.start else (), self._names)
        try:
            for end, content in trace_blocks.frames(data):
                record = reading.record(content)
                if record is None:
                    raise ValueError("the block that ends here is not what was written")
                if isinstance(record, traces.StepRecord):
                    self._expect_started("step")
                    if scribe.first and record.step != scribe.last + 1:
                        raise ValueError(f"step {record.step} follows step {scribe.last}")
                    scribe.take(record)
                    self.number += 1
                else:
                    self._take(record)
                size = end
        finally:
            if scribe.first:
                self.blocks.append(trace_blocks.summed(scribe.block(at, size), b"", data[:size]))

    def _take(self, record: traces.Line) -> None:
        """Take a record. Raises ValueError for one that is out of place."""
        if isinstance(record, traces.StartRecord):
            if (record.attempt, record.rank) != (self._attempt, self._rank):
                told = f"attempt {self._attempt} rank {self._rank} says it is of attempt {record.attempt} rank {record.rank}"
                raise ValueError(f"the file of {told}")
            if self._lines:
                raise ValueError("a 'start' record is out of place")
        else:
            self._expect_started(str(record.__struct_config__.tag))
        self._lines.append(record)
        self.number += 1

    def _expect_started(self, kind: str) -> None:
        if not self._lines or isinstance(self._lines[-1], traces.EndRecord):
            raise ValueError(f"a {kind!r} record is out of place")


def _first(path: Path) -> traces.Line | None:
    """The first record of a file; None if there is none yet. Raises ValueError, OSError."""
    with path.open("rb") as file:
        data = file.read(ENDS_BYTES)
        found = next(trace_blocks.frames(data), None) or next(trace_blocks.frames(data + file.read()), None)
    return found and trace_blocks.unpacked_record(found[1], {})


def _footers(data: bytes, at: int) -> Iterator[tuple[int, int, bytes]]:
    """Frames from offset `at` on that look like a block's footer: begin, end and content."""
    place = data.find(trace_blocks.MARK, at)
    while place >= 0:
        head = place - trace_blocks.HEAD_BYTES
        with suppress(ValueError):
            end, content = next(trace_blocks.frames(data, max(at, head)), (0, b""))
            if trace_blocks.is_footer(content):
                yield head, end, content
        place = data.find(trace_blocks.MARK, place + 1)


def _of(kind: type[_L], lines: Sequence[traces.Line]) -> Iterator[_L]:
    return (line for line in lines if isinstance(line, kind))


def _bytes_at(path: Path, at: int, size: int = -1) -> bytes:
    """`size` bytes of a file at offset `at`. Raises OSError."""
    with path.open("rb") as file:
        file.seek(at)
        return file.read(size)
