"""The canary sees what changes the bits of kernels, and nothing else."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from chaosrun.observe.canary import canary

CPU = torch.device("cpu")
SAY = "import torch; torch.set_num_threads(1); from chaosrun.observe.canary import canary; print(canary(torch.device('cpu')))"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
