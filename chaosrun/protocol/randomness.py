"""Random streams that survive a restart because they are computed, not saved: per-sample generators, datasets and loader seeds.

A sample's augmentation keyed on (seed, epoch, index) is the same whichever worker process draws it, and whenever (hazards R5,
R6). The pair (seed, epoch) is in anonymous shared memory, so that loader workers, including persistent ones, see the current
epoch; `enter_epoch` is called before the loader's iterator is made or reset, so no sample of the epoch is fetched before its
pair is set.
"""

import mmap
import multiprocessing.reduction
import operator
import os
import random
import struct
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import Dataset, IterableDataset

from chaosrun.errors import MisuseError

_PAIR = struct.Struct("<QQ")
_GLOBAL_STREAMS = (1,)
"""Keeps the seeds of the global streams apart from those of `sample_rng`."""


class SharedMemory:
    """Zeroed memory that a process shares with the children it forks, and with those it spawns with this object as argument."""

    def __init__(self, size: int, descriptor: int | None = None) -> None:
        self.size = size
        self._descriptor = os.memfd_create("chaosrun") if descriptor is None else descriptor
        if descriptor is None:
            os.ftruncate(self._descriptor, size)
        self.bytes = mmap.mmap(self._descriptor, size)
        weakref.finalize(self, os.close, self._descriptor)

    def __reduce__(self) -> tuple[Callable[..., "SharedMemory"], tuple[Any, ...]]:
        return _attach, (self.size, multiprocessing.reduction.DupFd(self._descriptor))


def _attach(size: int, descriptor: Any) -> SharedMemory:
    return SharedMemory(size, descriptor.detach())


_shared = SharedMemory(_PAIR.size)


def own_epoch() -> None:
    """Share the epoch only with this process's children from now on: ranks forked from one server would share it otherwise."""
    share_epoch(SharedMemory(_PAIR.size))


def share_epoch(memory: SharedMemory) -> None:
    """Read the epoch from this memory from now on: that of the rank whose loader worker this process is."""
    global _shared
    _shared = memory


def shared_epoch() -> SharedMemory:
    """The memory from which this process reads the epoch."""
    return _shared


def enter_epoch(seed: int, epoch: int) -> None:
    """Make `sample_rng` draw for (seed, epoch) in this process and its present and future children."""
    _PAIR.pack_into(_shared.bytes, 0, seed % 2**64, epoch)


def sample_rng(index: Any) -> numpy.random.Generator:
    """The random generator of one sample in the current epoch, for augmentation inside `Dataset.__getitem__(index)`.

    Equal in every process, with any number of loader workers, before and after a restart. `index` is whatever the sampler
    names a sample by: a number, a text, or a tuple of these. The seed is the loader's `data_seed` (else torch's initial seed),
    the epoch is that of `run.batches`; before the first batch both are 0. An iterator of another loader with workers that is
    kept across epochs fetches ahead, so which epoch it sees is a matter of time.
    """
    return numpy.random.Generator(numpy.random.PCG64(_sample_seed(index, ())))


@contextmanager
def sample_streams(index: Any) -> Iterator[None]:
    """`sample_rng` for code that draws from the global streams: inside the block those of python, numpy and torch (CPU) are
    keyed on (seed, epoch, index); after it they are as before.
    """
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    words = _sample_seed(index, _GLOBAL_STREAMS).generate_state(10)
    random.seed(int.from_bytes(words[:4].tobytes(), "little"))
    numpy.random.seed(words[4:8])
    # Not torch.manual_seed: before CUDA starts, that queues a call for its start, one per sample.
    torch.default_generator.manual_seed(int.from_bytes(words[8:].tobytes(), "little"))
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


def _sample_seed(index: Any, spawn_key: tuple[int, ...]) -> numpy.random.SeedSequence:
    seed, epoch = _PAIR.unpack_from(_shared.bytes, 0)
    return numpy.random.SeedSequence([seed, epoch, *_words(index)], spawn_key=spawn_key)


def _words(index: Any) -> Iterator[int]:
    match index:
        case str() | bytes():
            yield xxhash.xxh3_64_intdigest(index.encode(errors="surrogatepass") if isinstance(index, str) else index)
        case tuple() | list():
            for part in index:
                yield from _words(part)
        case _:
            number = operator.index(index)
            yield number if number >= 0 else number % 2**64


def loader_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """The generator that seeds the loader's workers in one epoch.

    With its own generator, starting an iterator draws nothing from the global stream (hazard R1), and the workers' base seed is
    the same after a restart.
    """
    # 63 bits; distinct words give unrelated seeds.
    words = numpy.random.SeedSequence([seed % 2**64, epoch, rank]).generate_state(1, numpy.uint64)
    generator = torch.Generator()
    generator.manual_seed(int(words[0]) >> 1)
    return generator


class Reproducible(Dataset[Any]):
    """Wraps `dataset`: each item is fetched with the global streams seeded by (seed, epoch, index). Attributes are read from
    the dataset."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: Any) -> Any:
        with sample_streams(index):
            return self.dataset[index]

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        # Not names that Python and the loader look up themselves: above all not __getitems__, which would bypass this class.
        if name == "dataset" or (name.startswith("__") and name.endswith("__")):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.dataset, name)


def reproducible(dataset: Any) -> Reproducible:
    """Make a map dataset's `__getitem__` draw the same from the global python, numpy and torch streams for one (seed, epoch,
    index) in every process, with any number of loader workers, before and after a restart; outside it the streams do not
    advance.

    A dataset that fetches whole batches (`__getitems__`) is read item by item. Draws in `collate_fn` are not covered: make them
    inside `sample_streams(index)`. Costs about 0.1 ms an item. Raises MisuseError for a stream, which has no indices.
    """
    if isinstance(dataset, IterableDataset):
        raise MisuseError(
            f"chaosrun.reproducible() got a {type(dataset).__name__}: the items of an iterable dataset have no index",
            hint="draw inside its __iter__ from chaosrun.sample_rng(number), counting the items",
        )
    return Reproducible(dataset)
