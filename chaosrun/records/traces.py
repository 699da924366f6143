"""The trace: a record for each event of one rank in one attempt. `records.trace_blocks` owns the file format.

`start` comes first, then, for rank 0 in the first attempt, `probe`; `source` and `loader_workers` once an epoch; `end` last.

Digests are 64-bit, 16 hex digits; `grads` and `params` hold one little-endian uint32 per tensor, to name the tensor that
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
from chaosrun.records.spans import Span, StepsByNumber

TRACE_VERSION = 3
"""Traces of version 2 were lines of JSON."""
NO_INPUTS = "none"
"""The digest of a step for which no module's inputs were seen."""
BLOCK_STEPS = 64
"""A block ends at each multiple of this, and with each checkpoint, so that blocks of two legs align wherever an attempt
began."""
WORD_BYTES = 4
ALIVE = "the script's "
"""Prefix of names in `SaveRecord.held` that belong to modules in memory, not to the saved values."""
CHANGES_OFTEN = "…"
"""In a `HoldingsRecord`: this value is not recorded from here on."""
NEAREST = 8  # at most so many agreeing steps are recorded of each quantity of `Found`
UNNAMED = "unnamed-"
"""Prefix of names of parameters that an optimizer steps and no module holds."""

Source = Literal["storage", "memory"]
Digests = Mapping[str, Mapping[str, Text]]
"""By component and by name inside it."""
HexFloat = Annotated[str, Meta(pattern=r"^-?(0x[01](\.[0-9a-f]+)?p[+-][0-9]+|inf|nan)$")]
AtLeastOne = Annotated[int, Meta(ge=1)]


class Found(Record, frozen=True, kw_only=True):
    """The position of an attempt that resumed by itself: the reference's steps, nearest first, whose quantities it began
    with."""

    step: Count | None
    """The step that agrees in every quantity; None: none does."""
    weights: tuple[Count, ...] = ()
    optimizer: tuple[Count, ...] = ()
    rates: tuple[Count, ...] = ()
    rng: tuple[Count, ...] = ()
    data: tuple[Count, ...] = ()
    """k: the first inputs are those of the reference's step k + 1."""
    own: bool = False
    """Whether the steps are those of an earlier attempt of this leg, because none of the reference's agreed."""


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
    """Where it was read from: its files, or the copies that nodes keep."""
    rng: Text
    param: Text
    params: bytes
    tensors: tuple[str, ...]
    """Names, in the order of `params` and `grads`."""
    sharded: bool = False
    """Whether a rank holds only part of some parameters."""
    in_part: bool = False
    """For a script that resumes by itself: optimizers stepped only some of the parameters then. A later attempt, which may
    begin when they step all or even fewer, has its `tensors` in this order."""
    seeded: bool = True
    """For a script that resumes by itself: it had seeded torch, or restored its random stream."""
    seeded_again: Text = ""
    """Where it seeded torch again after it had restored its stream ("train.py:12")."""
    parts: bool = False
    """Whether names in `tensors` contain the part of each tensor: ranks with the same name then hold the same part."""
    canary: Text | None = None
    """Digest of kernels' results on fixed inputs, in this process."""
    entered_s: float | None = None
    """When the rank had built its training objects and was about to read its checkpoint."""
    digests: Digests | None = None
    """Digests of the restored state."""
    state: str = ""
    """Digest of the optimizers' state, for a script that resumes by itself."""
    rates: tuple[HexFloat, ...] = ()
    """Learning rates at its first forward pass: a script that sets them after that pass steps with others."""
    buffers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests by name, at a restart of a script that resumes by itself."""
    optimizers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the state of each, if there are several; at the same starts."""
    scheduled: bool = True
    """Whether a torch scheduler sets the learning rates; in the first attempt of a script that resumes by itself."""
    found: Found | None = None
    """For a script that resumes by itself: position.step then follows this. None at the very first start."""

    def __post_init__(self) -> None:
        expect_words(self.params, self.tensors)


class ProbeRecord(TraceRecord, frozen=True, kw_only=True, tag="probe"):
    """Rank 0's finding about its loader's samples; see chaosrun.observe.probe."""

    items: Literal["independent", "global_rng", "draws", "never_repeats", "unknown"]
    detail: str


class SourceRecord(TraceRecord, frozen=True, kw_only=True, tag="source"):
    """The state of the script's samplers and dataset when an epoch, or the rest of one, was opened."""

    epoch: Count
    own: str | None
    held: Mapping[str, str]


