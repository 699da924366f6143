"""A checkpoint restored into a script that is not quite the one that saved it: nothing of that goes unnoticed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from fresh import forget_accelerate

from chaosrun.errors import (
    HookedStateError,
    OptimizerCastError,
    ParameterOrderError,
    RegisteredStateError,
    RestoreMismatchError,
)
from chaosrun.faults.points import FaultPoints
from chaosrun.protocol.checkpointing import Checkpointer
from chaosrun.protocol.state import TrainingState
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position
from tests.integration.ranks import make_orders

POSITION = Position(epoch=0, batches=3, step=3)


class Training:
    """One prepared training, as a new process would make it."""

    def __init__(
        self,
        folder: Path,
        *,
        reorder: bool = False,
        lr: float = 0.1,
        dtype: torch.dtype = torch.float32,
        kind: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        forget_accelerate()
        torch.manual_seed(0)
        self.accelerator = Accelerator(cpu=True)
        # What a GPU job in fp16 gets from accelerate.
        self.accelerator.scaler = self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)).to(dtype)
        parameters = list(model.parameters())
        optimizer = kind(parameters[2:] + parameters[:2] if reorder else parameters, lr=lr)
        self.dtype = dtype
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        leg = LegLayout(folder / "leg", None)
        faults = FaultPoints(order(leg.path), leg)
        self.checkpointer = Checkpointer(self.accelerator, TrainingState(self.accelerator), order(leg.path), leg, faults)

    @property
    def bare(self) -> torch.nn.Module:
        return self.accelerator.unwrap_model(self.model)

    def schedule(self) -> Any:
        return self.accelerator.prepare(torch.optim.lr_scheduler.StepLR(self.optimizer.optimizer, 1, gamma=0.5))

    def learn(self) -> "Training":
        loss = self.model(torch.ones(2, 3, dtype=self.dtype)).square().mean()
        self.accelerator.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return self

    def moments(self) -> dict[str, Any]:
        """By the parameter's name."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return {names[id(each)]: state["exp_avg"].tolist() for each, state in self.optimizer.optimizer.state.items()}


def order(leg: Path) -> WorkerOrder:
    (alone,) = make_orders(leg, "", workers=1)
    return replace(alone, args=(), every_steps=3)


def save(folder: Path, prepare: Callable[[Training], Any] = lambda training: None, **options: Any) -> tuple[Training, str]:
    training = Training(folder, **options)
    prepare(training)
    training.learn().learn()
    return training, training.checkpointer.save(POSITION, {})


def test_the_same_script_gets_everything_back(tmp_path: Path) -> None:
    saved, name = save(tmp_path, Training.schedule)
    expected = saved.moments()
    assert saved.scaler.get_scale() == 8.0, "the scale has grown since the beginning"
    again = Training(tmp_path)
    again.schedule()
    assert again.checkpointer.restore(name, {}) == POSITION
    assert again.moments() == expected
    assert again.scaler.get_scale() == 8.0


def test_parameters_in_another_order(tmp_path: Path) -> None:
    """O5: torch's optimizers know parameters by their number, and shapes that agree load silently."""
    _, name = save(tmp_path)
    told = f"rank 0: the optimizer's parameter 0 is 1.weight, in checkpoint {name} it is 0.weight"
    with pytest.raises(ParameterOrderError, match=f"^{told}"):
        Training(tmp_path, reorder=True).checkpointer.restore(name, {})


