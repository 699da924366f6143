"""The trace: what one rank of one attempt did, a record for each event; how they lie in its file is `records.trace_blocks`'s.

`start` comes first, then, of rank 0 in the first attempt, `probe`; `source` and `loader_workers` once an epoch; `end` last.

Digests are 64-bit, 16 hex digits; `grads` and `params` hold one little-endian uint32 a tensor, to name the tensor that
differs. Floats are `float.hex()`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from chaosrun.records.codec import Count, Record, Text
from chaosrun.records.layout import checkpoint_step
from chaosrun.records.position import Position
from chaosrun.records.spans import Span, Steps

TRACE_VERSION = 3
"""Traces of version 2 were lines of JSON."""
NO_INPUTS = "none"
"""The digest of a step for which no module's inputs were seen."""
BLOCK_STEPS = 64
"""A block ends with each multiple of these, and with each checkpoint: the blocks of two legs meet wherever an attempt began."""
WORD_BYTES = 4
ALIVE = "the script's "
"""With what names in `SaveRecord.held` begin that are of modules in memory, and not of what is saved."""
CHANGES_OFTEN = "…"
"""In a `HoldingsRecord`: from here on it is not told any more."""
UNNAMED = "unnamed-"
"""With what names of parameters begin that an optimizer steps and no module holds."""

Source = Literal["storage", "memory"]
Digests = Mapping[str, Mapping[str, Text]]
"""By component and by name inside it."""
HexFloat = Annotated[str, Meta(pattern=r"^-?(0x[01](\.[0-9a-f]+)?p[+-][0-9]+|inf|nan)$")]
AtLeastOne = Annotated[int, Meta(ge=1)]


class Found(Record, frozen=True, kw_only=True):
    """Where an attempt stands that resumed by itself: the reference's steps, nearest first, whose quantities it began with."""

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
    """Any record."""


class StartRecord(TraceRecord, frozen=True, kw_only=True, tag="start"):
    v: Literal[3]
    attempt: Count
    rank: Count
    world_size: AtLeastOne
    pid: int
    time_s: float
    """When its checkpoint was restored."""
    position: Position
    restored: str | None
    """Name of the checkpoint."""
    source: Source = "storage"
    """Where it was read: its files, or the copies that nodes keep."""
    rng: Text
    param: Text
    params: bytes
    tensors: tuple[str, ...]
    """Names, in the order of `params` and `grads`."""
    sharded: bool = False
    """Whether a rank holds but a part of some parameters."""
    in_part: bool = False
    """Of a script that resumes by itself: optimizers stepped but some of the parameters then. A later attempt, which may begin
    when they step all or still fewer, has its `tensors` in this order."""
    seeded: bool = True
    """The script itself had seeded torch, or restored its random stream; where it resumes by itself."""
    parts: bool = False
    """Whether `tensors` say which part of each: where their names are the same, ranks hold the same."""
    canary: Text | None = None
    """Of kernels' results on fixed inputs, in this process."""
    entered_s: float | None = None
    """When the rank had built its training and turned to its checkpoint."""
    digests: Digests | None = None
    """Of the state that was restored."""
    state: str = ""
    """Of the optimizers' state, where a script resumes by itself."""
    rates: tuple[HexFloat, ...] = ()
    """Learning rates as its first forward pass found them: a script that sets them after that pass steps with others."""
    buffers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests by name; where a script resumes by itself, of a restart."""
    optimizers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the state of each, where there are several; of the same starts."""
    scheduled: bool = True
    """A scheduler of torch's sets the learning rates; of the first attempt of a script that resumes by itself."""
    found: Found | None = None
    """Of a script that resumes by itself; position.step then numbers the attempt as this says. None at the very beginning."""

    def __post_init__(self) -> None:
        expect_words(self.params, self.tensors)


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
    """Of each micro-batch; where that holds tensors and something else, "/" and the digest of the tensors alone follow."""
    rng: Text
    """Before the step's first micro-batch."""
    loss: tuple[HexFloat, ...]
    """Of each micro-batch; empty for a step whose batch the script left out."""
    lr: tuple[HexFloat, ...]
    """Of each parameter group, as the optimizer used it."""
    grad: str
    grads: bytes
    """Reduced and clipped, as the optimizer saw them. lr and grad are empty for a step without an optimizer's step."""
    param: Text
    params: bytes
    """After the step. Both words are empty of steps at which nobody keeps them."""
    items: AtLeastOne | None = None
    """Of the step's window over all ranks: each loss is then a sum / items, and they add up. None: losses are means."""
    state: str = ""
    """Of the optimizers' state after the step, where a script resumes by itself."""
    settings: str = ""
    """Of the optimizers' settings as the step used them, but for learning rates."""
    began: str = ""
    """Of the parameters as the step began, where the script had changed them after the step before: it clips them, say. Under
    `chaosrun.attach` after a checkpoint alone."""
    fetched: tuple[tuple[Any, ...] | None, ...] | None = None
    """Of each micro-batch that is not what a loader handed out, the sample ids of what a loader had handed out for it, where
    that can be told: the script makes its inputs of that (it normalises, mixes, adds noise). Not compared."""
    stepped: tuple[str, ...] = ()
    """Where a script has several optimizers, those that made this step, in order. Not compared."""
    attempt: int = 0
    rank: int = 0
    """Both those of its file."""

    @property
    def tensors(self) -> list[str]:
        """Of each micro-batch, the digest of its tensors, where it holds something else, too; else ""."""
        return [digest.partition("/")[2] for digest in self.batch]

    @property
    def knows_ids(self) -> bool:
        """The loader told the sample ids of every micro-batch."""
        return self.ids is not None and None not in self.ids and len(self.ids) == len(self.batch)


