"""A copy of a rank's state in memory that it shares with its writer (`protocol.background`): taken at memory speed.

The state is pickled with the bytes of its tensors left out; those are copied beside it, each storage once, so that tensors
that share one still do in what is read. Nothing of it is in a file: the memory is gone with the processes that hold it.
"""

import ctypes
import io
import mmap
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.storage import TypedStorage

from chaosrun.observe.limits import memory_room

ALIGNMENT = 64
SPARE_BYTES = 256 << 20
"""What a machine keeps free beside a snapshot."""


class Layout(NamedTuple):
    """Where a snapshot's parts lie in its memory, in bytes."""

    offsets: tuple[int, ...]
    """Of the storages."""
    sizes: tuple[int, ...]
    skeleton: int
    size: int
    """Of the whole."""
    locations: tuple[str, ...]
    """Where the storages lay, as `torch.save` writes it: "cpu", "cuda:0"."""


class Arena:
    """Memory of this process and of those that it forks from here on, to be used again for each snapshot."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("chaosrun-snapshot", os.MFD_CLOEXEC)
        self._mapped: mmap.mmap | None = None
        self._pinned: tuple[int, int] | None = None
        """Address and size of what CUDA has locked."""

    def reserve(self, size: int) -> None:
        """Have memory of this size at hand. Raises OSError or MemoryError where there is not enough."""
        size, has = max(size, mmap.PAGESIZE), os.fstat(self._descriptor).st_size
        if size > has:
            if (room := free_memory()) < size - has + SPARE_BYTES:
                raise MemoryError(f"{(size - has) >> 20} MiB of shared memory are needed, {room >> 20} MiB are free")
            os.posix_fallocate(self._descriptor, 0, size)
        self.memory()

    def holds(self, size: int) -> bool:
        """It was had before."""
        return self._mapped is not None and len(self._mapped) >= size

    def memory(self) -> mmap.mmap:
        """All that was reserved, its pages present."""
        size = os.fstat(self._descriptor).st_size
        if self._mapped is None or len(self._mapped) != size:
            self._unpin()
            self._mapped = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        return self._mapped

    def pin(self) -> None:
        """Lock it for copies from GPUs: these are several times as fast then. Raises RuntimeError where CUDA cannot."""
        memory = self.memory()
        at = address(memory), len(memory)
        if self._pinned != at:
            _cuda("cudaHostRegister", *at, 0)
            self._pinned = at

    def _unpin(self) -> None:
        if self._pinned is not None:
            _cuda("cudaHostUnregister", self._pinned[0])
            self._pinned = None


class Taken:
    """A state, pickled but for the bytes of its tensors, which are still the live ones: `copy` takes them."""

    def __init__(self, state: object) -> None:
        """Raises what `pickle` raises for what it cannot take."""
        skeleton = io.BytesIO()
        pickler = _Taker(skeleton)
        pickler.dump(state)
        self._skeleton, self._storages = skeleton.getvalue(), pickler.storages
        offsets, end = list[int](), 0
        for storage in self._storages:
            offsets.append(end)
            end += -(-storage.nbytes() // ALIGNMENT) * ALIGNMENT
        sizes = tuple(storage.nbytes() for storage in self._storages)
        locations = tuple(torch.serialization.location_tag(storage) for storage in self._storages)
        self.layout = Layout(tuple(offsets), sizes, end, end + len(self._skeleton), locations)
        self._gpus = {storage.device for storage in self._storages if storage.device.type == "cuda"}

    def prepare(self, arena: Arena) -> None:
        """Make the memory, which is large enough, ready for the copy. Raises RuntimeError where this cannot be copied."""
        if other := {storage.device.type for storage in self._storages} - {"cpu", "cuda"}:
            raise RuntimeError(f"tensors lie on another device ({', '.join(sorted(other))})")
        if self._gpus:
            arena.pin()

    def copy(self, arena: Arena) -> None:
        """When this returns, whatever becomes of the live state changes nothing of the copy."""
        memory = arena.memory()
        base = address(memory)
        for storage, offset in zip(self._storages, self.layout.offsets, strict=True):
            if not storage.nbytes():
                continue
            if storage.device.type == "cuda":
                # After all that the GPU was told to do before.
                _bytes_of(memory, offset, storage.nbytes()).copy_(storage, non_blocking=True)
            else:
                # Faster than copy_(): what is written is not read into the caches first.
                ctypes.memmove(base + offset, storage.data_ptr(), storage.nbytes())
        memory[self.layout.skeleton : self.layout.size] = self._skeleton
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()


def read(arena: Arena, layout: Layout) -> Any:
    """The state that was copied; its tensors lie in the arena: the next snapshot overwrites them."""
    memory = arena.memory()
    storages = [
        _bytes_of(memory, offset, size) if size else torch.UntypedStorage(0)
        for offset, size in zip(layout.offsets, layout.sizes, strict=True)
    ]
    return _Giver(io.BytesIO(memory[layout.skeleton : layout.size]), storages).load()


def lay_at(arena: Arena, layout: Layout) -> dict[int, str]:
    """Where the storages lay, by the address of their copies."""
    base = address(arena.memory())
    return {base + offset: at for offset, at in zip(layout.offsets, layout.locations, strict=True)}


def address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def free_memory() -> int:
    """Bytes that this process may still take."""
    found = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(kibibytes) << 10 for name, kibibytes, *_ in found if name == "MemAvailable:")
    room = memory_room()
    return free if room is None else min(free, room)


def _cuda(function: str, *arguments: int) -> None:
    torch.cuda.check_error(int(getattr(torch.cuda.cudart(), function)(*arguments)))


def _bytes_of(memory: mmap.mmap, offset: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size).untyped_storage()


class _Taker(pickle.Pickler):
    """As torch.save does, leaves storages out, and numbers them."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._numbers: dict[int, int] = {}
        self.storages: list[torch.UntypedStorage] = []

    def persistent_id(self, obj: Any) -> tuple[int, torch.dtype | None] | None:
        if isinstance(obj, TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, None
        else:
            return None
        number = self._numbers.setdefault(storage._cdata, len(self.storages))
        if number == len(self.storages):
            self.storages.append(storage)
        return number, dtype


class _Giver(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, storages: list[torch.UntypedStorage]) -> None:
        super().__init__(file)
        self._storages = storages

    def persistent_load(self, pid: tuple[int, torch.dtype | None]) -> Any:
        number, dtype = pid
        # What rebuilds tensors of an untyped storage expects a typed one, as torch.load gives it.
        return TypedStorage(wrap_storage=self._storages[number], dtype=dtype or torch.uint8, _internal=True)
