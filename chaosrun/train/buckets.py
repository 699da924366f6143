"""Primes DDP's gradient buckets, so that the first step after a restart reduces in the same order as it did without one.

Stock DDP reduces its first iteration in one layout (registration order) and all later ones in another (arrival order). From
three ranks on, gloo's ring and NCCL's split a bucket by position, so the layout decides the order of summation and with it the
bits: a resumed job's first step differs from the same step of an uninterrupted one (hazard C1, measured: no elements differ at
2 ranks, 48% at 3, 67% at 4). The remedy: on the first synchronised step of every attempt, the reference's included, rebuild the
buckets at once and send the gradients through them again.

This reaches into DDP's private reducer. `prime` checks the outcome (the layout is read back) instead of trusting it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from chaosrun.errors import ChaosrunError

__all__ = ["BucketPrimer", "bucket_layout"]


def bucket_layout(model: DistributedDataParallel) -> list[list[int]]:
    """Indices into the parameters that need gradients, bucket by bucket, in the order in which they lie in the bucket."""
    index = {id(parameter): number for number, parameter in enumerate(p for p in model.parameters() if p.requires_grad)}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    return [[index[id(parameter)] for parameter in bucket.parameters()] for bucket in buckets]


class BucketPrimer:
    """Stands before `accelerator.backward` until the first synchronised backward pass has been made.

    accelerate keeps the bare models and hands the DDP wrappers to the script only, so each wrapper is met at its first
    forward pass.
    """

    def __init__(self, models: Sequence[torch.nn.Module]) -> None:
        self._models: list[DistributedDataParallel] = []
        self._waiting: list[DistributedDataParallel] = []
        self._hooks: dict[int, torch.utils.hooks.RemovableHandle] = {}
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for model in models:
                bare = model.module if isinstance(model, DistributedDataParallel) else model
                self._hooks[id(bare)] = bare.register_forward_pre_hook(self._meet)

    def _meet(self, bare: torch.nn.Module, _inputs: Any) -> None:
        wrapper = DistributedDataParallel._get_active_ddp_module()
        if wrapper is None or wrapper.module is not bare:
            return  # a forward pass outside DDP, an evaluation for instance
        self._hooks.pop(id(bare)).remove()
        self._models.append(wrapper)
        # A model that looks for unused parameters never rebuilds; a static graph rebuilds by rules of its own.
        if not wrapper.find_unused_parameters and not wrapper.static_graph:
            self._waiting.append(wrapper)

    @property
    def done(self) -> bool:
        """No model that has been met is waiting."""
        return not self._waiting

    @property
    def primed(self) -> bool:
        """At least one model is under DDP, and none of them can change its buckets after its first step any more."""
        return bool(self._models) and not self._waiting and not any(model.static_graph for model in self._models)

    def layout(self) -> list[list[int]] | None:
        """The layouts of all DDP models, one after the other; None without DDP."""
        if not self._models:
            return None
        return [bucket for model in self._models for bucket in bucket_layout(model)]

    def prime(self, backward: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        """`backward(loss)`, then its gradients once more through the rebuilt buckets.

        The script's backward pass runs once, as it is: it tells the order of arrival, and its local gradients are kept before
        anything is reduced. What had been accumulated before (in micro-batches without synchronisation) is put back, and
        the kept gradients go through DDP again. The result is that of one backward pass in the final layout. Raises
        ChaosrunError when this torch does not rebuild on request: every restart at three or more ranks would differ.
        """
        parameters = [p for model in self._waiting for p in model.parameters() if p.requires_grad]
        before = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        local: dict[int, torch.Tensor] = {}
        hooks = [_keep_gradient(parameter, number, local) for number, parameter in enumerate(parameters)]
        try:
            backward(loss, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        arrived = {id(parameters[number]) for number in local}
        # A model that this loss does not reach waits; one that it reaches in part is DDP's to complain about.
        complete = [m for m in self._waiting if all(id(p) in arrived for p in m.parameters() if p.requires_grad)]
        own = {id(p) for model in complete for p in model.parameters()}
        for parameter, gradient in zip(parameters, before, strict=True):
            if id(parameter) in own:
                parameter.grad = gradient
        for model in complete:
            if not model.reducer._rebuild_buckets():
                raise ChaosrunError(
                    f"torch {torch.__version__} did not rebuild DDP's gradient buckets on request: no restart would be exact",
                    hint="pass DistributedDataParallelKwargs(find_unused_parameters=True), which never rebuilds",
                )
            model.reducer.prepare_for_backward([])
        again = [number for number in local if id(parameters[number]) in own]
        if again:
            torch.autograd.backward([parameters[number] for number in again], [local[number] for number in again])
        self._waiting = [model for model in self._waiting if model not in complete]


def _keep_gradient(
    parameter: torch.nn.Parameter, number: int, kept: dict[int, torch.Tensor]
) -> torch.utils.hooks.RemovableHandle:
    """Copy a parameter's local gradient as it arrives: before hooks of the script's own, which will see it a second time."""

    def keep(gradient: torch.Tensor) -> None:
        # A copy: DDP writes the reduced gradient into the very same memory.
        kept[number] = gradient.detach().clone()

    handle = parameter.register_hook(keep)
    hooks = parameter._backward_hooks
    assert hooks is not None
    for other in [key for key in hooks if key != handle.id]:
        hooks[other] = hooks.pop(other)
    return handle
