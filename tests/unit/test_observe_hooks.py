"""What the hooks in torch do not tell: what a script's tracer calls belongs to its graph, and not to the training."""

import os
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode

from chaosrun.observe import hooks
from chaosrun.observe.environment import canary

CPU = torch.device("cpu")
INPUTS = torch.ones(2, 3)


class Computing:
    """A listener that computes, as the recorder does."""

    def __init__(self) -> None:
        self.forwards: list[torch.nn.Module] = []
        self.backwards: list[torch.Tensor] = []

    def forward(self, module: torch.nn.Module, inputs: tuple[Any, ...], named: dict[str, object]) -> None:
        self.forwards.append(module)
        told = len(self.backwards)
        canary(CPU)
        del self.backwards[told:]  # its own

    def backward(self, roots: Sequence[torch.Tensor], run: Callable[[], None]) -> None:
        self.backwards.append(roots[0])
        run()


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Computing:
    # Set to what they are, so that each is put back.
    monkeypatch.setattr(torch.nn.Module, "__call__", torch.nn.Module.__call__)
    monkeypatch.setattr(torch.autograd, "backward", torch.autograd.backward)
    for name in ("torch._dynamo.utils", "torch._dynamo.variables.nn_module"):
        if compiler := sys.modules.get(name):
            monkeypatch.setattr(compiler, "unpatched_nn_module_call", compiler.unpatched_nn_module_call)
    listener, seen = Computing(), hooks._Seen()
    monkeypatch.setattr(seen, "listener", listener)
    monkeypatch.setattr(seen, "pid", os.getpid())
    monkeypatch.setattr(hooks, "_seen", seen)
    hooks._see_forward_passes()
    hooks._see_backward_passes()
    return listener


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))


class Counting(TorchFunctionMode):
    calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def test_a_mode_of_the_script_sees_no_call_more(
    heard: Computing, model: torch.nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Counting() as watched:
        model(INPUTS)
    assert heard.forwards == [model]
    monkeypatch.setattr(hooks._seen, "listener", None)
    with Counting() as alone:
        model(INPUTS)
    assert watched.calls == alone.calls > 0


def test_a_copy_on_meta_whose_operations_are_counted_is_the_scripts_alone(heard: Computing, model: torch.nn.Module) -> None:
    copy = torch.nn.Sequential(*model.children()).to("meta")
    copy(INPUTS.to("meta")).sum().backward()
    assert (heard.forwards, heard.backwards) == ([], [])


def test_a_traced_model_in_training_mode_is_the_scripts_alone(heard: Computing, model: torch.nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced: Any = torch.jit.trace(model, INPUTS)
    assert not heard.forwards
    operations = [node.kind() for node in traced.inlined_graph.nodes() if node.kind().startswith("aten::")]
    assert operations == ["aten::linear", "aten::tanh", "aten::linear"]
    traced(INPUTS)
    model(INPUTS)
    assert len(heard.forwards) == 2, "the hooks are there, and tell of what is called outside"


def step(model: torch.nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).sum()
    loss.backward()
    return loss


def with_fake_tensors(model: torch.nn.Module) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model(mode.from_tensor(INPUTS))


@pytest.mark.parametrize(
    "trace",
    [
        lambda model: torch.export.export(model, (INPUTS,)),
        lambda model: make_fx(lambda inputs: step(model, inputs))(INPUTS),
        with_fake_tensors,
    ],
    ids=["export", "make_fx", "fake"],
)
def test_other_tracers_are_not_told_of(heard: Computing, model: torch.nn.Module, trace: Callable[[Any], Any]) -> None:
    trace(model)
    assert not heard.forwards and not heard.backwards
    step(model, INPUTS)
    assert len(heard.forwards) == len(heard.backwards) == 1


def test_to_compute_a_parameter_of_others_is_no_pass(heard: Computing, model: torch.nn.Module) -> None:
    """As a script does when it builds its model, perhaps before it loads a checkpoint."""
    layer: Any = next(model.children())
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", torch.nn.Linear(3, 3, bias=False))
    penalty = layer.weight.square().sum()
    assert heard.forwards == [] and penalty.requires_grad
    model(INPUTS)
    assert heard.forwards == [model]


def test_each_step_of_an_optimizer_is_hooked_whatever_the_script_has_made_before() -> None:
    class Plain(torch.optim.Optimizer):
        def __init__(self) -> None:
            super().__init__([torch.nn.Parameter(torch.zeros(1))], {})

        def step(self, closure: Any = None) -> Any:
            pass

    class Clipped(Plain):
        def step(self, closure: Any = None) -> Any:
            super().step(closure)

    told: list[int] = []
    optimizer = Clipped()
    optimizer.register_step_pre_hook(lambda *_: told.append(1))
    optimizer.step()
    assert len(told) == 1, "torch hooks a class when it makes an instance of it"
    hooks.hook_each_step(optimizer)
    for _ in range(2):
        told.clear()
        optimizer.step()
        assert len(told) == 2
        hooks.hook_each_step(optimizer)
        Plain()


@pytest.mark.parametrize("scheduled", [False, True])
def test_an_optimizer_that_left_out_torchs_init_gets_its_hooks(scheduled: bool) -> None:
    """As a Lookahead does that takes the groups of the optimizer inside it."""

    class Around(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

        def step(self, closure: Any = None) -> Any:
            return self.inner.step(closure)

    told: list[str] = []
    optimizer = Around(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5) if scheduled else None
    hooks.with_hooks(optimizer).register_step_pre_hook(lambda *_: told.append("before"))
    hooks.with_hooks(optimizer).register_step_post_hook(lambda *_: told.append("after"))
    optimizer.step()
    assert told == ["before", "after"]
    if scheduler:
        scheduler.step()
        assert scheduler.get_last_lr() == [5e-4]
