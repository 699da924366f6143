"""Whether a leg may end early: its complete state equals the reference's at the same step bit for bit. Pure."""

from typing import Literal

from chaosrun.records.traces import CheckpointRecord, StateRecord
from chaosrun.wording import listed

SETTLED, DIFFERED = "settled", "differed"
"""How a leg that ends early, and each of its ranks, ends: its state equals the reference's, or differs for good."""

State = Literal["equal", "differs", "unknown"]


def state_of(expected: StateRecord | None, seen: StateRecord | None) -> tuple[State, str]:
    """Compares the state of one rank at one step in two legs, and says why it is not equal. State that a save itself changes is
    never equal. Other state of the script that differs is "unknown": it may be a clock."""
    if expected is None or seen is None or expected.digests is None or seen.digests is None:
        return "unknown", "no digests of its state"
    if expected.digests != seen.digests:
        return "differs", "its saved state is not the reference's"
    if unseen := (*expected.unseen, *seen.unseen):
        return "unknown", f"it keeps what has no digest: {listed(list(dict.fromkeys(unseen)), 2)}"
    if not expected.own or expected.own != seen.own:
        return "unknown", "what the script keeps beside its checkpoints is not what it was"
    if any(isinstance(each, CheckpointRecord) and each.changed for each in (expected, seen)):
        return "unknown", "a save changes the training"
    return "equal", ""
