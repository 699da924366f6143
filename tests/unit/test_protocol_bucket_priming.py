"""The primer meets DDP's wrappers at their first pass, and lays nothing on a script's models."""

import copy
import pickle
import warnings
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from chaosrun.protocol import bucket_priming
from chaosrun.protocol.bucket_priming import BucketPrimer

INPUTS = torch.ones(1, 2)


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def bare() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1))


def wrapped(bare: torch.nn.Module, primer: BucketPrimer) -> DistributedDataParallel:
    model = DistributedDataParallel(bare)
    primer.expect(model)
    return model


def train(model: torch.nn.Module, primer: BucketPrimer) -> None:
    loss: torch.Tensor = model(INPUTS).sum()
    assert primer.is_due
    primer.prime(lambda root: root.backward(), loss)
    assert primer.done and primer.primed


@pytest.mark.parametrize("restored", [True, False])
def test_gradients_that_were_restored_lie_in_the_buckets_before_the_last_pass(bare: torch.nn.Module, restored: bool) -> None:
    """DDP divides what lies there; what it copies there, it multiplies by the inverse, which at three ranks differs."""
    primer = BucketPrimer([bare])
    model = DistributedDataParallel(bare, gradient_as_bucket_view=True)
    for parameter in bare.parameters() if restored else ():
        parameter.grad = torch.zeros_like(parameter)
    loss: torch.Tensor = model(INPUTS).sum()
    sent: list[bool] = []
    hooks = [parameter.register_hook(lambda _: sent.append(True)) for parameter in bare.parameters()]
    with patch.object(bucket_priming, "_replay_gradients", side_effect=bucket_priming._replay_gradients) as send:
        primer.prime(lambda root: root.backward(), loss)
    assert [call.kwargs for call in send.mock_calls] == [{}, {"within": True}][: 1 + restored]
    assert len(sent) == len(hooks) == len([*bare.parameters()])
    primed = [parameter.grad for parameter in bare.parameters()]
    bare.zero_grad()
    bare(INPUTS).sum().backward()
    assert f"{primed}" == f"{[parameter.grad for parameter in bare.parameters()]}"


@pytest.mark.parametrize("by_chaosrun", [True, False])
def test_an_expected_model_is_scripted_copied_and_pickled_as_without_chaosrun(bare: torch.nn.Module, by_chaosrun: bool) -> None:
    before = copy.deepcopy(bare)
    primer = BucketPrimer([bare] if by_chaosrun else [], saves_itself=not by_chaosrun)
    model = DistributedDataParallel(bare)
    if not by_chaosrun:
        primer.expect(model)
    for step in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            scripted: Any = torch.jit.script(bare)
        assert torch.equal(scripted(INPUTS), bare(INPUTS))
        assert b"chaosrun" not in pickle.dumps(copy.deepcopy(bare))
        for own, stock in zip(bare.modules(), before.modules(), strict=True):
            hooks = {name: value for name, value in vars(own).items() if name.endswith("_hooks")}
            assert hooks == {name: vars(stock)[name] for name in hooks}
        if not step:
            train(model, primer)


def test_two_wrappers_of_one_model_are_primed_one_after_the_other(bare: torch.nn.Module) -> None:
    primer = BucketPrimer([], saves_itself=True)
    first, second = wrapped(bare, primer), wrapped(bare, primer)
    train(second, primer)
    train(first, primer)
    layout = primer.layout()
    assert layout is not None and len(layout) == 2
    second(INPUTS)
    assert not primer.is_due


def test_a_wrapper_that_a_script_has_thrown_away_is_not_waited_for(bare: torch.nn.Module) -> None:
    primer = BucketPrimer([], saves_itself=True)
    wrapped(bare, primer)
    train(wrapped(bare, primer), primer)


@pytest.mark.parametrize("passes", [1, 2])
def test_a_wrapper_that_was_trained_before_keeps_its_buckets(bare: torch.nn.Module, passes: int) -> None:
    model = DistributedDataParallel(bare)
    for _ in range(passes):
        model(INPUTS).sum().backward()
    primer = BucketPrimer([model])
    model(INPUTS)
    assert primer.done and primer.primed and not primer.is_due
    assert primer.layout() == [[3, 2, 1, 0]]


def test_no_pass_outside_a_wrapper_or_without_gradients_or_of_another_model_is_met(bare: torch.nn.Module) -> None:
    primer = BucketPrimer([bare])
    model, other = DistributedDataParallel(bare), DistributedDataParallel(torch.nn.Linear(2, 1))
    bare(INPUTS)
    other(INPUTS)
    with torch.no_grad():
        model(INPUTS)
    assert not primer.is_due and primer.layout() is None
    train(model, primer)


def test_no_sync_counts_around_the_forward_pass_alone(bare: torch.nn.Module) -> None:
    primer = BucketPrimer([], saves_itself=True)
    model = wrapped(bare, primer)
    with model.no_sync():
        loss: torch.Tensor = model(INPUTS).sum()
    assert not primer.is_due, "nothing is reduced in its backward pass"
    loss.backward()
    loss = model(INPUTS).sum()
    with torch.no_grad():
        model(INPUTS)
    with model.no_sync():
        assert primer.is_due, "modded-nanogpt: DDP reduces in this pass, and rebuilds in the next"
        primer.prime(lambda root: root.backward(), loss)
    assert primer.done and primer.primed


def test_a_reduction_that_accelerate_triggers_later_is_seen(bare: torch.nn.Module) -> None:
    primer = BucketPrimer([], saves_itself=True)
    model = wrapped(bare, primer)
    with model.no_sync():
        loss: torch.Tensor = model(INPUTS).sum()
    with Accelerator.trigger_sync_in_backward(model):
        assert primer.is_due
        primer.prime(lambda root: root.backward(), loss)
    assert primer.done and primer.primed


def test_a_compiled_wrapper_is_met(bare: torch.nn.Module) -> None:
    primer = BucketPrimer([], saves_itself=True)
    compiled: Any = torch.compile(wrapped(bare, primer), backend="eager")
    train(compiled, primer)
