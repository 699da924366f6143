"""Why an attempt ended unplanned: what `lifecycle` decides by. Pure."""

from dataclasses import dataclass
from typing import Literal

from chaosrun.records.events import EndCode, Outcome

Reach = Literal["before", "in", "beyond"]
"""How far an attempt had come: before the restore of its checkpoint, in it, or beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a planned fault. The same kind of error at the same step is the script's own doing."""

    message: str
    code: EndCode | None = None
    """None: nothing more precise than the outcome is known."""
    hint: str | None = None
    outcome: Outcome = "recovery_failed"
    """What the leg ends as if this is not worth another attempt."""
    rank: int | None = None
    step: int | None = None
    error: tuple[str, str] | None = None
    """Type and message of an exception; None for a death that named no error."""
    reducer: bool = False
    """Raised by DDP's reducer: the script's doing, and another attempt in DETAIL tells which parameter it is about."""
    refused: bool = False
    """Another attempt would do the same, or hide it: chaosrun refuses what the script does, or it cannot even begin."""
    leaving: bool = False
    """It left in order, on a preemption notice, and the other ranks leave with it: nobody needs to be stopped."""
    stage: str | None = None
    """Of a hang: what the rank was doing when it stopped."""
    reach: Reach = "beyond"
    of_node: bool = False
    """A node was lost: neither the script nor the checkpoint is the reason."""
    raised_s: float | None = None
    """When the rank wrote the error down, wall clock; of deaths seen together the first to raise is the cause."""

    def repeats(self, earlier: "Failure | None") -> bool:
        """The same type of error at the same step, whose message may name a rank, a port or an address; or a hang at the same
        place."""
        if earlier is None or self.step != earlier.step:
            return False
        if self.error and earlier.error:
            return self.error[0] == earlier.error[0]
        return self.code == earlier.code == "hung" and self.stage == earlier.stage
