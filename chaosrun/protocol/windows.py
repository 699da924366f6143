"""Accumulation windows: the batches of one optimizer step, fetched ahead, their items counted over all ranks, reduced once.

A mean of means weighs an item by the size of its micro-batch (hazard G5). A window's loss is the sum over its items divided by
their number over all micro-batches and all ranks, so the same global batch gives the same gradient for any division into
workers × batch × accumulation, up to rounding by the order of summation.

Owns what a window is and what a script may do with it; knows nothing of positions, records and checkpoints.
"""

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, SupportsIndex

import torch
from accelerate import Accelerator

from chaosrun.errors import MisuseError
from chaosrun.protocol.state import is_sharded


@dataclass(frozen=True, slots=True)
class _Fetched:
    batch: Any
    ends_epoch: bool


class Window:
    """The micro-batches of one optimizer step on this rank. Made by `run.windows`; iterate it once, from begin to end."""

    def __init__(
        self,
        accelerator: Accelerator,
        models: Sequence[Any],
        fetched: Sequence[_Fetched],
        items: int,
        hand_out: Callable[[Any], None],
    ) -> None:
        self.items = items
        """Items of the window over all micro-batches and all ranks: what the sum of the losses is divided by."""
        self.shares: list[torch.Tensor] = []
        """Of each micro-batch done its sum / `items`, in float64: over micro-batches and ranks they add up to the loss."""
        self._accelerator = accelerator
        self._models = models
        self._fetched = fetched
        self._hand_out = hand_out
        self._handed_out = 0
        self._waits_for_backward = False
        self._complete = False
        self._loss: torch.Tensor | None = None

    def __len__(self) -> int:
        """Micro-batches, the same number on every rank; fewer than `accumulation_steps` at the end of an epoch."""
        return len(self._fetched)

    @property
    def loss(self) -> torch.Tensor:
        """This rank's share of the window's loss, float64: `accelerator.reduce(window.loss, "sum")` is the loss itself.

        Raises MisuseError before all micro-batches are done.
        """
        if not self._complete:
            raise MisuseError(
                f"the window was left after {len(self.shares)} of its {len(self._fetched)} micro-batches",
                hint="let the `for batch in window:` loop run to its end (no break), then step the optimizer and call run.step",
            )
        if self._loss is None:
            self._loss = torch.stack(self.shares).sum()
        return self._loss

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches; all but the last accumulate gradients without synchronisation.

        accelerate is notified of both ends when they come: of the window's, which its optimizers and schedulers use, and of the
        epoch's, which its loader has known since the window was fetched and by which `gather_for_metrics` truncates.
        """
        if self._handed_out:
            raise MisuseError(
                "a window was iterated twice", hint="its micro-batches are there once: keep what you need of them"
            )
        state = self._accelerator.gradient_state
        loader = state.active_dataloader
        try:
            for fetched in self._fetched:
                self._handed_out += 1
                last = self._handed_out == len(self._fetched)
                state._set_sync_gradients(last)
                if loader is not None:
                    loader.end_of_dataloader = fetched.ends_epoch
                self._hand_out(fetched.batch)
                self._waits_for_backward = True
                with ExitStack() as stack:
                    # DDP decides in the forward pass whether the following backward pass reduces.
                    for model in () if last else self._models:
                        stack.enter_context(self._accelerator.no_sync(model))
                    yield fetched.batch
                if self._waits_for_backward:
                    raise MisuseError(
                        f"the loop went on without window.backward(loss_sum) after micro-batch {self._handed_out} "
                        f"of {len(self._fetched)}",
                        hint="call window.backward once for every micro-batch, with the sum of the losses of its items",
                    )
            self._complete = True
        finally:
            state._set_sync_gradients(True)
            if loader is not None:
                loader.end_of_dataloader = self._fetched[-1].ends_epoch

    def backward(self, loss_sum: torch.Tensor, **kwargs: Any) -> None:
        """`accelerator.backward` for this micro-batch, scaled so that the reduced gradient is that of sum / global items.

        `loss_sum` is the sum of the losses of this micro-batch's items, a scalar: neither a mean nor divided by anything.
        Raises MisuseError outside a micro-batch, for a second call, and inside `accelerator.accumulate`.
        """
        if not self._waits_for_backward:
            again = 0 < len(self.shares) == self._handed_out and not self._complete
            raise MisuseError(
                "window.backward() was called twice for one micro-batch"
                if again
                else "window.backward() was called without a micro-batch",
                hint="call it once for every micro-batch: add up the losses before it",
            )
        if loss_sum.numel() != 1:
            raise MisuseError(
                f"window.backward() got a loss of shape {tuple(loss_sum.shape)}", hint="pass the sum, a scalar: reduction='sum'"
            )
        if self._accelerator.sync_gradients != (self._handed_out == len(self._fetched)):
            raise MisuseError(
                "accelerator.accumulate() was entered inside a window, which accumulates by itself",
                hint="leave `with accelerator.accumulate(model):` out of a run.windows() loop",
            )
        self._waits_for_backward = False
        self.shares.append(loss_sum.detach().double().reshape(()) / self.items)
        # DDP averages over the ranks: undo that.
        self._accelerator.backward(loss_sum / self.items * self._accelerator.num_processes, **kwargs)

    def shares_of(self, loss: torch.Tensor) -> list[torch.Tensor]:
        """`shares`, once complete. Raises MisuseError when they are not, or when `loss` is not this window's."""
        if loss is not self.loss:
            raise MisuseError("run.step() got another loss than the window's", hint="call run.step(window.loss)")
        return self.shares


