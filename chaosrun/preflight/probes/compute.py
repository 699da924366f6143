"""Computes on one device: memory, products with known entries, and a little training, bit for bit.

Prints each phase on a line before it begins, so that the parent knows where the process hung or died.
"""

import os
import platform
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct, structs

from chaosrun.observe.limits import read
from chaosrun.preflight.probes.fingerprinted_training import FingerprintedTraining

if TYPE_CHECKING:
    import torch
    from torch import Tensor

INNER = 248
"""Length of every sum of a product: below 256, up to which bfloat16 holds all integers."""
BLOCK_BYTES = 1 << 30
PATTERN = 0x5AA5C33C_0FF01E87
CPU_BYTES = 16 << 20
GPU_SHARE = 0.75
"""Of the memory that is free."""
FEWER_THREADS = ("OMP_DYNAMIC", "OMP_THREAD_LIMIT", "OMP_MAX_ACTIVE_LEVELS")
"""Environment variables that let OpenMP give a library fewer threads than it has shared its work out to. Measured with torch
2.13, 2 threads and any of the three: of a bfloat16 product half of the entries are 0."""
SETTINGS = (
    *("ATEN_CPU_CAPABILITY", "MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"),
    *FEWER_THREADS,
)
"""Environment variables that make a CPU compute other bits."""
_COMPUTES = re.compile(r"(?:avx|fma|f16c|sse|ssse|amx|sve|sme|asimd|bf16|fphp|i8mm).*")
"""Features that libraries choose kernels by. The others come and go with kernels and hypervisors."""


class DeviceKind(Struct, frozen=True, kw_only=True):
    """What a device's bits depend on, besides the number of threads."""

    capability: str
    """The instruction set that torch uses, or a GPU's compute capability."""
    model: str
    torch: str
    features: str = ""
    caches: str = ""
    """Sizes by which libraries choose their blocks."""
    units: int = 0
    """Multiprocessors."""
    cuda: str | None = None
    cudnn: int | None = None
    settings: dict[str, str] = {}


class Product(Struct, frozen=True, kw_only=True):
    dtype: str
    entries: int
    wrong: int
    first: str
    """The place and value of the first wrong entry."""


class ComputeFacts(Struct, frozen=True, kw_only=True):
    kind: DeviceKind
    memory_bytes: int = 0
    memory_wrong: int = 0
    """How many of them were wrong when read back."""
    products: tuple[Product, ...] = ()
    gflops: float = 0.0
    training: tuple[FingerprintedTraining, ...] = ()
    """With each number of threads."""


def probe(
    *, device: str, progress: int, threads: int = 1, products: bool = False, repeats: int = 0, seconds: float = 0.0
) -> ComputeFacts:
    """`device`: "cpu" or "cuda"; `progress`: the file descriptor for announcing phases; `products`: whether to test memory and
    products; `repeats` of the training, for `seconds`."""

    def say(phase: str) -> None:
        os.write(progress, f"{phase}\n".encode())

    say("import of torch")
    import torch

    from chaosrun.preflight.probes import fingerprinted_training

    which = torch.device(device)
    torch.set_num_threads(threads)
    if device == "cuda":
        from chaosrun.protocol.determinism import pin

        # Not needed for the CPU's kernels, and it loads the compiler.
        pin(seed=0, deterministic="strict", threads=threads)
    say("first use")
    facts = ComputeFacts(kind=kind_of(which))
    if products:
        say("allocation")
        size = CPU_BYTES if device == "cpu" else int(torch.cuda.mem_get_info(which)[0] * GPU_SHARE)
        wrong, exact = check_memory(which, size), tuple(check_products(which, say))
        say("speed of a product")
        gflops = product_gflops(which)
        facts = structs.replace(facts, memory_bytes=size, memory_wrong=wrong, products=exact, gflops=gflops)
    if repeats:
        counts = sorted({1, threads}) if device == "cpu" else [threads]
        each_s = seconds / len(counts)
        training = tuple(
            fingerprinted_training.repeated(which, threads=count, repeats=repeats, seconds=each_s, say=say) for count in counts
        )
        facts = structs.replace(facts, training=training)
    return facts


