"""The canary sees what changes the bits of kernels, and nothing else."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from chaosrun.observe.environment import canary

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
SAY = "import torch as t; t.set_num_threads(1); from chaosrun.observe.environment import canary; print(canary(t.device('cpu')))"


def test_another_instruction_set_shows() -> None:
    if torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no other instruction set to leave out")
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    other = subprocess.run([sys.executable, "-c", SAY], env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert len(other) == 16
    assert other != canary(CPU)


def test_the_thread_count_shows() -> None:
    alone = canary(CPU)
    torch.set_num_threads(2)
    assert canary(CPU) != alone


def test_it_draws_nothing_and_leaves_nothing() -> None:
    before = torch.get_rng_state()
    with torch.no_grad():
        first = canary(CPU)
        assert not torch.is_grad_enabled()
    assert canary(CPU) == first
    assert torch.equal(torch.get_rng_state(), before)


def test_it_is_the_same_in_whatever_context_the_training_loop_runs() -> None:
    alone = canary(CPU)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert canary(CPU) == alone
    with torch.inference_mode():
        assert canary(CPU) == alone


@pytest.mark.parametrize("saving", [None, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_it_may_be_the_first_thing_in_a_pass_whose_activations_are_checkpointed(saving: CheckpointPolicy | None) -> None:
    layer, inputs = torch.nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True)
    found: list[str] = []

    def of_all(*_: object, **__: object) -> CheckpointPolicy:
        assert saving is not None
        return saving

    def first_pass(values: torch.Tensor) -> torch.Tensor:
        if not found:
            found.append(canary(CPU))
        return layer(values).relu()

    more: Any = {} if saving is None else {"context_fn": lambda: create_selective_checkpoint_contexts(of_all)}
    checkpoint(first_pass, inputs, use_reentrant=False, **more).sum().backward()
    given, inputs.grad = inputs.grad, None
    layer(inputs).relu().sum().backward()
    assert given is not None and inputs.grad is not None and torch.equal(given, inputs.grad)
    assert found == [canary(CPU)]