class WindowCutter:
    """Cuts a rank's batches into windows, at the same places whichever step an attempt begins with."""

    def __init__(
        self, accelerator: Accelerator, models: Sequence[Any], *, steps: int, count: Callable[[Any], SupportsIndex]
    ) -> None:
        self.steps = steps
        self._accelerator = accelerator
        self._models = models
        self._count = count
        _check_settings(accelerator, models, steps, count)

    def cut(self, batches: Iterable[Any], hand_out: Callable[[Any], None]) -> Iterator[Window]:
        """Yield the windows of the rest of an epoch, which begins at a window's beginning. A collective for each window, and
        one more at the end. `hand_out` is called with each batch before the script gets it.

        Raises MisuseError when the ranks have different numbers of micro-batches, or when a window has no items.
        """
        source = iter(batches)
        while True:
            fetched = self._fetch(source)
            items = self._agree(sum(self._items(one.batch) for one in fetched), len(fetched))
            if not fetched:
                return
            if not items:
                raise MisuseError(
                    f"count() found no items in a window of {len(fetched)} micro-batches: its loss cannot be divided by them",
                    hint="leave samples without any target out of the dataset",
                )
            yield Window(self._accelerator, self._models, fetched, items, hand_out)

    def _fetch(self, source: Iterator[Any]) -> list[_Fetched]:
        """Up to `steps` batches. Stops at the epoch's last batch, not after it: asking for one more would end accelerate's
        bookkeeping of the epoch (`gather_for_metrics` needs it) before the window is trained on."""
        nothing = object()
        fetched: list[_Fetched] = []
        while len(fetched) < self.steps and not (fetched and fetched[-1].ends_epoch):
            batch = next(source, nothing)
            if batch is nothing:
                break
            loader = self._accelerator.gradient_state.active_dataloader
            fetched.append(_Fetched(batch, ends_epoch=loader is not None and loader.end_of_dataloader))
        return fetched

    def _items(self, batch: Any) -> int:
        counted = self._count(batch)
        try:
            items = operator.index(counted)
        except TypeError:
            items = -1
        if items < 0 or isinstance(counted, bool):
            raise MisuseError(
                f"count(batch) returned {counted!r}",
                hint="return the number of the batch's items that the loss sums over, an int",
            )
        return items

    def _agree(self, items: int, micro_batches: int) -> int:
        """The number of items over all ranks, exact: integers are summed."""
        if self._accelerator.num_processes == 1:
            return items
        mine = torch.tensor([[items, micro_batches]], dtype=torch.int64, device=self._accelerator.device)
        gathered: Any = self._accelerator.gather(mine)
        everybody: list[list[int]] = gathered.tolist()
        lengths = [length for _, length in everybody]
        if len(set(lengths)) > 1:
            raise MisuseError(
                f"the ranks have {', '.join(map(str, lengths))} micro-batches in the same window",
                hint="every rank needs as many batches as the others: keep even_batches=True, or drop_last=True",
            )
        return sum(count for count, _ in everybody)


def _check_settings(accelerator: Accelerator, models: Sequence[Any], steps: int, count: Callable[[Any], SupportsIndex]) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise MisuseError(
            f"run.windows() got accumulation_steps={steps!r}", hint="give the number of micro-batches, at least 1"
        )
    if not callable(count):
        raise MisuseError(
            f"run.windows() got count={count!r}",
            hint="give a function that counts the items of a batch: count=lambda batch: ...",
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise MisuseError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) would divide the loss again",
            hint="leave gradient_accumulation_steps out: accumulation_steps of run.windows() takes its place",
        )
    trained = [model for model in accelerator._models if _is_trained(model)]
    given = {id(_bare(accelerator, model)) for model in models}
    if any(id(_bare(accelerator, model)) not in given for model in trained):
        raise MisuseError(
            f"run.windows() got {len(models)} of {len(trained)} prepared models with parameters to train",
            hint="pass all that prepare() returned: run.windows(loader, model, ...)",
        )
    # accelerator.no_sync uses this attribute; torch.compile's wrapper passes it on. A sharded model always reduces by itself.
    loose = [model for model in models if _is_trained(model) and not (hasattr(model, "no_sync") or is_sharded(model))]
    if loose and accelerator.num_processes > 1:
        raise MisuseError(
            f"run.windows() got a {type(loose[0]).__name__} that is not under DDP: its synchronisation cannot be held back",
            hint="pass the model that prepare() returned, not the one that it was given",
        )


def _is_trained(model: torch.nn.Module) -> bool:
    return any(parameter.requires_grad for parameter in model.parameters())


def _bare(accelerator: Accelerator, model: torch.nn.Module) -> torch.nn.Module:
    return accelerator.unwrap_model(model, keep_torch_compile=False)
