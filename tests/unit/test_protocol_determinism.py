"""What `deterministic` pins, what the records say of it, and how an operation that torch refuses is reported."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from chaosrun.observe.environment import record_changes, record_environment
from chaosrun.protocol.determinism import Determinism, refused_operation
from tests.unit.forked import printed

IMPORTS = """
import json, os, warnings
import torch, torch._dynamo
from chaosrun.observe.environment import environment_facts
from chaosrun.protocol.determinism import pin

def operation():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            torch.zeros(5).put_(torch.tensor([0]), torch.ones(1))
        except RuntimeError:
            return "refused"
    return "warned" if any("put_" in str(warning.message) for warning in caught) else "silent"

def pinned(deterministic, tf32=False):
    torch.backends.cudnn.benchmark = True
    pin(seed=3, deterministic=deterministic, threads=2)
    if tf32 and hasattr(torch.backends, "fp32_precision"):
        torch.backends.cuda.matmul.fp32_precision = "tf32"
    print(json.dumps([environment_facts(), operation(), os.environ.get("MKL_NUM_THREADS")]))
"""
SETTINGS = {
    "strict": "pinned('strict')",
    "warn": "pinned('warn')",
    "off": "pinned('off')",
    "tf32": "pinned('strict', tf32=True)",
}


@pytest.fixture(scope="module")
def pinned() -> dict[str, tuple[dict[str, Any], str, str]]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("CUBLAS_WORKSPACE_CONFIG", "OMP_NUM_THREADS")
    }
    told = printed(IMPORTS, [*SETTINGS.values()], environment)
    return {name: json.loads(told[program]) for name, program in SETTINGS.items()}


@pytest.mark.parametrize(("deterministic", "operation"), [("strict", "refused"), ("warn", "warned"), ("off", "silent")])
def test_an_operation_without_a_deterministic_implementation(pinned: Any, deterministic: str, operation: str) -> None:
    facts, happened, _ = pinned[deterministic]
    assert (facts["deterministic"], happened) == (deterministic, operation)


@pytest.mark.parametrize("deterministic", ["strict", "warn"])
def test_what_is_pinned_is_recorded(pinned: Any, deterministic: str) -> None:
    facts, _, mkl = pinned[deterministic]
    assert (facts["cudnn_deterministic"], facts["cudnn_benchmark"]) == (True, False)
    assert facts["cublas_workspace"] == ":4096:8"
    assert (facts["threads"], facts["omp_num_threads"], mkl) == (2, "2", "2")
    assert "tf32" not in (facts["fp32_cuda_matmul"], facts["fp32_cudnn_conv"])


def test_off_leaves_algorithms_as_they_are_but_not_threads(pinned: Any) -> None:
    facts, _, mkl = pinned["off"]
    assert (facts["cudnn_benchmark"], facts["cublas_workspace"]) == (True, "")
    assert (facts["threads"], facts["omp_num_threads"], mkl) == (2, "2", "2")


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="this torch has one way to set TF32")
def test_a_script_that_sets_tf32_in_torchs_newer_way_is_recorded_and_breaks_nothing(pinned: Any) -> None:
    assert pinned["tf32"][0]["fp32_cuda_matmul"] == "tf32"


def test_what_the_script_changes_afterwards_is_recorded_as_its_own(tmp_path: Path) -> None:
    path = tmp_path / "environment.json"
    facts, threads = record_environment(path), torch.get_num_threads()
    record_changes(path, facts)
    assert json.loads(path.read_bytes()) == facts
    try:
        torch.set_num_threads(threads + 1)
        record_changes(path, facts)
    finally:
        torch.set_num_threads(threads)
    assert json.loads(path.read_bytes()) == {**facts, "changed": ["threads"]}


class Refused(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        torch.use_deterministic_algorithms(True)
        return torch.zeros(5).put_(torch.tensor([0]), torch.ones(1))


def refusal(deterministic: Determinism, loader_workers: int) -> Any:
    try:
        next(iter(DataLoader(Refused(), num_workers=loader_workers)))
    except RuntimeError as error:
        return refused_operation(error, deterministic)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("loader_workers", [0, 1])
@pytest.mark.parametrize(("deterministic", "hint"), [("strict", "deterministic: warn"), ("off", "in the job file")])
def test_a_refused_operation_is_named_with_what_to_do(deterministic: Determinism, hint: str, loader_workers: int) -> None:
    error = refusal(deterministic, loader_workers)
    assert error.message.startswith("put_ has no deterministic implementation")
    assert hint in error.hint


def test_cublas_without_its_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    said = (
        "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
        "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS and "
        "you have CUDA >= 10.2."
    )
    error = refused_operation(RuntimeError(said), "strict")
    assert error is not None and error.hint is not None
    assert ":0:0" in error.message and ":4096:8" in error.hint


@pytest.mark.parametrize(
    "error", [RuntimeError("shapes differ"), ValueError("put_ does not have a deterministic implementation")]
)
def test_any_other_error_speaks_for_itself(error: Exception) -> None:
    assert refused_operation(error, "strict") is None
