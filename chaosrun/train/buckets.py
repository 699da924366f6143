"""Primes DDP's gradient buckets, so that the first step after a restart reduces in the same order as it did without one.

Stock DDP reduces its first iteration in one layout (registration order) and all later ones in another (arrival order). From
three ranks on, gloo's ring and NCCL's split a bucket by position, so the layout decides the order of summation and with it the
bits: a resumed job's first step differs from the same step of an uninterrupted one (hazard C1, measured: no elements differ at
2 ranks, 48% at 3, 67% at 4). The remedy: on the first synchronised step of every attempt, the reference's included, run the
backward pass twice, rebuilding the buckets in between.

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
        """At least one model is under DDP, and every one of them that rebuilds its buckets has done so."""
        return bool(self._models) and not self._waiting

    def layout(self) -> list[list[int]] | None:
        """The layouts of all DDP models, one after the other; None without DDP."""
        if not self._models:
            return None
        return [bucket for model in self._models for bucket in bucket_layout(model)]

    def prime(self, backward: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        """`backward(loss)`, twice: once to learn the order of arrival, once in the rebuilt layout.

        Gradients accumulated before (in micro-batches without synchronisation) are put back in between, so the result is
        that of one backward pass. Raises ChaosrunError when this torch does not rebuild on request: going on would make
        every restart at three or more ranks differ.
        """
        parameters = [p for model in self._waiting for p in model.parameters() if p.requires_grad]
        before = [None if p.grad is None else p.grad.detach().clone() for p in parameters]
        backward(loss, **{**kwargs, "retain_graph": True})
        involved = [model for model in self._waiting if _got_gradients(model, parameters, before)]
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient
        for model in involved:
            if not model.reducer._rebuild_buckets():
                raise ChaosrunError(
                    f"torch {torch.__version__} did not rebuild DDP's gradient buckets on request: no restart would be exact",
                    hint="pass DistributedDataParallelKwargs(find_unused_parameters=True), which never rebuilds",
                )
            model.reducer.prepare_for_backward([])
        backward(loss, **kwargs)
        self._waiting = [model for model in self._waiting if model not in involved]


def _got_gradients(
    model: DistributedDataParallel, parameters: Sequence[torch.nn.Parameter], before: Sequence[torch.Tensor | None]
) -> bool:
    own = {id(parameter) for parameter in model.parameters()}
    return any(
        id(parameter) in own and parameter.grad is not None and (gradient is None or not torch.equal(parameter.grad, gradient))
        for parameter, gradient in zip(parameters, before, strict=True)
    )