class LoaderWorkersRecord(TraceRecord, frozen=True, kw_only=True, tag="loader_workers"):
    epoch: Count
    workers: tuple[Mapping[str, Text] | None, ...]
    """By worker, a digest of each stream's state after worker_init_fn; None for one that did not report it."""


class BucketsRecord(TraceRecord, frozen=True, kw_only=True, tag="buckets"):
    step: Count
    layout: tuple[tuple[int, ...], ...] | None
    """Indices of parameters; None without DDP."""
    primed: bool
    left: Literal["hook_state", "accumulation_hook"] | None = None
    """Why chaosrun left the buckets as DDP makes them."""
    left_by: str = ""
    """The name of the hook, or of the parameter that has one."""


class StepRecord(TraceRecord, frozen=True, kw_only=True, tag="step"):
    step: AtLeastOne
    epoch: Count
    batches: Count
    """Batches done in this epoch, including this step's."""
    time_s: float
    ids: tuple[tuple[Any, ...] | None, ...] | None
    """Sample ids of each micro-batch, as far as they are known."""
    batch: Annotated[tuple[Text, ...], Meta(min_length=1)]
    """Digest of each micro-batch; if it holds tensors and other values, "/" and the digest of the tensors alone follow."""
    rng: Text
    """Digest of the random streams before the step's first micro-batch."""
    loss: tuple[HexFloat, ...]
    """Loss of each micro-batch; empty for a step whose batch the script skipped."""
    lr: tuple[HexFloat, ...]
    """Learning rate of each parameter group, as the optimizer used it."""
    grad: str
    grads: bytes
    """Reduced and clipped, as the optimizer saw them. lr and grad are empty for a step without an optimizer step."""
    param: Text
    params: bytes
    """After the step. `grads` and `params` are empty at steps for which they are not kept."""
    items: AtLeastOne | None = None
    """Items in the step's window over all ranks: each loss is then a sum / items, and they add up. None: losses are means."""
    state: str = ""
    """Digest of the optimizers' state after the step, for a script that resumes by itself."""
    settings: str = ""
    """Digest of the optimizers' settings in this step, without learning rates."""
    began: str = ""
    """Digest of the parameters at the beginning of the step, if the script had changed them after the step before (clipped
    them, say). Under `chaosrun.attach` only after a checkpoint."""
    fetched: tuple[tuple[Any, ...] | None, ...] | None = None
    """Sample ids, if known, of the loader's batch for each micro-batch that differs from it: the script makes its inputs from
    that batch (it normalises, mixes, adds noise). Not compared."""
    stepped: tuple[str, ...] = ()
    """If a script has several optimizers, those that made this step, in order. Not compared."""
    attempt: int = 0
    rank: int = 0
    """Both those of its file."""

    @property
    def tensors(self) -> list[str]:
        """For each micro-batch, the digest of its tensors if it also holds other values; else ""."""
        return [digest.partition("/")[2] for digest in self.batch]

    @property
    def knows_ids(self) -> bool:
        """Whether the sample ids of every micro-batch are known."""
        return self.ids is not None and None not in self.ids and len(self.ids) == len(self.batch)


class StateRecord(TraceRecord, frozen=True, kw_only=True, tag="state"):
    """The complete state at a step; between two checkpoints, for drills that may end there. See `protocol.early_end`."""

    step: Count
    time_s: float
    digests: Digests | None = None
    own: str = ""
    """Digest of all state that the script keeps in addition; "" if it was not taken. See `observe.own`."""
    unseen: tuple[str, ...] = ()
    """State that has no digest."""


class CheckpointRecord(StateRecord, frozen=True, kw_only=True, tag="checkpoint"):
    name: str
    duration_s: float
    """How long the training waited, including for the rest of the previous save."""
    pending: bool = False
    """Whether the save continued in the background: a `committed` record says when it ended."""
    because: str = ""
    """Why the training waited for a save that should have run in the background."""
    changed: Mapping[str, str] = msgspec.field(default_factory=dict)
    """Live state that the save itself changed, by component ("mode": the modules' mode, which no checkpoint holds)."""
    hooks: tuple[str, ...] = ()
    """The script's hooks, if the save changed something."""

    def __post_init__(self) -> None:
        if checkpoint_step(self.name) != self.step:
            raise ValueError(f"checkpoint {self.name} is said to be of step {self.step}")

    @property
    def by_itself(self) -> bool:
        """Whether only values of registered objects changed, without a hook of the script: their state_dict() differs each
        time."""
        return self.changed.keys() == {"registered"} and not self.hooks

    @property
    def effect(self) -> str:
        """ "model 0.bias and 3 more (hooks: rounding)"."""
        hooks = f" (hooks: {', '.join(self.hooks)})" if self.hooks else ""
        return ", ".join(f"{component} {names}" for component, names in self.changed.items()) + hooks


