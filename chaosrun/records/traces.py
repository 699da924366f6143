"""The trace: what one rank of one attempt did, a JSON line for each event; one writer a file. A torn last line is tolerated.

A rank writes `start` first, then, of rank 0 in the first attempt, `probe`; `source` and `loader_workers` once an epoch (the
latter for persistent workers once); `buckets`, `step`, `checkpoint` and `save` as they come; `end` last.

Digests are 64-bit, 16 hex digits; `grads` and `params` hold one little-endian uint32 a tensor, which is enough to name the
tensor: the 64-bit value decides. Floats are written as `float.hex()`. Reading never fails on content: a file is read up to its
first bad line, and that line becomes a problem. Knows the form of a trace, not what any value should have been.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from chaosrun.records.codec import Count, DamagedRecordError, Record, Text, changed, decode, encode, read_records
from chaosrun.records.layout import checkpoint_step
from chaosrun.records.position import Position
from chaosrun.records.tail import Tail

WORD_BYTES = 4
ALIVE = "the script's "
"""With what names in `SaveRecord.held` begin that are of modules in memory, and not of what is saved."""
ENDS_BYTES = 1 << 16

Digests = Mapping[str, Mapping[str, Text]]
"""By component and by name inside it."""
HexFloat = Annotated[str, Meta(pattern=r"^-?(0x[01](\.[0-9a-f]+)?p[+-][0-9]+|inf|nan)$")]
_L = TypeVar("_L")
AtLeastOne = Annotated[int, Meta(ge=1)]


class Found(Record, frozen=True, kw_only=True):
    """Where an attempt stands that resumed by itself: the reference's steps after which each quantity was what this attempt
    began with. Of many, those nearest to the chosen step."""

    step: Count | None
    """The one that agrees in every quantity; None: none does."""
    weights: tuple[Count, ...] = ()
    optimizer: tuple[Count, ...] = ()
    rates: tuple[Count, ...] = ()
    rng: tuple[Count, ...] = ()
    data: tuple[Count, ...] = ()
    """k: the first inputs are those of the reference's step k + 1."""
    own: bool = False
    """The steps are not the reference's, of which none agreed, but those of an earlier attempt of this leg."""


class TraceRecord(Record, frozen=True, kw_only=True, tag_field="kind"):
    """Any line."""


class StartRecord(TraceRecord, frozen=True, kw_only=True, tag="start"):
    v: Literal[2]
    attempt: Count
    rank: Count
    world_size: AtLeastOne
    pid: int
    time_s: float
    """When its checkpoint was restored."""
    position: Position
    restored: str | None
    """Name of the checkpoint."""
    rng: Text
    param: Text
    params: bytes
    tensors: tuple[str, ...]
    """Names, in the order of `params` and `grads`."""
    sharded: bool = False
    """Whether a rank holds but a part of some parameters, so that no two ranks hold the same."""
    canary: Text | None = None
    """Of kernels' results on fixed inputs, in this process."""
    entered_s: float | None = None
    """When the rank had built its training and turned to its checkpoint."""
    digests: Digests | None = None
    """Of the state that was restored."""
    state: str = ""
    """Of the optimizers' state, where a script resumes by itself."""
    found: Found | None = None
    """Of a script that resumes by itself; position.step then numbers the attempt as this says. None at the very beginning."""

    def __post_init__(self) -> None:
        _expect_words(self.params, self.tensors)


class ProbeRecord(TraceRecord, frozen=True, kw_only=True, tag="probe"):
    """What rank 0 found out about its loader's samples; see chaosrun.observe.probe."""

    items: Literal["independent", "global_rng", "draws", "never_repeats", "unknown"]
    detail: str


class SourceRecord(TraceRecord, frozen=True, kw_only=True, tag="source"):
    """What the script's samplers and dataset held when an epoch, or the rest of one, was opened."""

    epoch: Count
    own: str | None
    held: Mapping[str, str]


class LoaderWorkersRecord(TraceRecord, frozen=True, kw_only=True, tag="loader_workers"):
    epoch: Count
    workers: tuple[Mapping[str, Text] | None, ...]
    """By worker, a digest of where each stream stands after worker_init_fn; None for one that did not say."""


class BucketsRecord(TraceRecord, frozen=True, kw_only=True, tag="buckets"):
    step: Count
    layout: tuple[tuple[int, ...], ...] | None
    """Indices of parameters; None without DDP."""
    primed: bool
    left: Literal["hook_state", "accumulation_hook"] | None = None
    """Why chaosrun left them as DDP makes them."""
    left_by: str = ""
    """The hook's name, or that of the parameter that has one."""