class StateRecord(TraceRecord, frozen=True, kw_only=True, tag="state"):
    """The complete state at a step; between two checkpoints, for drills that may end there. See `protocol.early_end`."""

    step: Count
    time_s: float
    digests: Digests | None = None
    own: str = ""
    """Of all that the script keeps beside it; "" where nobody looked. See `observe.own`."""
    unseen: tuple[str, ...] = ()
    """What it keeps that has no digest."""


class CheckpointRecord(StateRecord, frozen=True, kw_only=True, tag="checkpoint"):
    name: str
    duration_s: float
    """For which the training waited: for what was left of the save before, too."""
    pending: bool = False
    """It went on beside the training: a `committed` record says when it was over."""
    because: str = ""
    """Why the training waited for a save that was to go on beside it."""
    changed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """What the save itself changed of the live state, by component ("mode": of its modules, which no checkpoint holds)."""
    hooks: tuple[str, ...] = ()
    """Of a save that changed something: the script's hooks."""

    def __post_init__(self) -> None:
        if checkpoint_step(self.name) != self.step:
            raise ValueError(f"checkpoint {self.name} is said to be of step {self.step}")

    @property
    def by_itself(self) -> bool:
        """Nothing but values of registered objects, and no hook of the script's: their state_dict() gives others each time."""
        return self.changed.keys() == {"registered"} and not self.hooks

    @property
    def effect(self) -> str:
        """ "model 0.bias and 3 more (hooks: rounding)"."""
        hooks = f" (hooks: {', '.join(self.hooks)})" if self.hooks else ""
        return ", ".join(f"{component} {names}" for component, names in self.changed.items()) + hooks


class CommittedRecord(TraceRecord, frozen=True, kw_only=True, tag="committed"):
    """The checkpoint of this step, saved beside the training, was seen to be committed."""

    step: Count
    digests: Digests | None = None
    """Of the state that it holds for this rank, where the checkpoint's own record has none. Readers find them there."""


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
    buffers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the model's, by name, as the save began: with the first of a step of which is seen what it was given."""
    optimizers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the state of each, where there are several, of the same moment."""
    trained: tuple[str, ...] = ()
    """The folders in `held` that are the trained models', as far as their values tell."""
    aside: bool = False
    """By another thread than the one that trains."""
    before: str = ""
    """Of a rename, where it lay before, as `path`."""