class CommittedRecord(TraceRecord, frozen=True, kw_only=True, tag="committed"):
    """The checkpoint of this step, saved in the background, was seen to be committed."""

    step: Count
    digests: Digests | None = None
    """Digests of its state of this rank, if the checkpoint's own record has none. Readers find them in that record."""


class SaveRecord(TraceRecord, frozen=True, kw_only=True, tag="save"):
    """The script began, or finished, saving one of its own files or folders."""

    step: Count
    path: str
    """Relative to the leg's output or working folder, if it is in one."""
    how: str
    """The function that saved it: "torch.save", "safetensors", "dcp", "open", …"""
    time_s: float
    done: bool
    held: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """The values that it saved, if observed, by path: readable if short, else digests."""
    buffers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the model's buffers, by name, when the save began; in the first record of a step whose values were
    observed."""
    optimizers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the state of each, if there are several, at the same moment."""
    trained: tuple[str, ...] = ()
    """The folders in `held` that belong to trained models, as far as their values show."""
    aside: bool = False
    """Whether another thread than the training's saved it."""
    before: str = ""
    """For a rename, its previous path, in the form of `path`."""


class SavedRecord(TraceRecord, frozen=True, kw_only=True, tag="saved"):
    """The script has finished this step, after which it saved something: it continues to train, or ends."""

    step: Count
    time_s: float


class HoldingsRecord(TraceRecord, frozen=True, kw_only=True, tag="holdings"):
    """A script's state other than tensors at the beginning of this step: all of it at an attempt's first step, later only
    changes."""

    step: AtLeastOne
    modules: Mapping[str, str] = {}
    """Settings of its modules, if it resumes by itself: by path, a setting's text; "": it no longer exists."""
    values: Mapping[str, str] = {}
    """Its plain values, if a restart may resume at this step: see `observe.script_values`; "": no longer found, as it is out of
    scope, or behind too many others."""
    streams: str = ""
    """Digest of the random streams before the first micro-batch after a save inside this step: a restart from it begins so."""


class EndRecord(TraceRecord, frozen=True, kw_only=True, tag="end"):
    step: Count
    position: Position
    time_s: float
    digests: Digests
    """model, buffers, optimizer by tensor; scheduler, rng and registered by name."""
    checkpoint: str | None
    """The final one."""
    outside: tuple[str, ...] = ()
    """State that the training changed and no checkpoint holds; for rank 0 of a leg without faults."""
    optimizers: Mapping[str, Text] = msgspec.field(default_factory=dict)
    """Digests of the state of each, if a script resumes by itself and has several."""


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
    """Successive steps of one trace: their place in its file, and their digests (xxh3, big-endian)."""

    first: AtLeastOne
    count: AtLeastOne
    at: Count
    size: Count
    others: tuple[Count, ...]
    """Offsets in its bytes at which records other than steps begin."""
    knows_ids: bool
    """Whether the sample ids of every step are known."""
    param: bytes
    """Digest of the parameters' digests after each step."""
    digest: bytes
    """Digest of everything that is compared between legs, so not of times. Empty, like `param`, for part of a block."""
    running: bytes = b""
    """Running digest of the file up to here: of the previous block's, of the fields above, and of the block's bytes."""

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
    """Including those of checkpoints."""
    checkpoints: tuple[CheckpointRecord, ...] = ()
    commits: tuple[CommittedRecord, ...] = ()
    """For checkpoints that were pending."""
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
    def steps(self) -> StepsByNumber:
        return StepsByNumber(self.spans)

    def tensor(self, index: int) -> str | None:
        """Name of the tensor at `index` of `params` and `grads`."""
        return self.start.tensors[index] if self.start and index < len(self.start.tensors) else None


def expect_words(words: bytes, tensors: Sequence[str], where: str = "", what: str = "fingerprints") -> None:
    """Raises ValueError unless there is one for each tensor."""
    if not tensors or len(words) != len(tensors) * WORD_BYTES:
        raise ValueError(f"{where}{len(words) / WORD_BYTES:g} {what} of {len(tensors)} tensors")
