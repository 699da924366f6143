"""The hazard of the catalogue (docs/hazards.md) that most likely caused a difference: a suspicion, no proof. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from chaosrun.records.inspection import Quantity
from chaosrun.verify.check import Divergence
from chaosrun.verify.inspection import QuantityDifference
from chaosrun.verify.restored import is_scaler, is_setting

CATALOGUE = "docs/hazards.md"

HAZARDS: Mapping[str, str] = {
    "D1": "the epoch is not part of what is saved",
    "D3": "the epoch is repeated after the skipped loader",
    "D5": "the shuffle cannot be seeded",
    "D7": "the ranks shuffle differently",
    "D8": "the count of batches to skip is wrong",
    "D13": "the position at the end of an epoch is not the beginning of the next one",
    "D14": "the cut of the data into batches has changed",
    "D15": "a sampler or a stream of the script's own that no set_epoch reaches",
    "D19": "a resume at the end of an epoch drops an epoch",
    "D21": "an order that follows hashes, which each process has otherwise",
    "R1": "starting an iterator draws from the global random stream",
    "R2": "the random state was not loaded, and nobody said so",
    "R4": "a generator that the global seed does not reach",
    "R5": "augmentation draws from a random stream that is not restored",
    "R7": "evaluation or logging draws random numbers on one side only",
    "R8": "a rank takes another rank's random state",
    "G1": "gradients accumulated before the checkpoint are lost",
    "G2": "the place within the accumulation window is not restored",
    "O3": "the optimizer's state is not loaded, or is cast on load",
    "O4": "what is loaded and what the constructor says overwrite each other in param_groups",
    "O5": "parameters in another order load silently",
    "O6": "another implementation of the same optimizer step",
    "O7": "the GradScaler's state is not each rank's own",
    "O8": "state that nobody registered",
    "O9": "the schedule follows the clock",
    "O10": "the scheduler was not loaded, or was built after the load",
    "C1": "gradients are reduced in another bucket layout",
    "C3": "DistributedDataParallel has other settings after a restart",
    "C7": "buffers differ between ranks, and one rank's are saved for all",
    "K4": "a kernel is not deterministic",
    "S1": "a save that is not atomic",
    "S3": "a load that failed halfway and went on",
    "S6": "another entry was taken for the newest checkpoint",
    "S8": "files of different steps in one checkpoint",
    "S9": "storage that the ranks do not see alike",
    "S10": "tied weights came apart, or buffers are in no state dict",
    "S11": "tensors change while they are saved, or the state after the steps is not theirs",
}

_BY_QUANTITY: Mapping[Quantity, str] = {
    "sample ids": "D1",
    "batch": "R5",
    "rng": "R2",
    "parameters before": "S3",
    "buffers": "C7",
    "optimizer state": "O3",
    "scheduler state": "O10",
    "registered state": "O8",
    "loss": "K4",
    "local gradients": "K4",
    "reduced gradients": "C1",
    "learning rate": "O9",
    "parameters after": "O6",
}
_KIND_QUANTITIES: Mapping[str, tuple[Quantity, ...]] = {
    "data order": ("sample ids", "batch"),
    "batch": ("sample ids", "batch"),
    "position": ("sample ids", "batch"),
    "rng": ("rng",),
    "weights": ("parameters before",),
    "buffers": ("buffers",),
    "registered": ("registered state",),
    "learning rate": ("learning rate", "scheduler state", "optimizer state"),
    "optimizer": ("optimizer state", "parameters after"),
    "loss": ("loss",),
    "gradient": ("reduced gradients",),
}
"""Quantities that a divergence of this kind is about: its cause then says more than the quantity alone."""
STAGES = frozenset({"forward_pass", "gradient", "bucket_layout", "learning_rate", "optimizer_update"})
"""Causes that only name the part of a step in which the difference showed. Any other cause stays, even if a replay finds
more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hazard:
    row: str
    """Its id in the catalogue: "C1"."""
    what: str

    @property
    def link(self) -> str:
        return f"{CATALOGUE}#{self.row.lower()}"

    def to_json(self) -> dict[str, object]:
        return {**asdict(self), "link": self.link}


def hazard_of(
    finding: QuantityDifference | None, divergence: Divergence | None, *, after_restore: bool, repeats: bool
) -> Hazard | None:
    """The likeliest hazard. `after_restore`: the finding is of the first step after one; `repeats`: the job repeats itself."""
    row = None
    if finding is not None:
        row = _of_finding(finding, divergence, after_restore=after_restore, repeats=repeats)
    elif divergence is not None:
        row = divergence.reason.hazard
    return Hazard(row=row, what=HAZARDS[row]) if row else None


def _of_finding(finding: QuantityDifference, divergence: Divergence | None, *, after_restore: bool, repeats: bool) -> str:
    quantity, name = finding.quantity, finding.tensor
    same_matter = divergence is not None and quantity in _KIND_QUANTITIES.get(divergence.kind, ())
    by_cause = divergence.reason.hazard if divergence and same_matter else None
    known = divergence.reason.hazard if divergence and repeats and divergence.code not in STAGES else None
    match quantity:
        case "sample ids" if by_cause == "D1" and not after_restore:
            return "D3"
        case "rng" if not repeats and not after_restore:
            return "R4"
        case "rng" if by_cause == "R7" and after_restore and (name, finding.tensors) == ("torch", 1):
            return "R1"
        case _ if known:
            return known
        case "optimizer state" if is_scaler(name):
            return "O7"
        case "optimizer state" if is_setting(name) and after_restore:
            return "O4"
        case "optimizer state" | "parameters after" if repeats and not after_restore and by_cause in ("O6", "O9"):
            # A clock, or a faulty optimizer, would also differ between runs without faults.
            return "O8"
        case "optimizer state" if is_setting(name):
            return "O4"
        case "loss" if repeats and after_restore:
            # A kernel that errs would err without a restore, too.
            return "O8"
        case "local gradients" if divergence and divergence.reason.hazard == "O8":
            return "O8"
        case "reduced gradients" if by_cause == "K4" and after_restore:
            return "G1"
        case "reduced gradients" if by_cause == "K4":
            return "C1"
        case _:
            return by_cause or _BY_QUANTITY[quantity]