class Swap:
    """An average that is written in the model's place."""

    def __call__(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        weights[0] = {name: value * 0.5 for name, value in weights[0].items()}


def halve(models: list[Any], weights: list[Any], output_dir: str) -> None:
    with torch.no_grad():
        for parameter in models[0].parameters():
            parameter.mul_(0.5)


def test_a_hook_that_saves_something_else_is_named(tmp_path: Path) -> None:
    _, name = save(tmp_path, lambda training: training.accelerator.register_save_state_pre_hook(Swap()))
    again = Training(tmp_path)
    again.accelerator.register_save_state_pre_hook(Swap())
    told = r"model is not what checkpoint .* the script's hooks on saving and loading: Swap"
    with pytest.raises(HookedStateError, match=told):
        again.checkpointer.restore(name, {})


def rounds(module: torch.nn.Module, state: dict[str, Any], *_: Any) -> None:
    for name in list(state):
        state[name] = state[name].half().float()


def forgets(module: torch.nn.Module, *_: Any) -> None:
    with torch.no_grad():
        dict(module.named_parameters())["1.weight"].zero_()


def forgets_moments(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


@pytest.mark.parametrize(
    ("component", "hook", "add"),
    [
        ("model", "rounds", lambda training: training.bare.register_state_dict_post_hook(rounds)),
        ("model", "forgets", lambda training: training.bare.register_load_state_dict_post_hook(partial(forgets))),
        (
            "optimizer",
            "forgets_moments",
            lambda training: training.optimizer.optimizer.register_load_state_dict_post_hook(forgets_moments),
        ),
    ],
)
def test_a_hook_of_torchs_state_dicts_that_changes_them_is_named(
    tmp_path: Path, component: str, hook: str, add: Callable[[Training], Any]
) -> None:
    _, name = save(tmp_path, add)
    again = Training(tmp_path)
    add(again)
    told = f"{component} is not what checkpoint .* the script's hooks on saving and loading: {hook}\n"
    with pytest.raises(HookedStateError, match=told):
        again.checkpointer.restore(name, {})


@pytest.mark.parametrize(
    ("hook", "changed"),
    [
        (lambda models, weights, output_dir: None, {}),
        (halve, {"model": "0.bias and 3 more"}),
        (lambda models, weights, output_dir: models[0].eval(), {"mode": "0. and 2 more"}),
        (lambda models, weights, output_dir: torch.rand(1), {"rng": "torch"}),
    ],
)
def test_what_a_save_changes_of_the_live_state_is_known(tmp_path: Path, hook: Any, changed: dict[str, str]) -> None:
    saved, _ = save(tmp_path, lambda training: training.accelerator.register_save_state_pre_hook(hook))
    assert saved.checkpointer.changed == changed


def test_moments_that_loading_rounds_to_the_parameters_type(tmp_path: Path) -> None:
    """O3: a float32 moment of a bfloat16 parameter comes back as bfloat16."""

    saved = Training(tmp_path, dtype=torch.bfloat16).learn()
    for state in saved.optimizer.optimizer.state.values():
        # As an optimizer does that keeps its moments in full precision.
        state["exp_avg"] = state["exp_avg"].float() + 1e-6
    name = saved.checkpointer.save(POSITION, {})
    with pytest.raises(RestoreMismatchError, match=r"optimizer is not what checkpoint .* holds: '0/state/.*/exp_avg'"):
        Training(tmp_path, dtype=torch.bfloat16).checkpointer.restore(name, {})


def test_that_torch_casts_on_loading_is_told_where_it_is_all_that_differs(tmp_path: Path) -> None:
    _, name = save(tmp_path, dtype=torch.bfloat16, kind=torch.optim.NAdam)
    told = r"'0/state/0.bias/mu_product' was torch.float32 when saved and is torch.bfloat16, its parameter's type"
    with pytest.raises(OptimizerCastError, match=told):
        Training(tmp_path, dtype=torch.bfloat16, kind=torch.optim.NAdam).checkpointer.restore(name, {})

    again = Training(tmp_path, dtype=torch.bfloat16, kind=torch.optim.NAdam)
    load = again.optimizer.load_state_dict

    def forgetful(state: Any) -> None:
        load(state)
        next(iter(again.optimizer.optimizer.state.values()))["exp_avg"].zero_()

    again.optimizer.load_state_dict = forgetful  # type: ignore[method-assign]
    with pytest.raises(RestoreMismatchError) as caught:
        again.checkpointer.restore(name, {})
    assert caught.type is RestoreMismatchError


class Forgetful(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict({**state_dict, "state": {}})


def test_an_optimizer_whose_own_loading_leaves_something_out_is_named(tmp_path: Path) -> None:
    kind = partial(Forgetful, momentum=0.9)
    _, name = save(tmp_path, kind=kind)
    with pytest.raises(RegisteredStateError, match="Forgetful loads by a load_state_dict of its own"):
        Training(tmp_path, kind=kind).checkpointer.restore(name, {})


def test_another_argument_of_the_optimizer_gives_way_to_the_saved_one(tmp_path: Path) -> None:
    """O4: the training goes on as it was, which is what exact means."""
    _, name = save(tmp_path, lr=0.1)
    again = Training(tmp_path, lr=0.7)
    again.checkpointer.restore(name, {})
    assert again.optimizer.param_groups[0]["lr"] == 0.1


def test_a_scheduler_that_is_prepared_after_the_restore(tmp_path: Path) -> None:
    """O10: its state is not where the checkpoint has one."""
    _, name = save(tmp_path, Training.schedule)
    with pytest.raises(RestoreMismatchError, match="scheduler is not what checkpoint"):
        Training(tmp_path).checkpointer.restore(name, {})


def test_a_gradient_scaler_that_is_not_restored(tmp_path: Path) -> None:
    _, name = save(tmp_path)
    again = Training(tmp_path)
    again.scaler.load_state_dict = lambda state: None  # type: ignore[method-assign]
    with pytest.raises(RestoreMismatchError, match=r"optimizer is not what checkpoint .* holds: 'scaler/"):
        again.checkpointer.restore(name, {})
