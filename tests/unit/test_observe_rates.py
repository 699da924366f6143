"""Learning rates of optimizers that have one, and of those that find their own."""

import gc
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.nn.utils import parametrizations, prune

from chaosrun.observe import found_state, hooks
from chaosrun.observe.contents import contents
from chaosrun.observe.found_state import FoundState, names_of_optimizers, rates_of
from chaosrun.observe.state import ObservedState
from chaosrun.records.traces import StartRecord


class FindsItsOwn(torch.optim.SGD):
    """As transformers' Adafactor with its defaults: lr=None."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["lr"] = None


def optimizers() -> list[torch.optim.Optimizer]:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    without = torch.optim.SGD([second], lr=0.1)
    del without.param_groups[0]["lr"]
    return [FindsItsOwn([first]), without, torch.optim.SGD([third], lr=torch.tensor(0.5))]


def test_a_group_without_a_learning_rate_is_recorded_as_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = optimizers()
    attached = ObservedState(cast(Any, SimpleNamespace(_optimizers=[SimpleNamespace(optimizer=each) for each in made])))
    found = FoundState(None)
    monkeypatch.setattr(found, "optimizers", lambda: made)
    for rates in (rates_of(attached.optimizers()), rates_of(found.optimizers())):
        assert [str(rate) for rate in rates] == ["nan", "nan", "0.5"]


def test_several_optimizers_are_told_apart_and_a_scheduler_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, third = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    made = [torch.optim.Adam([first]), torch.optim.SGD([second], momentum=0.9), torch.optim.Adam([third])]
    found = FoundState(None)
    monkeypatch.setattr(found, "optimizers", lambda: made)
    before = found.optimizer_digests()
    assert list(before) == ["Adam 1 of 2", "Adam 2 of 2", "SGD"]
    third.grad = torch.ones(2)
    made[2].step()
    assert [name for name, digest in found.optimizer_digests().items() if digest != before[name]] == ["Adam 2 of 2"]
    assert [names_of_optimizers(found.optimizers())[id(each)] for each in made] == ["Adam 1 of 2", "SGD", "Adam 2 of 2"]
    assert not found.scheduled()
    torch.optim.lr_scheduler.StepLR(made[1], 2)
    assert found.scheduled()
    del made[1:]
    assert found.optimizer_digests() == {} and names_of_optimizers(found.optimizers()) == {}


def test_an_outer_optimizer_whose_inner_one_has_the_state_is_not_told_apart_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = type("ZeroRedundancyOptimizer", (torch.optim.SGD,), {})
    weight = torch.nn.Parameter(torch.ones(2))
    found = FoundState(None)
    monkeypatch.setattr(found, "optimizers", lambda: [shell([weight]), torch.optim.AdamW([weight])])
    assert list(found.optimizer_digests()) == ["AdamW"]


class Around(torch.optim.Optimizer):
    """As Lightning Fabric's: a scheduler that is given it marks it alone, and sets the groups of the one inside."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


@pytest.mark.parametrize(
    "make",
    [lambda optimizer: torch.optim.lr_scheduler.StepLR(Around(optimizer), 2), torch.optim.lr_scheduler.ReduceLROnPlateau],
    ids=["of a wrapper", "one that marks no optimizer"],
)
def test_a_scheduler_is_known_that_leaves_the_optimizer_unmarked(monkeypatch: pytest.MonkeyPatch, make: Any) -> None:
    trained, other = (torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1) for _ in range(2))
    found = FoundState(None)
    monkeypatch.setattr(found, "optimizers", lambda: [trained])
    of_another = make(other)
    assert not found.scheduled()
    own = make(trained)
    assert found.scheduled()
    del own, of_another