class StepRecord(TraceRecord, frozen=True, kw_only=True, tag="step"):
    step: AtLeastOne
    epoch: Count
    batches: Count
    """Done in this epoch, this step's included."""
    time_s: float
    ids: tuple[tuple[Any, ...] | None, ...] | None
    """Sample ids of each micro-batch, as far as they are known."""
    batch: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """Of each micro-batch."""
    rng: Text
    """Before the step's first micro-batch."""
    loss: tuple[HexFloat, ...]
    """Of each micro-batch; empty for a step whose batch the script left out."""
    lr: tuple[HexFloat, ...]
    """Of each parameter group, as the optimizer used it."""
    grad: str
    grads: bytes
    """As the optimizer saw them: reduced and clipped. lr, grad and grads are empty for a step in which no optimizer was
    stepped, and only then."""
    param: Text
    params: bytes
    """After the step."""
    items: AtLeastOne | None = None
    """Items of the step's window over all ranks: each loss is then the micro-batch's sum / items, and they add up over the
    ranks. None where losses are means and nothing was counted."""
    state: str = ""
    """Of the optimizers' state after the step, where a script resumes by itself."""
    settings: str = ""
    """Of the optimizers' settings as the step used them, but for learning rates, where a script resumes by itself."""
    began: str = ""
    """Of the parameters as the step began, where the script had changed them after the step before: it clips them, say."""
    attempt: int = 0
    rank: int = 0
    """Both those of its file."""

    @property
    def knows_ids(self) -> bool:
        """The loader told the sample ids of every micro-batch."""
        return self.ids is not None and None not in self.ids and len(self.ids) == len(self.batch)


class CheckpointRecord(TraceRecord, frozen=True, kw_only=True, tag="checkpoint"):
    step: Count
    name: str
    time_s: float
    duration_s: float
    digests: Digests | None = None
    changed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What the save itself changed of the live state, by component ("mode": of its modules, which no checkpoint holds)."""
    hooks: tuple[str, ...] = ()
    """Of a save that changed something: the script's hooks."""
    own: str = ""
    """Of all that the script keeps beside it; "" where nobody looked. See `observe.own`."""
    unseen: tuple[str, ...] = ()
    """What it keeps that has no digest."""

    def __post_init__(self) -> None:
        if checkpoint_step(self.name) != self.step:
            raise ValueError(f"checkpoint {self.name} is said to be of step {self.step}")

    @property
    def effect(self) -> str:
        """ "model 0.bias and 3 more (hooks: rounding)"."""
        hooks = f" (hooks: {', '.join(self.hooks)})" if self.hooks else ""
        return ", ".join(f"{component} {names}" for component, names in self.changed.items()) + hooks


class SaveRecord(TraceRecord, frozen=True, kw_only=True, tag="save"):
    """The script began, or ended, to save a file or folder of its own."""

    step: Count
    path: str
    """Relative to the leg's output or working folder, where it lies in one."""
    how: str
    """What saved it: "torch.save", "safetensors", "dcp", "open", …"""
    time_s: float
    done: bool
    held: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """What it was given to save, where that is seen, by path: readable where that is short, else digests."""
    aside: bool = False
    """By another thread than the one that trains."""


class EndRecord(TraceRecord, frozen=True, kw_only=True, tag="end"):
    step: Count
    position: Position
    time_s: float
    digests: Digests
    """model, buffers, optimizer by tensor; scheduler, rng and registered by name."""
    checkpoint: str | None
    """The final one."""
    outside: tuple[str, ...] = ()
    """What the training changed and nobody saves; of rank 0 of an undisturbed leg."""


Line = (
    StartRecord
    | ProbeRecord
    | SourceRecord
    | LoaderWorkersRecord
    | BucketsRecord
    | StepRecord
    | CheckpointRecord
    | SaveRecord
    | EndRecord
)
LINES = msgspec.json.Decoder(Line)


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
    saves: tuple[SaveRecord, ...] = ()
    end: EndRecord | None = None

    def tensor(self, index: int) -> str | None:
        """Name of the tensor at `index` of `params` and `grads`."""
        return self.start.tensors[index] if self.start and index < len(self.start.tensors) else None


