"""Where in the training a job stands. accelerate stores none of it (hazard S4); chaosrun owns it."""

from chaosrun.records.codec import Count, Record


class Position(Record, frozen=True, kw_only=True, omit_defaults=False):
    epoch: Count = 0
    batches: Count = 0
    """Done in this epoch, on this rank."""
    step: Count = 0
    """Optimizer steps that are complete."""

    def normalised(self, batches_per_epoch: int | None) -> "Position":
        """The end of an epoch is the beginning of the next one (hazards D13, D19)."""
        if batches_per_epoch is not None and self.batches >= batches_per_epoch:
            return Position(epoch=self.epoch + 1, step=self.step)
        return self
