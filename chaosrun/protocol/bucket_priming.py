"""Primes DDP's gradient buckets, so that the first step after a restart reduces in the same order as it did without one.

Stock DDP reduces its first iteration in one layout (registration order) and all later ones in another (arrival order). From
three ranks on, gloo's ring and NCCL's split a bucket by position, so the layout decides the order of summation and with it the
bits: a resumed job's first step differs from the same step of an uninterrupted one (hazard C1, measured: no elements differ at
2 ranks, 48% at 3, 67% at 4). The remedy: on the first synchronised step of every attempt, the reference's included, rebuild the
buckets at once and send the gradients through them again. A static graph (hazard C2) counts hooks in the first iteration and
learns the order of arrival in the second, so the gradients are sent three times in all.

This reaches into DDP's private reducer. `prime` checks the outcome (the layout is read back) instead of trusting it.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch.nn.parallel import DistributedDataParallel

from chaosrun.errors import ChaosrunError, MisuseError
from chaosrun.observe.hooks import without_hooks


def bucket_layout(model: DistributedDataParallel) -> list[list[int]]:
    """Indices into the parameters that required gradients when the model was wrapped, by bucket, in their order in the bucket.
    Parameters frozen later stay in it."""
    buckets = [bucket.parameters() for bucket in model.reducer._get_zeros_like_grad_buckets()]
    reduced = {id(parameter) for bucket in buckets for parameter in bucket}
    index = {id(parameter): number for number, parameter in enumerate(p for p in model.parameters() if id(p) in reduced)}
    return [[index[id(parameter)] for parameter in bucket] for bucket in buckets]


class BucketPrimer:
    """Intercepts `accelerator.backward` until the first synchronised backward pass has been made.

    accelerate keeps the bare models and hands the DDP wrappers to the script only, so each wrapper is noted at its first
    forward pass that leads to gradients; a wrapper without one reduces nothing. The hook is on DDP's class, as an attribute of
    a model would be copied, pickled and scripted with it.
    """

    def __init__(self, models: Sequence[torch.nn.Module], *, saves_itself: bool = False, primes: bool = True) -> None:
        """`saves_itself`: the script saves and resumes by itself; a model with state that chaosrun could not save is then left
        unprimed. `primes`: False leaves all buckets unprimed, so that a drill shows the effect."""
        self._saves_itself = saves_itself
        self._primes = primes
        self._told = -1
        """How many models had been primed or left out when `is_news` was last asked."""
        self.left: Obstacle | None = None
        """Why a model is left unprimed."""
        self._models: list[DistributedDataParallel] = []
        self._waiting: list[DistributedDataParallel] = []
        self._within: list[DistributedDataParallel] = []
        """Those whose gradients a restart restored as zeros, and that otherwise have them in their buckets."""
        self._expected: list[weakref.ref[torch.nn.Module]] = []
        self._prepares: weakref.WeakKeyDictionary[DistributedDataParallel, bool] = weakref.WeakKeyDictionary()
        """Whether the last forward pass of a wrapper prepared the reduction of gradients."""
        for model in models:
            self.expect(model)
        _primers.add(self)
        _see_forward_passes()

    def expect(self, model: torch.nn.Module) -> None:
        """Note a wrapper, or all those around a bare model, at its first forward pass."""
        self._expected.append(weakref.ref(model))

    def meet(self, wrapper: DistributedDataParallel) -> None:
        """Note that the wrapper's forward pass begins; without gradients it does not count (an evaluation, for instance)."""
        if not torch.is_grad_enabled():
            return
        self._prepares[wrapper] = wrapper.require_backward_grad_sync
        if any(known is wrapper for known in self._models):
            return
        if not any(model() is wrapper or model() is wrapper.module for model in self._expected):
            return
        self._models.append(wrapper)
        restored = not self._saves_itself and any(parameter.grad is not None for parameter in wrapper.parameters())
        if restored and wrapper.gradient_as_bucket_view:
            self._within.append(wrapper)
        if obstacle := _obstacle(wrapper):
            if not self._saves_itself:
                raise obstacle.error
            self.left = obstacle
        # A model with find_unused_parameters never rebuilds, unless its graph is static: then it searches only once. One that
        # was trained before (a warm-up) has done so.
        elif (wrapper.static_graph or not wrapper.find_unused_parameters) and not vars(wrapper).get("_has_rebuilt_buckets"):
            self._waiting.append(wrapper)

    @property
    def done(self) -> bool:
        """Whether every model noted so far has been primed or left out, or priming is off."""
        return not self._waiting or not self._primes

    @property
    def primed(self) -> bool:
        """Whether at least one model is under DDP, and none of those in `layout` can change its buckets any more."""
        return self._primes and bool(self._laid_out()) and (self.done or not self._saves_itself) and not self.left

    @property
    def synchronises(self) -> bool:
        """Whether the coming backward pass reduces gradients, as far as known. DDP decides in the forward pass: no_sync around
        the backward pass alone has no effect. accelerate's trigger_sync_in_backward decides for it later."""
        return all(
            self._prepares[model] or (model.require_backward_grad_sync and model.require_forward_param_sync)
            for model in self._models
        )

    @property
    def is_due(self) -> bool:
        """Whether the coming backward pass is the first of a wrapper."""
        return not self.done and self.synchronises

    @property
    def is_news(self) -> bool:
        """Whether the layout may have changed since the last call, as more models were primed or left out."""
        before, self._told = self._told, len(self._models) - len(self._waiting)
        return before != self._told

    def layout(self) -> list[list[int]] | None:
        """The concatenated layouts of all DDP models that have reduced gradients; None without any."""
        if not self._laid_out():
            return None
        return [bucket for model in self._laid_out() for bucket in bucket_layout(model)]

    def _laid_out(self) -> list[DistributedDataParallel]:
        """The models that have a layout; all of them if gradients may not pass through `prime`."""
        if self.done or self._saves_itself:
            return self._models
        return [model for model in self._models if model not in self._waiting]

    def prime(self, backward: Callable[..., None], loss: torch.Tensor, **kwargs: Any) -> None:
        """`backward(loss)`, then its gradients once more through the rebuilt buckets.

        The script's backward pass runs once, unchanged: it shows the order of arrival, and its local gradients are kept as its
        own hooks (`Tensor.register_hook`) have left them, before they are reduced. Then the gradients accumulated before it (in
        micro-batches without synchronisation) are put back, and the kept gradients go through DDP again. The result is that of
        one backward pass in the final layout. Raises ChaosrunError when this torch does not rebuild on request: every restart
        at three or more ranks would differ.
        """
        parameters = _trained(self._waiting)
        before = {id(p): None if p.grad is None else p.grad.detach().clone() for p in parameters}
        arrivals: list[_Arrival] = []
        hooks = [_keep_gradients(parameter, arrivals) for parameter in parameters]
        try:
            backward(loss, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
        reached = {id(parameter) for parameter, _ in arrivals}
        complete = [model for model in self._waiting if _is_complete(model, reached)]
        for models in _sharing(complete):
            own = {id(p) for p in _trained(models)}
            replay = [arrival for arrival in arrivals if id(arrival[0]) in own]
            if any(model.static_graph for model in models):
                _replay_gradients(models, replay, before)
            _put_back(models, before)
            if not all([model.reducer._rebuild_buckets() for model in models]):
                raise ChaosrunError(
                    f"torch {torch.__version__} did not rebuild DDP's gradient buckets on request: no restart would be exact",
                    hint="pass DistributedDataParallelKwargs(find_unused_parameters=True), which never rebuilds",
                )
            _replay_gradients(models, replay, before)
            if any(model in self._within for model in models):
                _replay_gradients(models, replay, before, within=True)
        self._waiting = [model for model in self._waiting if model not in complete]


_primers: weakref.WeakSet[BucketPrimer] = weakref.WeakSet()
"""Those of this process."""


@functools.cache
def _see_forward_passes() -> None:
    """Notify the primers of every forward pass under DDP, right before its model is called. Installed once per process."""
    inside = DistributedDataParallel._inside_ddp_forward

    @torch._disable_dynamo
    @functools.wraps(inside)
    def _inside_ddp_forward(self: DistributedDataParallel) -> AbstractContextManager[None]:
        for primer in [*_primers]:
            primer.meet(self)
        return inside(self)

    DistributedDataParallel._inside_ddp_forward = _inside_ddp_forward  # pyright: ignore[reportAttributeAccessIssue]


_Arrival = tuple[torch.nn.Parameter, torch.Tensor]
"""A local gradient as it arrived at a parameter in a backward pass; one shared by reentrant checkpoints has several."""
_Before = Mapping[int, torch.Tensor | None]
"""What parameters had accumulated before the backward pass, by id."""


def _is_complete(model: DistributedDataParallel, reached: set[int]) -> bool:
    """Whether DDP has reduced this model in the backward pass. A model that the loss does not reach waits for a later pass; if
    the loss reaches only part of it, DDP raises its own error, unless the graph is static, which may leave parameters
    unused."""
    needed = [id(p) in reached for p in model.parameters() if p.requires_grad]
    return any(needed) if model.static_graph else all(needed)


def _trained(models: Iterable[DistributedDataParallel]) -> list[torch.nn.Parameter]:
    """Trained parameters, each once even if several models share it."""
    return list({id(p): p for model in models for p in model.parameters() if p.requires_grad}.values())


def _sharing(models: Iterable[DistributedDataParallel]) -> list[list[DistributedDataParallel]]:
    """Group models that share parameters, such as the trunk of an actor and a critic: they reduce them in one pass."""
    groups: list[list[DistributedDataParallel]] = []
    for model in models:
        own = {id(p) for p in _trained([model])}
        joined = [group for group in groups if any(id(p) in own for p in _trained(group))]
        groups = [group for group in groups if group not in joined]
        groups.append([*(each for group in joined for each in group), model])
    return groups


def _put_back(models: Iterable[DistributedDataParallel], before: _Before, *, within: bool = False) -> None:
    for parameter in _trained(models):
        accumulated = before[id(parameter)]
        if within and accumulated is not None and parameter.grad is not None:
            parameter.grad.copy_(accumulated)
            continue
        # A copy: the replay accumulates and reduces in this memory.
        parameter.grad = None if accumulated is None else accumulated.clone()


def _replay_gradients(
    models: Sequence[DistributedDataParallel], arrivals: Sequence[_Arrival], before: _Before, *, within: bool = False
) -> None:
    """Send the kept gradients through DDP in their order of arrival: a static graph takes its layout from it. `within`: with
    the gradients before them in the buckets, where they lie from the second step on if the script zeroes them in place: DDP
    divides there, and multiplies by the inverse where it copies a gradient into its bucket."""
    _put_back(models, before, within=within)
    for model in models:
        model.reducer.prepare_for_backward([])
    # The gradients have passed the script's hooks already, and these may draw random numbers or count calls.
    with without_hooks(parameter._backward_hooks for parameter in _trained(models) if parameter._backward_hooks):
        for parameter, gradient in arrivals:
            torch.autograd.backward([parameter], [gradient.clone()])


def _keep_gradients(parameter: torch.nn.Parameter, arrivals: list[_Arrival]) -> torch.utils.hooks.RemovableHandle:
    """Copy a parameter's local gradients as they arrive: after the script's hooks have changed them."""

    def keep(gradient: torch.Tensor) -> None:
        # A copy: DDP writes the reduced gradient into the same memory.
        arrivals.append((parameter, gradient.detach().clone()))

    return parameter.register_hook(keep)


@dataclass(frozen=True, slots=True)
class Obstacle:
    code: Literal["hook_state", "accumulation_hook"]
    name: str
    """The name of the communication hook, or of the parameter that has a hook."""
    error: MisuseError


def _obstacle(model: DistributedDataParallel) -> Obstacle | None:
    """Why a model cannot be primed: a communication hook whose state chaosrun's checkpoints do not hold (hazard C6), or a hook
    that runs after a gradient is accumulated, as priming accumulates and reduces the first gradients more than once."""
    for hook, state in model._comm_hooks:
        if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
            error = MisuseError(
                f"DDP's communication hook {hook.__qualname__} keeps a state of its own ({type(state).__name__}), which no "
                "checkpoint holds: no restart would be exact",
                hint="use a hook without a state (fp16 or bf16 compression), or none",
            )
            return Obstacle("hook_state", hook.__qualname__, error)
    for name, parameter in model.module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            error = MisuseError(
                f"{name} has a hook that runs after its gradient is accumulated (register_post_accumulate_grad_hook): it would "
                "run more than once in the first step",
                hint="step the optimizer after backward, not inside it",
            )
            return Obstacle("accumulation_hook", name, error)
    return None