class SavedRecord(TraceRecord, frozen=True, kw_only=True, tag="saved"):
    """The script is done with this step, after which it saved something: it trains on, or ends."""

    step: Count
    time_s: float


class HoldingsRecord(TraceRecord, frozen=True, kw_only=True, tag="holdings"):
    """What a script holds beside its tensors as this step begins: all at an attempt's first step, later what changes."""

    step: AtLeastOne
    modules: Mapping[str, str] = {}
    """How its modules are set, if it resumes by itself: by path, a setting's text; "": it is gone."""
    values: Mapping[str, Text] = {}
    """Plain values of its own, where a restart may go on with this step: see `observe.script_values`."""


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
    values: tuple[str, ...] = ()
    """Likewise, plain values of the script's, by path: some are state, others only told to people (means of losses, counts)."""
    optimizers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the state of each, where a script resumes by itself and has several."""


Line = (
    StartRecord
    | ProbeRecord
    | SourceRecord
    | LoaderWorkersRecord
    | BucketsRecord
    | StepRecord
    | StateRecord
    | CheckpointRecord
    | CommittedRecord
    | SaveRecord
    | SavedRecord
    | HoldingsRecord
    | EndRecord
)


class Block(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Successive steps of one trace: where they lie in its file, and what they come to. Digests are xxh3, big-endian."""

    first: AtLeastOne
    count: AtLeastOne
    at: Count
    size: Count
    others: tuple[Count, ...]
    """Where in its bytes records begin that are no steps."""
    knows_ids: bool
    """Of every step."""
    param: bytes
    """Of the digest of the parameters after each step."""
    digest: bytes
    """Of everything that two legs are compared by, so not of times. Empty, as `param`, of what is but a part of a block."""
    running: bytes = b""
    """Of the file up to here: of that of the block before, of what stands above, and of the block's bytes."""

    @property
    def last(self) -> int:
        return self.first + self.count - 1

    @property
    def steps(self) -> range:
        return range(self.first, self.first + self.count)


@dataclass(frozen=True, kw_only=True)
class RankTrace:
    """One trace file. `start` is None when the rank died before it wrote its first record."""

    attempt: int
    rank: int
    start: StartRecord | None = None
    probe: ProbeRecord | None = None
    sources: tuple[SourceRecord, ...] = ()
    loader_workers: tuple[LoaderWorkersRecord, ...] = ()
    buckets: tuple[BucketsRecord, ...] = ()
    blocks: tuple[Block, ...] = ()
    read: Callable[[Block, int], Sequence[StepRecord]] = lambda _, count: ()
    """The first steps of one of them. Raises DamagedRecordError."""
    states: tuple[StateRecord, ...] = ()
    """Of the checkpoints, too."""
    checkpoints: tuple[CheckpointRecord, ...] = ()
    commits: tuple[CommittedRecord, ...] = ()
    """Of checkpoints that were pending."""
    saves: tuple[SaveRecord, ...] = ()
    saved: tuple[SavedRecord, ...] = ()
    holdings: tuple[HoldingsRecord, ...] = ()
    end: EndRecord | None = None

    @property
    def committed(self) -> frozenset[int]:
        """Steps of checkpoints that are known to be committed."""
        return frozenset((*(each.step for each in self.checkpoints if not each.pending), *(each.step for each in self.commits)))

    @property
    def spans(self) -> list[Span]:
        """In the order in which they were written."""
        return [Span(block.first, block.last, block, self) for block in self.blocks]

    @cached_property
    def steps(self) -> Steps:
        return Steps(self.spans)

    def tensor(self, index: int) -> str | None:
        """Name of the tensor at `index` of `params` and `grads`."""
        return self.start.tensors[index] if self.start and index < len(self.start.tensors) else None


def expect_words(words: bytes, tensors: Sequence[str], where: str = "", what: str = "fingerprints") -> None:
    """Raises ValueError unless there is one for each tensor."""
    if not tensors or len(words) != len(tensors) * WORD_BYTES:
        raise ValueError(f"{where}{len(words) / WORD_BYTES:g} {what} of {len(tensors)} tensors")
