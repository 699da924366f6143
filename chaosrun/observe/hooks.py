"""Hooks in torch that observe an unmodified training: forward and backward passes, optimizers, and loaders' batches.

Installed once per process, before the script's first line. They report to one listener and change nothing. Children that a rank
forks (loader workers) and calls inside that of an outermost module report nothing.
"""

import contextlib
import functools
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol, TypeVar, cast

import torch
from torch._C._functorch import peek_interpreter_stack
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import ParametrizationList
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from chaosrun.observe.modes import outside_modes

Hook = TypeVar("Hook", bound=Callable[..., Any])


class Listener(Protocol):
    """Receives the hooks' events."""

    def forward(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, object]) -> None:
        """The outermost module is about to be called with gradients enabled; if it is in evaluation mode, perhaps to
        evaluate."""

    def backward(self, roots: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        """A backward pass from these tensors: `run` makes it."""

    def before_optimizer_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """`closure`: `step` was given a closure, which makes the backward passes."""

    def after_optimizer_step(self, optimizer: Optimizer) -> None: ...

    def step_was_skipped(self) -> None:
        """A gradient scaler has found an overflow and not called the optimizer."""

    def gradients_dropped(self, parameters: Iterable[torch.Tensor]) -> None:
        """zero_grad was called, on an optimizer or a module."""

    def wrapper_made(self, model: DistributedDataParallel) -> None:
        """This wrapper has just been made."""


class _Seen:
    """The hooks' state in this process."""

    def __init__(self) -> None:
        self.listener: Listener | None = None
        self.pid = 0
        self.inside = False
        """Whether the outermost module's call is running."""
        self.optimizers: list[weakref.ref[Optimizer]] = []
        self.met: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.unpickled: list[weakref.ref[Optimizer]] = []
        """Optimizers that were loaded or copied as whole objects, and are not among `optimizers` yet."""
        self.kept: list[Any] | None = []
        """Optimizers and loaded modules, kept alive until the first step."""
        self.installed = False

    def keep(self, thing: Any) -> None:
        if self.kept is not None and self.own_listener():
            self.kept.append(thing)

    def outer_listener(self) -> Listener | None:
        """The listener; None in another process, during a backward pass (reentrant checkpoints call modules in it), under
        torch.func, whose tensors stand for others, and while a graph is traced or captured."""
        outside = torch._C._current_graph_task_id() == -1 and peek_interpreter_stack() is None
        return self.own_listener() if outside and not _is_traced() and not is_captured() else None

    def own_listener(self) -> Listener | None:
        return self.listener if self.pid == os.getpid() else None


_seen = _Seen()


def _is_traced() -> bool:
    """Whether the call is traced by torch.jit.trace, torch.compile, torch.export or make_fx, or runs on tensors without values:
    a listener's computations on such tensors would become part of the script's graph, or fail. No training happens there."""
    modes = (torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY)
    return (
        torch._C._get_tracing_state() is not None
        or torch.compiler.is_compiling()
        or any(torch._C._get_dispatch_mode(mode) is not None for mode in modes)
    )


def is_captured() -> bool:
    """Whether calls are being captured into a CUDA graph instead of computed, so that no value can be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


def uncompiled(hook: Hook) -> Hook:
    """Keep a hook that may be called inside a function under torch.compile out of its graph. Returns our own function, since
    the compiler's holds its address, and an optimizer's hooks count as state of the training."""
    disabled = torch.compiler.disable(hook)

    @functools.wraps(hook)
    def run(*args: Any, **kwargs: Any) -> Any:
        return disabled(*args, **kwargs)

    return cast(Hook, run)


def install(listener: Listener) -> None:
    """Report to `listener` from now on, in this process and not in its children."""
    _seen.listener, _seen.pid = listener, os.getpid()
    if _seen.installed:
        return
    _seen.installed = True
    _see_forward_passes()
    _see_backward_passes()
    _see_optimizers()
    _see_wrappers()
    _see_loads()


def parameters_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    """The parameters that it updates, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any gradient is not zero: torch.distributed.checkpoint calls an optimizer with zeros, to have state to load."""
    with outside_modes():
        return any(each.grad is not None and bool(each.grad.any()) for each in parameters_of(optimizer))


def release_kept() -> None:
    """Release the objects kept for the first step; needed for a script that ends without one."""
    _seen.kept = None


def optimizers() -> list[Optimizer]:
    """The live optimizers, in the order in which they were made. Those that were loaded or copied as whole objects count once
    they step or the model that they update is used, or if there are no others: the script may only read their state."""
    return _live(_seen.optimizers) or _live(_seen.unpickled)


def _live(references: Iterable[weakref.ref[Optimizer]]) -> list[Optimizer]:
    found = [optimizer for reference in references if (optimizer := reference()) is not None]
    return [optimizer for optimizer in found if getattr(optimizer, "param_groups", None)]


def _is_meta(tensor: torch.Tensor) -> bool:
    with outside_modes():  # they see that an attribute is read
        return tensor.is_meta


@contextlib.contextmanager
def _passed_over() -> Iterator[None]:
    """Report no forward pass in the block."""
    before, _seen.inside = _seen.inside, True
    try:
        yield
    finally:
        _seen.inside = before


def _see_forward_passes() -> None:
    inner = torch.nn.Module.__call__

    def __call__(self: torch.nn.Module, *inputs: Any, **named: Any) -> Any:
        if _seen.inside or not torch.is_grad_enabled():
            return inner(self, *inputs, **named)
        if isinstance(self, ParametrizationList):  # a parameter is read or registered, computed of others
            with _passed_over():
                return inner(self, *inputs, **named)
        listener = _seen.outer_listener()
        # Modules without parameters (a loss function, a metric, an augmentation) only compute. A module on meta is not
        # trained: it is a copy used to count operations.
        if listener is None or (first := next(self.parameters(), None)) is None or _is_meta(first):
            return inner(self, *inputs, **named)
        _seen.inside = True
        try:
            if _seen.unpickled and self.training:
                _register_unpickled(self)
            listener.forward(self, inputs, named)
            return inner(self, *inputs, **named)
        finally:
            _seen.inside = False

    torch.nn.Module.__call__ = __call__
    # torch.compile calls `forward` directly if it recognises the call as torch's own; otherwise it traces the call.
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        if compiler := sys.modules.get(name):
            compiler.unpatched_nn_module_call = __call__  # pyright: ignore[reportAttributeAccessIssue]


def _see_backward_passes() -> None:
    inner = torch.autograd.backward

    @functools.wraps(inner)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> None:
        listener = _seen.outer_listener()
        if listener is None:
            return inner(tensors, *args, **kwargs)
        roots = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
        roots = [root for root in roots if isinstance(root, torch.Tensor)]
        if any(root.is_meta for root in roots):
            return inner(tensors, *args, **kwargs)
        return listener.backward(roots, lambda: inner(tensors, *args, **kwargs))

    torch.autograd.backward = backward


def _see_optimizers() -> None:
    made, loaded = Optimizer.__init__, Optimizer.__setstate__
    scaled = torch.amp.GradScaler.step

    @functools.wraps(made)
    def __init__(self: Optimizer, *args: Any, **kwargs: Any) -> None:
        _register(self)
        made(self, *args, **kwargs)
        see_steps()
        _ignore_shape_inference_of_pipelines()

    @functools.wraps(loaded)
    def __setstate__(self: Optimizer, state: dict[str, Any]) -> None:
        loaded(self, state)
        if self not in _seen.met:
            _seen.unpickled = [known for known in _seen.unpickled if known() not in (None, self)] + [weakref.ref(self)]
            see_steps()

    @functools.wraps(scaled)
    def scaler_step(self: Any, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        listener, steps = _seen.outer_listener(), list[Any]()
        # accelerate's wrapper holds the real optimizer.
        hook = getattr(optimizer, "optimizer", optimizer).register_step_post_hook(lambda *of: steps.append(of))
        result = scaled(self, optimizer, *args, **kwargs)
        hook.remove()
        if listener and not steps:
            listener.step_was_skipped()
        return result

    def before(optimizer: Optimizer, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        if listener := _seen.own_listener():
            _register(optimizer)
            listener.before_optimizer_step(optimizer, closure=any(map(callable, [*arguments[1:], named.get("closure")])))

    def after(optimizer: Optimizer, *_: Any) -> None:
        if listener := _seen.own_listener():
            listener.after_optimizer_step(optimizer)

    @functools.cache
    def see_steps() -> None:
        torch.autograd.backward = uncompiled(torch.autograd.backward)
        register_optimizer_step_pre_hook(uncompiled(before))
        register_optimizer_step_post_hook(uncompiled(after))

    Optimizer.__init__, Optimizer.__setstate__ = __init__, __setstate__
    _see_zero_grad(Optimizer, parameters_of)
    _see_zero_grad(torch.nn.Module, lambda module: module.parameters())
    torch.amp.GradScaler.step = scaler_step
    if "torch._dynamo" in sys.modules:
        see_steps()  # otherwise the first optimizer imports it, which takes a second


def with_hooks(optimizer: Optimizer) -> Optimizer:
    """The optimizer. If its class skips torch's `__init__`, as a Lookahead around another optimizer often does, adds the hook
    dictionaries which that would have made."""
    if "_optimizer_step_pre_hooks" not in vars(optimizer):
        vars(optimizer).setdefault("defaults", {})
        Optimizer.__setstate__(optimizer, {})
        if step := vars(optimizer).get("step"):  # a scheduler has put it around a step without hooks
            hooked = Optimizer.profile_hook_step(lambda _, *given, **named: step(*given, **named))
            vars(optimizer)["step"] = functools.wraps(step)(functools.partial(hooked, optimizer))
    return optimizer


def hook_each_step(optimizer: Optimizer) -> None:
    """Make every `step` of the optimizer's classes call its hooks, including a `super().step()`. torch does so only from a
    class's first instance on, so the records would depend on whether and when the script makes one."""
    for kind in type(optimizer).__mro__:
        step: Any = vars(kind).get("step")
        if step and kind is not Optimizer and issubclass(kind, Optimizer) and not hasattr(step, "hooked"):
            hooked: Any = Optimizer.profile_hook_step(step)
            hooked.hooked = True
            kind.step = hooked


@contextlib.contextmanager
def without_hooks(hooks: Iterable[dict[int, Any]]) -> Iterator[None]:
    """Take these hooks off, as torch keeps them, during calls that the script does not make."""
    taken = [(each, dict(each)) for each in hooks]
    for each, _ in taken:
        each.clear()
    try:
        yield
    finally:
        for each, own in taken:
            each.update(own)


def _see_zero_grad(kind: type, parameters: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    dropped = vars(kind)["zero_grad"]

    @functools.wraps(dropped)
    def zero_grad(self: Any, *args: Any, **kwargs: Any) -> None:
        if listener := _seen.outer_listener():
            listener.gradients_dropped(parameters(self))
        dropped(self, *args, **kwargs)

    setattr(kind, "zero_grad", zero_grad)  # noqa: B010 - of either class


def _register(optimizer: Optimizer) -> None:
    if optimizer not in _seen.met:
        _seen.met.add(optimizer)
        _seen.keep(optimizer)
        _seen.optimizers = [known for known in _seen.optimizers if known() is not None] + [weakref.ref(optimizer)]


def _register_unpickled(model: torch.nn.Module) -> None:
    """Count those that update the model and whose parameters no other optimizer has taken over."""
    used = set(map(id, model.parameters()))
    used -= {id(parameter) for optimizer in _live(_seen.optimizers) for parameter in parameters_of(optimizer)}
    for optimizer in _live(_seen.unpickled):
        if not used.isdisjoint(map(id, parameters_of(optimizer))):
            _register(optimizer)
    _seen.unpickled = [each for each in _seen.unpickled if each() is not None and each() not in _seen.met]


def _ignore_shape_inference_of_pipelines() -> None:
    """A stage of torch's pipelines learns the shapes that it exchanges from a pass of its own at each start, which may take
    whatever memory holds."""
    stage = getattr(sys.modules.get("torch.distributed.pipelining.stage"), "PipelineStage", None)
    for name in ("_forward_metadata_inference", "_shape_inference"):  # the latter in older releases of torch
        measure = getattr(stage, name, None)
        if measure and not hasattr(measure, "__wrapped__"):

            @functools.wraps(measure)
            def run(*args: Any, measure: Callable[..., Any] = measure, **kwargs: Any) -> Any:
                with _passed_over():
                    return measure(*args, **kwargs)

            setattr(stage, name, run)


def _see_wrappers() -> None:
    made = DistributedDataParallel.__init__

    @functools.wraps(made)
    def __init__(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        if listener := _seen.outer_listener():
            listener.wrapper_made(self)

    DistributedDataParallel.__init__ = __init__


def _see_loads() -> None:
    load = torch.nn.Module.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        _seen.keep(self)
        return load(self, *args, **kwargs)

    torch.nn.Module.load_state_dict = load_state_dict