def test_the_folders_of_trained_models_are_told_by_their_values() -> None:
    model, teacher = (torch.nn.Linear(3, 2) for _ in range(2))
    saved = {"model": model.state_dict(), "teacher": teacher.state_dict(), "last": {"net": model.state_dict()}}
    wrapped = {f"module.{name}": value.clone() for name, value in model.state_dict().items()}
    found = FoundState(model)
    assert found.trained_in(contents({**saved, "wrapped": wrapped})) == ("last/net", "model", "wrapped")
    assert found.trained_in(contents({"teacher": teacher.state_dict()})) == ()
    assert found.trained_in(contents(model.state_dict())) == ("",)
    assert FoundState(torch.nn.ReLU()).trained_in(contents(saved)) == (), "no parameter of its own"


def test_a_buffer_of_a_module_that_now_holds_the_model_takes_no_name_of_the_models(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is called as before, when nothing was around it. How its names differ is asked once, not at every save."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.ones(2, 2))
    model.register_buffer("scale", torch.ones(1))
    outer = torch.nn.ModuleDict({"model": model})
    outer.register_buffer("scale", torch.zeros(1))
    found = FoundState(outer, cast(Any, SimpleNamespace(tensors=("weight",), in_part=False)))
    monkeypatch.setattr(found, "optimizers", lambda: [torch.optim.SGD(outer.parameters())])
    assert [name for name, _ in found.parameters()] == ["weight"]
    monkeypatch.setattr(found_state, "held_since", None)
    buffers = cast(dict[str, torch.Tensor], found.components()["buffers"])
    assert {name: tensor.item() for name, tensor in buffers.items()} == {"scale": 1, "..scale": 0}


def test_no_rate_is_equal_to_no_rate_in_the_records() -> None:
    one, other = (tuple(rate.hex() for rate in rates_of(optimizers())) for _ in range(2))
    assert one == other
    assert math.isnan(float.fromhex(one[0]))


@pytest.fixture
def phases(monkeypatch: pytest.MonkeyPatch) -> list[torch.optim.Optimizer]:
    """Optimizers of a model's last layer and of all of it, in the order in which they are built."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
    built = [torch.optim.Adam(model[1].parameters(), lr=0.5), torch.optim.SGD(model.parameters(), lr=0.25)]
    monkeypatch.setattr(hooks, "optimizers", lambda: built)
    return built


def begun(built: list[torch.optim.Optimizer], late: torch.optim.Optimizer) -> FoundState:
    """A training that began before `late` was built, with a step of the first."""
    built.remove(late)
    found = FoundState(None)
    built.append(late)
    found.keep(built[0])
    return found


def test_an_optimizer_of_an_earlier_phase_does_not_count(phases: list[torch.optim.Optimizer]) -> None:
    first, second = phases
    found = begun(phases, second)
    assert found.optimizers() == [first, second]  # it has not stepped yet
    found.keep(second)
    assert found.optimizers() == [second] and rates_of([second]) == [0.25]
    found.keep(first)  # it steps again: they go by turns
    found.keep(second)
    assert found.optimizers() == [first, second]


def test_optimizers_that_share_parameters_count_if_they_step_together(phases: list[torch.optim.Optimizer]) -> None:
    first, second = phases
    found = begun(phases, second)
    found.keep(second, [id(first)])
    assert found.optimizers() == [first, second]


def test_optimizers_built_before_the_training_count(phases: list[torch.optim.Optimizer]) -> None:
    first, second = phases
    found = FoundState(None)
    found.keep(first)
    found.keep(second)
    assert found.optimizers() == [first, second]
    assert found.take_shared_for_replaced() and found.optimizers() == [second]
    found.count_all()
    assert found.optimizers() == [first, second]


def test_an_optimizer_that_a_library_makes_anew_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does so when it begins afresh, and goes on with the given one when it resumes."""
    model = torch.nn.Linear(2, 1)
    given, used, other = (torch.optim.Adam(model.parameters(), lr=0.5, eps=eps) for eps in (1e-8, 1e-8, 1e-6))
    monkeypatch.setattr(hooks, "optimizers", lambda: [given, used, other])
    found = FoundState(None)
    model(torch.ones(1, 2)).sum().backward()
    for optimizer in (used, other):
        found.keep(optimizer)
        assert found.optimizers() == [given, used, other], "it may step or be loaded yet"
        optimizer.step()
        given.state.update({model.weight: {"step": 1}} if optimizer is other else {})  # as if it had been loaded
        found.keep(optimizer)
        assert found.optimizers() == ([used, other] if optimizer is used else [given, used, other])
        found.count_all()


@pytest.mark.parametrize(
    "made", [torch.jit.script, lambda model: torch.jit.trace(model, torch.ones(1, 2))], ids=["script", "trace"]
)
def test_modules_of_torchscript_are_read(phases: list[torch.optim.Optimizer], made: Any) -> None:
    model = made(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)).eval())
    phases[:] = [torch.optim.SGD(model.parameters(), lr=0.5)]
    found = FoundState(model)
    assert [name for name, _ in found.parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
    assert {*found.buffers()} == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", amount=0.5),
        parametrizations.spectral_norm,
        torch.nn.utils.spectral_norm,
    ],
    ids=["pruned", "parametrized", "spectral norm"],
)
def test_a_layer_that_is_pruned_or_parametrized_keeps_its_names(phases: list[torch.optim.Optimizer], change: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    change(model[0])
    phases[:] = [torch.optim.SGD(model.parameters(), lr=0.5)]
    assert {name for name, _ in FoundState(model).parameters()} == {"0.weight", "0.bias"}


def test_while_a_functional_call_runs_the_parameters_are_the_optimizers_own(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1))
    own = dict(model.named_parameters())
    seen: list[tuple[str, torch.Tensor]] = []

    def look(*_: Any) -> None:
        found = FoundState(model)
        monkeypatch.setattr(found, "optimizers", lambda: [torch.optim.SGD(own.values())])
        seen.extend(found.parameters())

    model.register_forward_pre_hook(look)
    torch.func.functional_call(model, {name: each * 2 for name, each in own.items()}, (torch.ones(1, 2),))
    assert [(name, id(each)) for name, each in seen] == [(name, id(each)) for name, each in own.items()]


