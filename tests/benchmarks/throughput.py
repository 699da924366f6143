"""How many bytes a second are copied, digested, hashed and sealed: what a checkpoint and a recovery of real size are made of.

One thread each, as a rank has it, of a state that lies in memory or, for files, in the page cache; what is synced goes to the
disk that holds temporary files.
"""

import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import xxhash

from chaosrun.checkpoint.audit import hash_member
from chaosrun.observe.fingerprint import digests, fingerprint, spots
from chaosrun.records.filesystem import Filesystem
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
        member, new = Path(folder) / "member", Path(folder) / "new"
        _write(member, tensors)
        disk = Filesystem()
        ways: dict[str, Callable[[], object]] = {
            "memcpy": lambda: [to.copy_(tensor) for to, tensor in zip(copies, tensors, strict=True)],
            "fingerprint of parameters": lambda: fingerprint(tensors),
            "digest of each tensor": lambda: digests(named),
            "digest of spots of each tensor": lambda: spots(named),
            "xxh3 of each tensor": lambda: [xxhash.xxh3_128_hexdigest(_bytes_of(tensor)) for tensor in tensors],
            "read of a file": lambda: _read(member),
            "xxh3 of a file, as an audit": lambda: hash_member(member.parent, member.name),
            "SHA-256 of a file, as for S3": lambda: _sha256(member),
            "copy of a file": lambda: shutil.copyfile(member, new),
            "write of a file": lambda: _write(new, tensors),
            "write and fsync": lambda: _write(new, tensors, synced=True),
            # As checkpoint.store seals it.
            "write, fsync and xxh3": lambda: (_write(new, tensors), hash_member(new.parent, new.name, sync=disk.sync)),
        }
        found = {name: Samples() for name in ways}
        for repeat in range(repeats + 1):
            for name, once in ways.items():
                new.unlink(missing_ok=True)
                os.sync()  # Nothing of the one before is still being written.
                began = time.perf_counter()
                once()
                if repeat:  # The first one gets its memory.
                    found[name].values.append(time.perf_counter() - began)
        torch.set_num_threads(threads)
    progress("throughput: " + ", ".join(f"{name} {rate(each):.2f} GB/s" for name, each in found.items()))
    return found


def rate(samples: Samples) -> float:
    """Gigabytes a second, of the median."""
    return BYTES / 1e9 / (samples.median or 1)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy())  # pyright: ignore[reportArgumentType]


def _write(path: Path, tensors: list[torch.Tensor], *, synced: bool = False) -> None:
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(_bytes_of(tensor))
        if synced:
            file.flush()
            os.fsync(file.fileno())


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read(path: Path) -> None:
    buffer = bytearray(1 << 20)
    with path.open("rb", buffering=0) as file:
        while file.readinto(buffer):
            pass
