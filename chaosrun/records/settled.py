"""When the rest of a leg follows from what is known: its complete state is the reference's at the same step, bit for bit.

The worker asks this to know when to leave, the verdict to know whether that was right. Pure.
"""

from typing import Literal

from chaosrun.records.traces import CheckpointRecord

SETTLED, DIFFERED = "settled", "differed"
"""How such a leg, and each of its ranks, ends: all of its state is the reference's; it is not, for good."""

State = Literal["equal", "differs", "unknown"]


def state_of(expected: CheckpointRecord | None, seen: CheckpointRecord | None) -> State:
    """Of one rank at one step, as two legs saved it. What a save itself changes (a hook of the script's) is never equal: what
    was digested before is not what the training goes on with. State of the script's own that differs is no difference yet (it
    may be a clock), and never equal."""
    if expected is None or seen is None or expected.digests is None or seen.digests is None:
        return "unknown"
    if expected.digests != seen.digests:
        return "differs"
    looked = expected.own and expected.own == seen.own and not (expected.unseen or seen.unseen)
    return "equal" if looked and not (expected.changed or seen.changed) else "unknown"
