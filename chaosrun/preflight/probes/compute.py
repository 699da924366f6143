"""Compute on one device: memory, products whose every entry is known beforehand, and a little training, bit for bit.

What it is at goes out line by line before it is begun: when the process hangs or dies, who asked knows where.
"""

import os
from typing import Any

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.processor import FEWER_THREADS, processor

CPU_BYTES = 16 << 20
GPU_SHARE = 0.75
"""Of the memory that is free."""
KERNELS = ("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
SETTINGS = (*KERNELS, *FEWER_THREADS)
"""Environment variables that make a CPU compute other bits."""


def probe(**parameters: Any) -> Facts:
    """`device`: "cpu" or "cuda"; `progress`: the file descriptor for what it is at; `threads`; `products`: whether
    memory and products are tried; `training`: None or {"repeats", "seconds", "cores": whether on each core}."""

    def say(phase: str) -> None:
        os.write(parameters["progress"], f"{phase}\n".encode())

    say("import of torch")
    import torch

    from chaosrun.preflight.probes import fingerprinted_training as little_training
    from chaosrun.preflight.probes import products

    threads, training = parameters["threads"], parameters["training"]
    device = torch.device(parameters["device"])
    torch.set_num_threads(threads)
    if device.type == "cuda":
        from chaosrun.protocol.determinism import pin

        # The CPU's kernels need none of it, and it loads the compiler.
        pin(seed=0, deterministic="strict", threads=threads)
    say("first use")
    facts: dict[str, Any] = {"kind": _cpu(torch) if device.type == "cpu" else _gpu(torch, device)}
    if parameters["products"]:
        say("allocation")
        size = CPU_BYTES if device.type == "cpu" else int(torch.cuda.mem_get_info(device)[0] * GPU_SHARE)
        facts["memory"] = {"bytes": size, "wrong": products.check_memory(device, size)}
        facts["products"] = products.check_products(device, say)
        say("speed of a product")
        facts["gflops"] = products.product_gflops(device)
    if training:
        counts = sorted({1, threads}) if device.type == "cpu" else [threads]
        share_s = training["seconds"] / len(counts)
        facts["training"] = [
            little_training.repeated(device, threads=count, repeats=training["repeats"], seconds=share_s, say=say)
            for count in counts
        ]
        if device.type == "cpu" and training["cores"]:
            cores = sorted(os.sched_getaffinity(0))
            differing = little_training.other_cores(facts["training"][0]["operations"], cores, say)
            facts["cores"] = {"tried": len(cores), "differing": differing}
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
