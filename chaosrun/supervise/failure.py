"""Why an attempt ended unplanned: the input of `lifecycle`'s decisions. Pure."""

from dataclasses import dataclass
from typing import Literal

from chaosrun.errors import comes_each_time
from chaosrun.records.events import EndCode, Outcome

Reach = Literal["before", "in", "beyond"]
"""How far an attempt had come: before the restore of its checkpoint, in it, or beyond it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an attempt ended without a planned fault. The same type of error at the same step again is the script's fault."""

    message: str
    code: EndCode | None = None
    """None: nothing more precise than the outcome is known."""
    hint: str | None = None
    outcome: Outcome = "recovery_failed"
    """How the leg ends if no further attempt is made."""
    rank: int | None = None
    step: int | None = None
    error: tuple[str, str] | None = None
    """Type and message of an exception; None for a death that named no error."""
    reducer: bool = False
    """Raised by DDP's reducer: the script's fault; another attempt in DETAIL mode names the parameter."""
    refused: bool = False
    """Another attempt would fail the same way, or hide it: chaosrun refuses what the script does, or the script cannot even
    begin."""
    leaving: bool = False
    """It exited cleanly on a preemption notice, and the other ranks exit with it: none needs to be stopped."""
    stage: str | None = None
    """For a hang: what the rank was doing when it stopped."""
    reach: Reach = "beyond"
    of_node: bool = False
    """A node was lost: neither the script nor the checkpoint is the reason."""
    raised_s: float | None = None
    """When the rank recorded the error, wall clock; of deaths seen together the first to raise is the cause."""

    def repeats(self, earlier: "Failure | None") -> bool:
        """The same type of error at the same step, whose message may name a rank, a port or an address; or a hang at the same
        place."""
        if earlier is None or self.step != earlier.step:
            return False
        if self.error and earlier.error:
            return self.error[0] == earlier.error[0]
        return self.code == earlier.code == "hung" and self.stage == earlier.stage

    def recurs(self, earlier: "Failure | None") -> bool:
        """The same mistake of the script's code again, at whatever step."""
        name = self.error[0] if self.error and earlier and earlier.error and self.error[0] == earlier.error[0] else ""
        return self.outcome == "user_error" and comes_each_time(name)
