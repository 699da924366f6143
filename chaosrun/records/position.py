"""A job's position in the training. accelerate stores none of it (hazard S4); chaosrun owns it."""

from chaosrun.records.codec import Count, Record


class Position(Record, frozen=True, kw_only=True, omit_defaults=False):
    epoch: Count = 0
    batches: Count = 0
    """Batches completed in this epoch, on this rank."""
    step: Count = 0
    """Completed optimizer steps."""

    def normalised(self, batches_per_epoch: int | None) -> "Position":
        """The same position, with the end of an epoch as the beginning of the next (hazards D13, D19)."""
        if batches_per_epoch is not None and self.batches >= batches_per_epoch:
            return Position(epoch=self.epoch + 1, step=self.step)
        return self
