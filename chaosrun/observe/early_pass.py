"""Forward passes, and those before the first optimizer was made, or that give lazy layers their shapes: such a pass builds or
measures something, or belongs to the first step, whose optimizer is made only after it."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn.parameter import is_lazy

from chaosrun.observe import hooks
from chaosrun.observe.modes import outside_modes
from chaosrun.observe.rng import capture_rng, restore_rng


class Pass(NamedTuple):
    """A call of an outermost module."""

    module: torch.nn.Module
    arguments: list[Any]
    """Those given by position, and those given by name."""

    @property
    def comes_early(self) -> bool:
        """Whether it is an early pass, if made before the first step."""
        return not hooks.optimizers() or any(is_lazy(each) for each in self.module.parameters())


class EarlyPass:
    """The pass, the first root of its backward pass once that was made, and the random streams from before the pass."""

    def __init__(self, call: Pass) -> None:
        self.call = call
        self.losses: list[torch.Tensor] = []
        self._device = next(call.module.parameters()).device
        self._streams = capture_rng(self._device)

    def note_backward(self, roots: Sequence[torch.Tensor]) -> None:
        with outside_modes():
            self.losses = [root.detach() for root in roots[:1]]

    @contextlib.contextmanager
    def with_its_rng(self) -> Iterator[None]:
        """Within the block the random streams are those from before the pass, as a step's record holds them."""
        now = capture_rng(self._device)
        restore_rng(self._streams, self._device)
        try:
            yield
        finally:
            restore_rng(now, self._device)


def scalar(root: torch.Tensor) -> torch.Tensor:
    """A loss as one number: the sum of a non-scalar root, the local part of a sharded one."""
    own = getattr(root, "_local_tensor", root).detach()
    return own if own.numel() == 1 else own.double().sum()