class TraceWriter:
    """Appends lines to one trace file; each line reaches the kernel before `write` returns (a SIGKILL loses nothing)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def write(self, record: Line) -> None:
        line = encode(record) + b"\n"
        done = os.write(self._file, line)
        while done < len(line):
            done += os.write(self._file, line[done:])

    def close(self) -> None:
        os.close(self._file)


def read_trace(path: Path, attempt: int, rank: int, problems: list[str]) -> RankTrace:
    """Read one file up to its first bad line; that line becomes a problem."""
    return _trace_of(path, lambda: read_records(path, LINES), attempt, rank, problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A trace between two steps: what a resume at this place has to begin with."""

    step: int
    """Done."""
    weights: str
    optimizer: str
    rates: tuple[str, ...] | None
    """As this step used them; None before the first."""
    rates_after: tuple[str, ...] | None = None
    """As the next step used them: None, as all that is of the next step, after the last."""
    rng_after: str | None = None
    data_after: str | None = None
    weights_after: str | None = None
    """Where the script changed them before the next step."""


class _Brief(msgspec.Struct):
    """Of a start or a step as much as a moment takes: thousands of them are read while a restart waits."""

    kind: str
    param: str = ""
    state: str = ""
    began: str = ""
    rng: str = ""
    step: int = 0
    position: Position | None = None
    lr: tuple[str, ...] = ()
    batch: tuple[str, ...] = ()


_BRIEF = msgspec.json.Decoder(_Brief)


def read_moments(path: Path) -> list[Moment]:
    """The moments of one trace, from its start on, as far as it is sound; none where there is no trace."""
    moments: list[Moment] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        if b'"kind":"step"' not in line[:64] and moments:
            continue
        try:
            told = _BRIEF.decode(line)
        except msgspec.DecodeError:
            break
        if told.kind == "start" and told.position:
            moments.append(Moment(step=told.position.step, weights=told.param, optimizer=told.state, rates=None))
        elif told.kind == "step" and moments:
            rates = told.lr or moments[-1].rates
            after = {"rates_after": rates, "rng_after": told.rng, "data_after": told.batch[0]}
            after |= {"weights_after": told.began or None}
            moments[-1] = replace(moments[-1], **after)
            moments.append(Moment(step=told.step, weights=told.param, optimizer=told.state, rates=rates))
    return moments


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
    return _trace_of(path, lambda: (decode(line, LINES) for line in lines), attempt, rank, problems)


def _trace_of(path: Path, records: Callable[[], Iterable[Line]], attempt: int, rank: int, problems: list[str]) -> RankTrace:
    sound: list[Line] = []
    try:
        for line in records():
            sound.append(_in_place(line, sound, attempt, rank))
    except FileNotFoundError:
        problems.append(f"{path.name} is missing")
    except DamagedRecordError as error:
        problems.append(error.message)
    except ValueError as error:
        problems.append(f"{path}:{len(sound) + 1}: {error}")
    return RankTrace(
        attempt=attempt,
        rank=rank,
        start=next(_of(StartRecord, sound), None),
        probe=next(_of(ProbeRecord, sound), None),
        sources=tuple(_of(SourceRecord, sound)),
        loader_workers=tuple(_of(LoaderWorkersRecord, sound)),
        buckets=tuple(_of(BucketsRecord, sound)),
        steps=tuple(_of(StepRecord, sound)),
        checkpoints=tuple(_of(CheckpointRecord, sound)),
        saves=tuple(_of(SaveRecord, sound)),
        end=next(_of(EndRecord, sound), None),
    )


def _of(kind: type[_L], lines: Iterable[Line]) -> Iterator[_L]:
    return (line for line in lines if isinstance(line, kind))


def _in_place(line: Line, before: list[Line], attempt: int, rank: int) -> Line:
    """One line after those `before` it. Raises ValueError for one that is out of place."""
    if bool(before) == isinstance(line, StartRecord) or (before and isinstance(before[-1], EndRecord)):
        raise ValueError(f"a {str(line.__struct_config__.tag)!r} line is out of place")
    if isinstance(line, StartRecord) and (line.attempt, line.rank) != (attempt, rank):
        raise ValueError(f"the file of attempt {attempt} rank {rank} says it is of attempt {line.attempt} rank {line.rank}")
    if not isinstance(line, StepRecord):
        return line
    assert isinstance(before[0], StartRecord)
    _expect_words(line.params, before[0].tensors, f"step {line.step}: ", "parameters")
    if line.grad or line.grads or line.lr:
        _expect_words(line.grads, before[0].tensors, f"step {line.step}: ", "gradients")
        if missing := [name for name in ("grad", "lr", "loss") if not getattr(line, name)]:
            raise ValueError(f"step {line.step}: gradients without {missing[0]}")
    return changed(line, attempt=attempt, rank=rank)


def _expect_words(words: bytes, tensors: tuple[str, ...], where: str = "", what: str = "fingerprints") -> None:
    if not tensors or len(words) != len(tensors) * WORD_BYTES:
        raise ValueError(f"{where}{len(words) / WORD_BYTES:g} {what} of {len(tensors)} tensors")