class Held(torch.nn.Module):
    """A class of a script's own around its whole model, with a head if it is given one."""

    def __init__(self, model: torch.nn.Module, **heads: torch.nn.Module) -> None:
        super().__init__()
        self.inner = model
        for name, head in heads.items():
            self.add_module(name, head)


def small() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))


HELD: dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], torch.nn.Module], bool]] = {
    "wrapped": (small, lambda: Held(small()), True),
    "unwrapped": (lambda: Held(small()), small, True),
    "twice": (small, lambda: Held(Held(torch.nn.DataParallel(small()))), True),
    "in another place": (small, lambda: Held(torch.nn.ReLU(), head=small()), True),
    "of more": (small, lambda: Held(small(), head=torch.nn.Linear(3, 3)), False),
    "of less": (small, lambda: torch.nn.Sequential(torch.nn.Linear(2, 3)), False),
    "called otherwise": (lambda: Held(torch.nn.ReLU(), left=small()), lambda: Held(torch.nn.ReLU(), right=small()), False),
    "one of two": (lambda: Held(small(), two=small()), lambda: Held(small(), two=Held(small())), False),
}


@pytest.mark.parametrize("way", HELD)
def test_a_model_that_is_held_by_a_class_of_the_script_s_own_is_called_as_before(way: str) -> None:
    before, now, alike = HELD[way]
    held: list[tuple[set[str], set[str]]] = []
    for made in (before(), now()):
        first = cast(StartRecord, SimpleNamespace(tensors=tuple(held[0][0]), in_part=False)) if held else None
        found = FoundState(made, first)
        held.append(({name for name, _ in found.parameters()}, set(found.buffers())))
    assert (held[0] == held[1]) is alike, held


@pytest.mark.parametrize("collected", [True, False])
def test_a_part_of_a_model_that_is_alive_names_no_parameters(monkeypatch: pytest.MonkeyPatch, collected: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))
    if collected:
        gc.collect()  # of the modules that are alive, the part comes first then
    part = model[:2]
    found = FoundState(part)
    monkeypatch.setattr(found, "optimizers", lambda: [torch.optim.SGD(model.parameters())])
    assert [name for name, _ in found.parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert found.modules() == [model]
