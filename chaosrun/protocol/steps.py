"""The steps of one rank of one attempt, however they are counted: records each step, passes its fault points and sends the
rank's heartbeat. `recorder` counts them for a loop under `chaosrun.attach`, `script` for an unchanged script.
"""

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from chaosrun.errors import MisuseError
from chaosrun.observe.hooks import is_captured
from chaosrun.observe.resumed_at import RankStart
from chaosrun.observe.trace import Observer
from chaosrun.protocol.bucket_priming import BucketPrimer
from chaosrun.protocol.context import WorkerContext
from chaosrun.records.layout import RUN
from chaosrun.records.position import Position
from chaosrun.records.traces import BucketsRecord, SaveRecord
from chaosrun.wording import hiding

if TYPE_CHECKING:
    from chaosrun.observe.found_state import FoundState
    from chaosrun.protocol.state import TrainingState


def refuse_captured() -> None:
    """Raises MisuseError where an optimizer's step becomes part of a CUDA graph, whose replays cannot be observed."""
    if is_captured():
        raise MisuseError(
            "an optimizer steps inside a CUDA graph: what a replay computes cannot be recorded",
            hint="drill the job without that graph, its checkpoints are the same; or capture forward and backward passes alone "
            "(torch.cuda.make_graphed_callables, torch.compile(mode='reduce-overhead')), which is recorded",
        )


def why_added(is_restarted: bool) -> str:
    """What to do about parameters that an optimizer steps and that no trained model held at the first step. A restart steps
    them where the first start did not."""
    if is_restarted:
        return (
            "an optimizer that is unpickled apart from its model holds copies of the parameters, and steps these: save both in "
            "one file, or load the optimizer's state dict; and build all that is trained before a restart's first step"
        )
    return (
        "build all that is trained before the first step, all layers of a net that grows among it; keep models that are "
        "trained one after the other in one nn.ModuleList; drill each fold by itself; find a learning rate in a run of its "
        "own, or on the model itself (docs/job.md says how)"
    )


def why_no_step(context: WorkerContext, has_trained: bool) -> str:
    """What to do about a script that ended without a step of any optimizer. `has_trained`: in an earlier attempt."""
    if has_trained:
        return (
            "it trained before it was killed, and has ended now without building an optimizer: have it build the model and "
            "load its checkpoint even when all steps are made, so that what training ends with can be compared"
        )
    files = context.file_guard
    if files and files.began_with:
        return hiding(files.began_with)
    done = "the job is done if a checkpoint from before the run holds all its steps; else " if context.order.leg == RUN else ""
    ranks = context.order.world_size
    each = f"; each of {ranks} ranks has to train: one that only serves others cannot be drilled" if ranks > 1 else ""
    return (
        f"{done}name the script that trains (a step is a call of an optimizer of torch: a loop that changes its weights by "
        "itself, or a library's own class of optimizer, makes none: of fastai, take OptimWrapper with "
        f"opt=torch.optim.AdamW); a process that it starts by itself is drilled by its command{each}"
    )


class Steps:
    """The steps of one rank. `done`: the last complete step; the one after it is being computed."""

    def __init__(self, state: "TrainingState | FoundState", context: WorkerContext, device: torch.device) -> None:
        self.order = context.order
        self.faults = context.faults
        self.faults.training = state
        self.heart = context.heart
        self.observer = Observer(state, context.order, context.leg, device)
        self._files = context.files
        self.done = 0
        self.ended = False
        self._saved_within = -1
        alone = context.order.by != "script" or context.order.world_size == 1
        self._signal = None if alone else context.leg.attempt(context.order.attempt).saved
        """Touched by a rank that saves: where a restart may go on, all of them look at the script's values."""
        self._heard_ns = 0

    def start(self, position: Position, began: RankStart, **about: Any) -> None:
        """Write the `start` record; `about`: see `Observer.begin`."""
        self.done = position.step
        self.heart.beat("restored", position.step)
        self.observer.begin(position, began, **about)
        if self._files:
            # The script's imports are done by now.
            self._files.wrap_native_readers()
            if self.order.attempt == 1:
                self._files.look_at_mappings()

    def open_window(self) -> None:
        """Note the first batch of a step, unless that was done."""
        if self.observer.is_between_steps:
            self.faults.pace.begin()
            self.observer.open_window()
            self.observer.holdings(self.done + 1, saved=self._has_another_saved())
            self.faults.reach("fetch", self.done + 1)
        elif self._saved_within == self.done:
            # A restart from that save is first seen at this pass.
            self._saved_within = -1
            self.observer.holdings(self.done + 1, settings=False, within=True)

    def save(self, save: SaveRecord) -> None:
        """Record a save of a script's own."""
        self.observer.write(save)
        if self._signal:
            with contextlib.suppress(OSError):  # a full disk: the other ranks hear of no save
                self._signal.touch()
        if not (save.aside or self.observer.is_between_steps or self._saved_within == save.step):
            # A forward pass behind the update (a memory's, an evaluation's) opened the next step before the save.
            self._saved_within = save.step
            self.observer.holdings(save.step + 1, settings=False)

    def _has_another_saved(self) -> bool:
        """Whether any rank has saved since this was asked last."""
        try:
            now_ns = self._signal.stat().st_mtime_ns if self._signal else 0
        except OSError:  # none has
            now_ns = 0
        before_ns, self._heard_ns = self._heard_ns, now_ns
        return now_ns != before_ns

    def before_synchronised_backward(self, loss: torch.Tensor | None = None) -> None:
        """`loss`: where the script's own call of `backward` is known."""
        self.faults.reach("forward", self.done + 1)
        self.heart.beat("backward", self.done + 1)
        # Not for FSDP's parameters: their gradients do not come through autograd.
        began = self.observer.parameters if loss is None else [loss]
        self.faults.fire_inside_reduce(began, self.done + 1)

    def before_optimizer_step(self, stepped: Iterable[torch.Tensor] | None = None) -> None:
        """Note that an optimizer is about to apply these gradients at this learning rate; see
        `Observer.before_optimizer_step`."""
        self.heart.beat("optimizer", self.done + 1)
        if not self.observer.has_met_an_optimizer:
            # Once per step, for any number of optimizers.
            self.faults.reach("optimizer", self.done + 1)
        self.observer.before_optimizer_step(stepped)

    def record(
        self, position: Position, primer: BucketPrimer | None, *, items: int | None = None, stepped: Iterable[int] = ()
    ) -> None:
        """Record a complete optimizer step. `items`: the items of its window over all ranks, None for a loop that does not
        count them. `primer` is None for a skipped batch: nothing went through DDP. `stepped`: see `Observer.step`."""
        self.heart.beat("record", position.step)
        if primer and primer.is_news:
            about = {"step": position.step, "layout": primer.layout(), "primed": primer.primed}
            left: dict[str, Any] = {"left": primer.left.code, "left_by": primer.left.name} if primer.left else {}
            self.observer.write(BucketsRecord(**about, **left))
        self.observer.step(position, items=items, stepped=stepped)
        self.done = position.step
        self.faults.reach("record", position.step)
        self.heart.beat("own", position.step)

    def end(self, position: Position, checkpoint: str | None = None) -> None:
        """Record that the training is complete."""
        if self._files:
            self._files.look_at_mappings()
        self.observer.end(position, checkpoint=checkpoint)
        self.heart.beat("ended", position.step)
        self.ended = True
