"""A copy of a rank's state in memory that it shares with its writer (`protocol.background`): taken at memory speed.

The state is pickled without the bytes of its tensors; those are copied next to it, each storage once, so that tensors that
share a storage still do when read. A copy in the node's memory (`cluster.forkserver`) outlives its rank, and is sealed right
before its checkpoint is committed: a checkpoint that is in the storage has the copies of all its ranks, and restarted ranks can
load them, without reading files, if every rank finds its copy of that same checkpoint (`copies_of`; `checkpointing` asks the
others). The restored state is compared with the manifest's digests, as in any restore; if it differs on any rank, all read the
files. Each rank has room for two copies, written in turns, so that the newest checkpoint's lasts until the next is committed,
however long the storage takes.
"""

import ctypes
import io
import mmap
import os
import pickle
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch.storage import TypedStorage

from chaosrun.observe.limits import memory_room
from chaosrun.records.layout import checkpoint_name
from chaosrun.records.manifest import Manifest
from chaosrun.records.order import COPIES, WorkerOrder

ALIGNMENT = 64
SPARE_BYTES = 256 << 20
"""What a machine keeps free beside a snapshot."""
HEADER_BYTES = mmap.PAGESIZE
PIECE_BYTES = 4 << 20
COPYING_THREADS = 4
_SEAL = struct.Struct("<QQQQQ")
_DIGEST = struct.Struct("<Q")


class Layout(NamedTuple):
    """The layout of a snapshot in its memory, in bytes: the storages from HEADER_BYTES on, then the rest."""

    skeleton: int
    size: int
    """Size of the whole snapshot."""


class Sealed(NamedTuple):
    """A snapshot whose checkpoint is committed."""

    step: int
    attempt: int
    """The attempt that saved it."""
    layout: Layout


class Arena:
    """Memory shared with the processes that this one forks from here on; reused for each snapshot."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of memory that other processes also hold."""
        self._descriptor = os.memfd_create("chaosrun-snapshot", os.MFD_CLOEXEC) if descriptor is None else descriptor
        self._mapped: mmap.mmap | None = None
        self._pinned: tuple[int, int] | None = None
        """Address and size of what CUDA has locked."""

    @property
    def size(self) -> int:
        """Bytes that were reserved, by this process or another."""
        return os.fstat(self._descriptor).st_size

    def reserve(self, size: int, spare: int = SPARE_BYTES) -> None:
        """Reserve memory of this size. Raises OSError or MemoryError where less than `spare` bytes would be left free."""
        size, has = max(size, HEADER_BYTES), self.size
        if size > has:
            if (room := free_memory()) < size - has + spare:
                raise MemoryError(f"{(size - has) >> 20} MiB of shared memory are needed, {room >> 20} MiB are free")
            os.posix_fallocate(self._descriptor, 0, size)
        self.memory()

    def holds(self, size: int) -> bool:
        """Whether this much is already reserved."""
        return self._mapped is not None and len(self._mapped) >= size

    def memory(self, *, present: bool = True) -> mmap.mmap:
        """All reserved memory. `present`: with its pages mapped in advance, else as they are read."""
        size = self.size
        if self._mapped is None or len(self._mapped) != size:
            self._unpin()
            self._mapped = mmap.mmap(self._descriptor, size, flags=mmap.MAP_SHARED | (mmap.MAP_POPULATE if present else 0))
        return self._mapped

    def pin(self) -> None:
        """Page-lock the memory, which makes copies from GPUs several times as fast. Raises RuntimeError where CUDA cannot."""
        memory = self.memory()
        at = address(memory), len(memory)
        if self._pinned != at:
            self._unpin()
            _cuda("cudaHostRegister", *at, 0)
            self._pinned = at

    def _unpin(self) -> None:
        pinned, self._pinned = self._pinned, None
        if pinned is not None:
            _cuda("cudaHostUnregister", pinned[0])

    def __del__(self) -> None:
        # CUDA goes by addresses: it would treat memory mapped there later as locked.
        self._unpin()

    def seal(self, sealed: Sealed) -> None:
        """Mark the snapshot here as the contents of that checkpoint, which is complete and about to be committed."""
        told = _SEAL.pack(sealed.step, sealed.attempt, *sealed.layout, self._digest(sealed.layout))
        self.memory()[: _SEAL.size + _DIGEST.size] = told + _DIGEST.pack(xxhash.xxh3_64_intdigest(told))

    def unseal(self) -> None:
        self.memory()[: _SEAL.size + _DIGEST.size] = bytes(_SEAL.size + _DIGEST.size)

    def sealed(self) -> Sealed | None:
        """The snapshot in this memory, if its checkpoint was complete and nothing was written here since. The bytes of its
        tensors are not checked."""
        if self.size < HEADER_BYTES:
            return None
        memory = self.memory(present=False)
        told, (digest,) = memory[: _SEAL.size], _DIGEST.unpack_from(memory, _SEAL.size)
        step, attempt, *places, skeleton = _SEAL.unpack(told)
        layout = Layout(*places)
        if digest != xxhash.xxh3_64_intdigest(told) or skeleton != self._digest(layout):
            return None
        return Sealed(step, attempt, layout)

    def _digest(self, layout: Layout) -> int:
        """A digest of everything but the tensors, so that only chaosrun's own pickle is loaded."""
        return xxhash.xxh3_64_intdigest(self.memory()[layout.skeleton : layout.size])


