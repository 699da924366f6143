"""The random streams of loader workers: seeded so that no two draw the same numbers, and reported, so that this can be checked.

Each worker seeds python, numpy and torch by SeedSequence([base_seed, worker id, rank]) before the script's own worker_init_fn
runs, which may reseed them, all alike (hazard R9). The state of the streams after it is passed to the rank through shared
memory. The scheme is numpy's advice (pytorch#5059) as Lightning applies it.
"""

import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from chaosrun.observe.rng import digest_rng
from chaosrun.processes import start_ticks
from chaosrun.protocol.randomness import SharedMemory, loader_generator, share_epoch, shared_epoch

STREAMS = ("python", "numpy", "torch")
_SLOT = struct.Struct("<?5Q")
_CPU = torch.device("cpu")


def seed_worker(base_seed: int, worker_id: int, rank: int) -> None:
    """Seed the streams of this process, a loader worker, with unrelated seeds: python and numpy of 128 bits, torch of 64."""
    sequence = numpy.random.SeedSequence([base_seed, worker_id, rank])
    for_torch, for_python = sequence.spawn(2)
    numpy.random.seed(sequence.generate_state(4))
    torch.manual_seed(int(for_torch.generate_state(1, numpy.uint64)[0]))
    random.seed(int.from_bytes(for_python.generate_state(4).tobytes(), "little"))


@dataclass(frozen=True, slots=True, eq=False)
class LoaderWorkers:
    """Shared memory in which the workers of one epoch's iterator report the random streams that they begin with. Persistent
    workers report in their first epoch."""

    epoch: int
    count: int
    memory: SharedMemory

    def report(self, worker_id: int) -> None:
        digests = digest_rng(_CPU)
        values = [*(int(digests[stream], base=16) for stream in STREAMS), os.getpid(), start_ticks(os.getpid())]
        # The flag is written last, so that a reader that sees it sees the digests.
        for said in (False, True):
            _SLOT.pack_into(self.memory.bytes, worker_id * _SLOT.size, said, *values)

    def streams(self) -> list[dict[str, str] | None]:
        """By worker id, a digest of each stream at the worker's start; None for a worker that has not reported."""
        return [
            {name: f"{digest:016x}" for name, digest in zip(STREAMS, digests, strict=True)} if said else None
            for said, *digests, _pid, _ticks in self._slots()
        ]

    def processes(self) -> list[tuple[int, int]]:
        """Pid and start time in clock ticks of each worker that has reported."""
        return [(pid, ticks) for said, *_digests, pid, ticks in self._slots() if said]

    def _slots(self) -> Iterator[tuple[int, ...]]:
        return (_SLOT.unpack_from(self.memory.bytes, worker * _SLOT.size) for worker in range(self.count))


@dataclass(frozen=True, slots=True, eq=False)
class WorkerSeeding:
    """The worker_init_fn of a training loader: seeds, runs the script's own worker_init_fn, then reports."""

    rank: int
    script_own: Callable[[int], Any] | None
    workers: LoaderWorkers
    epoch: SharedMemory

    def __call__(self, worker_id: int) -> None:
        # A forked worker has it already, a spawned one does not.
        share_epoch(self.epoch)
        seed_worker(torch.initial_seed() - worker_id, worker_id, self.rank)
        if self.script_own is not None:
            self.script_own(worker_id)
        self.workers.report(worker_id)


_newest: LoaderWorkers | None = None
_heard: LoaderWorkers | None = None
"""Those of earlier epochs that were the last to report: persistent workers report once."""


def newest_workers() -> LoaderWorkers | None:
    """The loader workers of the training loader's current epoch; None without any."""
    return _newest


def worker_processes() -> list[tuple[int, int]]:
    """Pid and start time in clock ticks of the training loader's workers. Some of them may have ended."""
    return [process for workers in (_newest, _heard) if workers is not None for process in workers.processes()]


def seed_loader(loader: Any, *, seed: int, epoch: int, rank: int) -> None:
    """Give a torch DataLoader, on this rank, the worker seeds of one epoch. Call before its iterator is made."""
    global _newest, _heard
    loader.generator = loader_generator(seed, epoch, rank)
    if _newest is not None and _newest.processes():
        _heard = _newest
    if not loader.num_workers:
        _newest = None
        return
    own = loader.worker_init_fn
    _newest = LoaderWorkers(epoch, loader.num_workers, SharedMemory(_SLOT.size * loader.num_workers))
    loader.worker_init_fn = WorkerSeeding(
        rank=rank, script_own=own.script_own if isinstance(own, WorkerSeeding) else own, workers=_newest, epoch=shared_epoch()
    )
