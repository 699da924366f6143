"""began.json of a chaos leg: the reference's checkpoints that it was given to begin with, or why it was given none."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from chaosrun.errors import UsageError
from chaosrun.records.codec import Count, Record
from chaosrun.records.layout import LegLayout, checkpoint_step
from chaosrun.records.run_file import read_record
from chaosrun.records.traces import Digests, RankTrace


class Began(Record, frozen=True, kw_only=True, omit_defaults=False):
    v: Literal[1] = 1
    step: Count = 0
    """Of the newest of them, which its first attempt is to restore."""
    states: Mapping[str, str] = msgspec.field(default_factory=dict)
    """By checkpoint, `digest_of` what its manifest says; empty: the leg begins at the beginning."""
    why: str = ""
    """It was to begin at a checkpoint, and does not."""


def digest_of(ranks: Sequence[Digests]) -> str:
    """Of the complete state that a checkpoint holds, as digests of each rank's."""
    plain = [{name: dict(values) for name, values in rank.items()} for rank in ranks]
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def saved_in(traces: Sequence[RankTrace], name: str) -> list[Digests]:
    """What each rank recorded of this checkpoint's state. Raises LookupError where one did not, or its save changed it."""
    saved = [each for trace in traces for each in trace.checkpoints if each.name == name and not each.changed]
    states = [each.digests for each in saved if each.digests]
    if len(states) != len(traces):
        raise LookupError(f"{name} has no digests, or its save changed the training")
    return states


def read_began(leg: LegLayout, problems: list[str]) -> Began | None:
    """None of a leg that was given nothing; what is no such file becomes a problem."""
    if not leg.began.exists():
        return None
    try:
        began = read_record(leg.began, Began)
    except UsageError as error:
        problems.append(error.message)
        return None
    steps = [checkpoint_step(name) for name in began.states]
    if None in steps or began.step != max(filter(None, steps), default=0):
        problems.append(f"{leg.began}: names {', '.join(began.states) or 'nothing'}, which is not of step {began.step}")
        return None
    return began
