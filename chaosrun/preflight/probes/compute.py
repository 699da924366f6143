"""Compute on one device: memory, products whose every entry is known beforehand, and a little training, bit for bit.

What it is at goes out line by line before it is begun: when the process hangs or dies, who asked knows where.
"""

import os
from dataclasses import dataclass, field, replace
from typing import Any

from chaosrun.preflight.probes.fingerprinted_training import Training
from chaosrun.preflight.probes.processor import FEWER_THREADS, processor
from chaosrun.preflight.probes.products import Product

CPU_BYTES = 16 << 20
GPU_SHARE = 0.75
"""Of the memory that is free."""
KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
SETTINGS = (*KERNELS, *FEWER_THREADS)
"""Environment variables that make a CPU compute other bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryTried:
    bytes: int
    wrong: int
    """Of them, how many were not read back as they had been written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    tried: int
    differing: dict[str, str]
    """The first operation that differs, by core."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeFacts:
    kind: dict[str, Any] = field(default_factory=dict)
    """What the bits of this device depend on, apart from the number of threads."""
    memory: MemoryTried | None = None
    products: tuple[Product, ...] = ()
    gflops: float = 0.0
    training: tuple[Training, ...] = ()
    cores: Cores | None = None


def probe(
    *, device: str, progress: int, threads: int, products: bool, training: dict[str, Any] | None, visible: str = ""
) -> ComputeFacts:
    """`device`: "cpu" or "cuda"; `progress`: the file descriptor for what it is at; `products`: whether memory and products
    are tried; `training`: None or {"repeats", "seconds", "cores": whether on each core}."""

    def say(phase: str) -> None:
        os.write(progress, f"{phase}\n".encode())

    say("import of torch")
    import torch

    from chaosrun.preflight.probes import fingerprinted_training
    from chaosrun.preflight.probes import products as tried

    which = torch.device(device)
    torch.set_num_threads(threads)
    if device == "cuda":
        from chaosrun.protocol.determinism import pin

        # The CPU's kernels need none of it, and it loads the compiler.
        pin(seed=0, deterministic="strict", threads=threads)
    say("first use")
    facts = ComputeFacts(kind=_cpu(torch) if device == "cpu" else _gpu(torch, which))
    if products:
        say("allocation")
        size = CPU_BYTES if device == "cpu" else int(torch.cuda.mem_get_info(which)[0] * GPU_SHARE)
        memory = MemoryTried(bytes=size, wrong=tried.check_memory(which, size))
        exact = tuple(tried.check_products(which, say))
        say("speed of a product")
        facts = replace(facts, memory=memory, products=exact, gflops=tried.product_gflops(which))
    if training:
        counts = sorted({1, threads}) if device == "cpu" else [threads]
        seconds, repeats = training["seconds"] / len(counts), training["repeats"]
        rounds = tuple(
            fingerprinted_training.repeated(which, threads=count, repeats=repeats, seconds=seconds, say=say) for count in counts
        )
        facts = replace(facts, training=rounds)
        if device == "cpu" and training["cores"]:
            cores = sorted(os.sched_getaffinity(0))
            differing = fingerprinted_training.other_cores(rounds[0].operations, cores, say)
            facts = replace(facts, cores=Cores(tried=len(cores), differing=differing))
    return facts


def _cpu(torch: Any) -> dict[str, Any]:
    """What the bits of this CPU depend on, apart from the number of threads."""
    return {
        **processor(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "settings": {name: value for name in SETTINGS if (value := os.environ.get(name)) and value.lower() != "false"},
    }


def _gpu(torch: Any, device: Any) -> dict[str, Any]:
    """The same of a GPU. Raises RuntimeError when torch cannot use it."""
    torch.zeros(1, device=device)
    properties = torch.cuda.get_device_properties(device)
    return {
        "model": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "units": properties.multi_processor_count,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