def kind_of(device: "torch.device") -> DeviceKind:
    """Raises RuntimeError when torch cannot use it."""
    import torch

    if device.type == "cpu":
        model, features = read_cpuinfo(read(Path("/proc/cpuinfo")), platform.machine())
        caches = sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"))
        return DeviceKind(
            capability=torch.backends.cpu.get_cpu_capability(),
            model=model,
            torch=str(torch.__version__),
            features=features,
            caches=" ".join(map(read, caches)),
            settings={name: value for name in SETTINGS if (value := os.environ.get(name)) and value.lower() != "false"},
        )
    torch.zeros(1, device=device)
    properties = torch.cuda.get_device_properties(device)
    return DeviceKind(
        capability=f"{properties.major}.{properties.minor}",
        model=properties.name,
        torch=str(torch.__version__),
        units=properties.multi_processor_count,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version(),
    )


def read_cpuinfo(text: str, machine: str) -> tuple[str, str]:
    """(model, features) of the first processor in the text of /proc/cpuinfo."""
    first = text.partition("\n\n")[0]
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in first.splitlines())}
    numbers = [fields[name] for name in ("cpu family", "model", "CPU implementer", "CPU part") if fields.get(name)]
    name = fields.get("model name") or machine
    features = fields.get("flags", fields.get("Features", "")).split()
    # Hypervisors give a whole generation one name.
    model = f"{name} ({'/'.join(numbers)})" if numbers else name
    return model, " ".join(sorted(feature for feature in features if _COMPUTES.fullmatch(feature)))


# Memory, and products whose every entry is known without another product


def check_memory(device: "torch.device", size_bytes: int) -> int:
    """Allocate, write and read back; returns how many bytes were read back wrong."""
    import torch

    words = max(1, size_bytes // 8)
    block = BLOCK_BYTES // 8
    blocks = [
        torch.full((min(block, words - start),), PATTERN, dtype=torch.int64, device=device) for start in range(0, words, block)
    ]
    return sum(8 * int((block != PATTERN).sum()) for block in blocks)


def check_products(device: "torch.device", say: Callable[[str], None]) -> list[Product]:
    """One product per dtype. Both factors are made of two lists of integers, a[i] u[k] and v[k] b[j]: every entry of the
    product is a[i] b[j] times one sum. Every factor and partial sum is an integer that the dtype holds exactly, so the product
    has one right answer for any order of summation."""
    import torch

    gpu = device.type == "cuda"
    side = 2048 if gpu else INNER
    results = []
    for dtype in [torch.float32, torch.float64, torch.bfloat16, *([torch.float16] if gpu else [])]:
        name = str(dtype).removeprefix("torch.")
        say(f"{name} product")
        largest = 8 if dtype in (torch.float32, torch.float64) else 1
        (a, b), (u, v) = ((_integers(length, salt, largest) for salt in (3, 5)) for length in (side, INNER))
        # A plain sum of products, exact in int64, so that the expected value does not come from a matrix product kernel.
        expected = torch.outer(a, b).double() * int((u * v).sum())
        product = torch.matmul(torch.outer(a, u).to(device, dtype), torch.outer(v, b).to(device, dtype)).cpu().double()
        wrong = (product != expected).nonzero()
        first = ""
        if len(wrong):
            row, column = wrong[0].tolist()
            first = f"{product[row, column].item()!r} instead of {int(expected[row, column])} in row {row}, column {column}"
        results.append(Product(dtype=name, entries=product.numel(), wrong=len(wrong), first=first))
    return results


def _integers(count: int, salt: int, largest: int) -> "Tensor":
    """Irregular integers from 1 to `largest`, of either sign."""
    import torch

    at = torch.arange(1, count + 1)
    mixed = (at * at * 7919 + at * salt * 104729) >> 3
    return (mixed % largest + 1) * (1 - 2 * ((mixed >> 5) % 2))


def product_gflops(device: "torch.device") -> float:
    """The fastest of a few float32 products, in 10^9 floating point operations a second."""
    import torch

    side = 8192 if device.type == "cuda" else 768
    square = torch.ones(side, side, device=device)
    fastest = float("inf")
    for _ in range(4):
        start = time.perf_counter()
        torch.matmul(square, square)
        if device.type == "cuda":
            torch.cuda.synchronize()
        fastest = min(fastest, time.perf_counter() - start)
    return 2 * side**3 / fastest / 1e9
