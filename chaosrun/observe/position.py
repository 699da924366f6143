"""Where in the training a job stands. accelerate stores none of it (hazard S4); chaosrun owns it."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """`epoch` counts from 0; `batches` are those done in this epoch, on this rank; `step` counts completed optimizer steps."""

    epoch: int = 0
    batches: int = 0
    step: int = 0

    def to_json(self) -> dict[str, int]:
        return asdict(self)

    def normalised(self, batches_per_epoch: int | None) -> "Position":
        """The end of an epoch is the beginning of the next one (hazards D13, D19)."""
        if batches_per_epoch is not None and self.batches >= batches_per_epoch:
            return Position(epoch=self.epoch + 1, batches=0, step=self.step)
        return self
