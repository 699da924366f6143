"""How many bytes a second are copied, digested and hashed: what a checkpoint and a recovery of real size are made of.

One thread each, as a rank has it, of a state that lies in memory or, for files, in the page cache.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from chaosrun.checkpoint.audit import hash_member
from chaosrun.observe.fingerprint import digests, fingerprint
from tests.benchmarks.samples import Samples

__all__ = ["BYTES", "measure_throughput"]

BYTES = 500_000_000
TENSORS = 100


def measure_throughput(repeats: int, progress: Callable[[str], None]) -> dict[str, Samples]:
    """Seconds for BYTES, by what is done with them, everything once in each turn."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tensors = list(torch.ones(BYTES // 4).chunk(TENSORS))
    copies = [torch.empty_like(tensor) for tensor in tensors]
    named = {f"{number}": tensor for number, tensor in enumerate(tensors)}
    with tempfile.TemporaryDirectory(prefix="throughput-") as folder:
        member, copy = Path(folder) / "member", Path(folder) / "copy"
        with member.open("wb") as file:
            for tensor in tensors:
                file.write(tensor.numpy().tobytes())
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: [to.copy_(tensor) for to, tensor in zip(copies, tensors, strict=True)],
            "fingerprint of parameters": lambda: fingerprint(tensors),
            "digest of each tensor": lambda: digests(named),
            "hash of a file": lambda: hash_member(member.parent, member.name),
            "read of a file": lambda: _read(member),
            "copy of a file": lambda: shutil.copyfile(member, copy),
        }
        found = {name: Samples() for name in ways}
        for repeat in range(repeats + 1):
            for name, once in ways.items():
                began = time.perf_counter()
                once()
                if repeat:  # The first one gets its memory.
                    found[name].values.append(time.perf_counter() - began)
        torch.set_num_threads(threads)
    progress("throughput: " + ", ".join(f"{name} {BYTES / 1e9 / (each.median or 1):.2f} GB/s" for name, each in found.items()))
    return found


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
