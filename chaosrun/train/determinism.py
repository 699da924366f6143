"""Pins what makes two executions of one script differ, before the script's first line runs (hazards K1, K3-K5, K7, C5).

PYTHONHASHSEED and the thread counts that libraries read when they are loaded are set earlier still, in the environment of the
fork server (`process_environment`).
"""

import os
import platform
import random
from typing import Any, Literal

import numpy
import torch

__all__ = ["environment_facts", "pin", "seed_everything"]


def pin(*, seed: int, deterministic: Literal["strict", "warn", "off"], threads: int) -> None:
    """Fix algorithms, thread count and seeds. Call before CUDA starts: cuBLAS reads its workspace setting then.

    Source: the torch notes on reproducibility; NCCL's algorithm choice (nccl#457) is fixed unless the job's env sets it.
    """
    os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(threads)
    torch.set_num_threads(threads)
    if deterministic != "off":
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("NCCL_ALGO", "Ring")
        os.environ.setdefault("NCCL_PROTO", "Simple")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        # Costs some 3% of a step and changes nothing unless the program reads memory that it has not written; that shows up in
        # the comparison of bits.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
        torch.backends.cudnn.benchmark = False
        torch.backends.cudnn.deterministic = True
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    seed_everything(seed)


def seed_everything(seed: int) -> None:
    """Seed python, numpy (legacy global stream) and torch on all devices."""
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def environment_facts() -> dict[str, Any]:
    """What must be equal on both legs for their bits to be comparable: versions, instruction set or GPU, threads, settings."""
    import accelerate

    facts: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "torch": torch.__version__,
        "accelerate": accelerate.__version__,
        "numpy": numpy.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "python_hash_seed": os.environ.get("PYTHONHASHSEED", "random"),
    }
    if torch.cuda.is_available():
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "cublas_workspace": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
        }
    return facts