class Taken:
    """A state pickled without the bytes of its tensors, which are still the live ones: `copy` copies them."""

    def __init__(self, state: object) -> None:
        """Raises `pickle`'s error for a value that it cannot pickle."""
        skeleton = io.BytesIO()
        pickler = _StatePickler(skeleton)
        pickler.dump(state)
        self._skeleton, self._storages = skeleton.getvalue(), pickler.storages
        self.layout = Layout(pickler.end, pickler.end + len(self._skeleton))
        self._gpus = {storage.device for _, storage in self._storages if storage.device.type == "cuda"}

    def prepare(self, arena: Arena) -> None:
        """Prepare the memory, which must be large enough, for the copy. Raises RuntimeError where the state cannot be
        copied."""
        if other := {storage.device.type for _, storage in self._storages} - {"cpu", "cuda"}:
            raise RuntimeError(f"tensors lie on another device ({', '.join(sorted(other))})")
        if self._gpus:
            arena.pin()

    def copy(self, arena: Arena) -> None:
        """When this returns, changes of the live state do not affect the copy."""
        arena.unseal()
        memory = arena.memory()
        base = address(memory)
        pieces: list[tuple[int, int, int]] = []
        for offset, storage in self._storages:
            size = storage.nbytes()
            if storage.device.type == "cuda":
                # After everything already enqueued on the GPU.
                _bytes_of(memory, offset, size).copy_(storage, non_blocking=True)
            else:
                source, target = storage.data_ptr(), base + offset
                pieces += [(target + at, source + at, min(PIECE_BYTES, size - at)) for at in range(0, size, PIECE_BYTES)]
        if sum(size for _, _, size in pieces) > PIECE_BYTES:
            # The other ranks wait meanwhile, so their processors are free. memmove, as it does not read the destination first.
            count = min(COPYING_THREADS, len(os.sched_getaffinity(0)))
            with ThreadPoolExecutor(count) as threads:
                list(threads.map(_copy, [iter(pieces)] * count))
        else:
            _copy(iter(pieces))
        memory[self.layout.skeleton : self.layout.size] = self._skeleton
        for gpu in self._gpus:
            torch.cuda.current_stream(gpu).synchronize()


def _copy(pieces: Iterator[tuple[int, int, int]]) -> None:
    """Copy pieces until the threads have taken all of them."""
    for piece in pieces:
        ctypes.memmove(*piece)


class Copied(NamedTuple):
    state: Any
    """Its tensors are in the arena: the next snapshot overwrites them."""
    lay: dict[int, str]
    """Devices of the storages, as `torch.save` writes them ("cpu", "cuda:0"), by the address of their copies."""


def read(arena: Arena, layout: Layout, device: torch.device | None = None) -> Copied:
    """The copied state. With a device, tensors that were on a GPU are copied to it."""
    memory = arena.memory()
    giver = _StateUnpickler(io.BytesIO(memory[layout.skeleton : layout.size]), memory, device)
    return Copied(giver.load(), giver.lay)


def address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


def free_memory() -> int:
    """Bytes that this process may still take."""
    found = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    free = next(int(kibibytes) << 10 for name, kibibytes, *_ in found if name == "MemAvailable:")
    room = memory_room()
    return free if room is None else min(free, room)


