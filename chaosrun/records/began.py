"""began.json of a chaos leg: the checkpoints of the reference that it was given to start from, or why it got none."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from chaosrun.records.codec import Count, Record
from chaosrun.records.layout import LegLayout, checkpoint_step
from chaosrun.records.run_file import read_record, readable
from chaosrun.records.traces import Digests, RankTrace


class Began(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    step: Count = 0
    """Step of the newest given checkpoint, which the first attempt is to restore."""
    states: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By checkpoint name, `digest_of` the digests in its manifest; empty: the leg starts at step 0."""
    why: str = ""
    """Why the leg does not start at a checkpoint although that was requested."""


def digest_of(ranks: Sequence[Digests]) -> str:
    """One digest of a checkpoint's complete state; `ranks`: the digests of each rank's state."""
    plain = [{name: dict(values) for name, values in rank.items()} for rank in ranks]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def saved_in(traces: Sequence[RankTrace], name: str) -> list[Digests]:
    """The digests of this checkpoint's state that each rank recorded. Raises LookupError if one did not, or the save changed
    it."""
    saved = [each for trace in traces for each in trace.checkpoints if each.name == name and not each.changed]
    states = [each.digests for each in saved if each.digests]
    if len(states) != len(traces):
        raise LookupError(f"{name} has no digests, or its save changed the training")
    return states


def read_began(leg: LegLayout, problems: list[str]) -> Began | None:
    """Read began.json; None for a leg without it. A damaged file becomes a problem."""
    began = readable(lambda: read_record(leg.began, Began), problems) if leg.began.exists() else None
    steps = [checkpoint_step(name) for name in began.states] if began else []
    if began and (None in steps or began.step != max(filter(None, steps), default=0)):
        problems.append(f"{leg.began}: names {', '.join(began.states) or 'nothing'}, which is not of step {began.step}")
        return None
    return began