def _cuda(function: str, *arguments: int) -> None:
    """Raises RuntimeError."""
    try:
        torch.cuda.check_error(int(getattr(torch.cuda.cudart(), function)(*arguments)))
    except RuntimeError:
        # CUDA keeps the error and would report it for the next kernel: clear it here.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        raise


def _bytes_of(memory: mmap.mmap, offset: int, size: int) -> torch.UntypedStorage:
    return torch.frombuffer(memory, dtype=torch.uint8, offset=offset, count=size).untyped_storage()


_Place = tuple[int, int, str, torch.dtype | None]
"""Of a storage: offset, size, where it lay, dtype."""


class _StatePickler(pickle.Pickler):
    """A pickler that, like torch.save, leaves storages out, and records where their bytes will be."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._offsets: dict[int, int] = {}
        self.storages: list[tuple[int, torch.UntypedStorage]] = []
        """Those with bytes, by their offsets."""
        self.end = HEADER_BYTES

    def persistent_id(self, obj: Any) -> _Place | None:
        if isinstance(obj, TypedStorage):
            storage, dtype = obj._untyped_storage, obj.dtype
        elif isinstance(obj, torch.UntypedStorage):
            storage, dtype = obj, None
        else:
            return None
        size = storage.nbytes()
        if size and storage._cdata not in self._offsets:
            self._offsets[storage._cdata] = self.end
            self.storages.append((self.end, storage))
            self.end += -(-size // ALIGNMENT) * ALIGNMENT
        return self._offsets.get(storage._cdata, 0), size, torch.serialization.location_tag(storage), dtype


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: mmap.mmap, device: torch.device | None) -> None:
        super().__init__(file)
        self._memory, self._device = memory, device
        self._storages: dict[int, torch.UntypedStorage] = {}
        self.lay: dict[int, str] = {}

    def persistent_load(self, pid: _Place) -> Any:
        offset, size, location, dtype = pid
        if not size:
            storage = torch.UntypedStorage(0)
        elif (storage := self._storages.get(offset)) is None:
            storage = _bytes_of(self._memory, offset, size)
            self.lay[storage.data_ptr()] = location
            if self._device is not None and location != "cpu":
                storage = torch.UntypedStorage(size, device=self._device).copy_(storage)
            self._storages[offset] = storage
        # The functions that rebuild tensors expect a typed storage, as torch.load gives it.
        return TypedStorage(wrap_storage=storage, dtype=dtype or torch.uint8, _internal=True)


def keeps_shared(order: WorkerOrder) -> bool:
    """Whether this rank's copy holds the state that ranks share: rank 0 writes it to files, and each node restores from it."""
    return order.rank == 0 or (bool(order.memory) and order.local_rank == 0)


def copies_of(order: WorkerOrder, manifest: Manifest, device: torch.device) -> tuple[Any, Any] | None:
    """The copies of a checkpoint in this node's memory, in the form that `TrainingState.parts` gives: this rank's own, and that
    of the rank on this node which holds the state that ranks share; None unless both are there. Tensors of a GPU are loaded to
    `device`, the others stay in the copies."""
    own, shared = order.memory[:COPIES], order.memory[COPIES:]
    found: list[Any] = []
    # This rank's own copy also holds the state that ranks share.
    for descriptors in (own,) if keeps_shared(order) else (own, shared):
        for arena in map(Arena, descriptors):
            sealed = arena.sealed()
            if sealed is not None and (sealed.step, sealed.attempt) == (manifest.step, manifest.attempt):
                found.append(read(arena, sealed.layout, device).state)
                break
        else:
            return None
    return found[0], found[-1]


def arenas_of(order: WorkerOrder) -> list[Arena]:
    """This rank's arenas in the order in which to write them: the one with the checkpoint to be restored comes last."""
    arenas = [Arena(descriptor) for descriptor in order.memory[:COPIES]] or [Arena()]
    if not order.from_memory:
        return arenas[:1]

    def worth(arena: Arena) -> tuple[bool, int]:
        sealed = arena.sealed()
        return (checkpoint_name(sealed.step) == order.resume, sealed.attempt) if sealed else (False, 0)

    return sorted(arenas, key=worth)
