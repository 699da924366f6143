"""Random streams that survive a restart because they are computed, not carried: per-sample generators and loader seeds.

A sample's augmentation keyed on (seed, epoch, index) is the same whichever worker process draws it, and whenever (hazards R5,
R6). The pair (seed, epoch) lies in anonymous shared memory, so that loader workers, persistent ones too, see the current epoch.
"""

import mmap
import struct

import numpy
import torch

__all__ = ["derive_seed", "enter_epoch", "loader_generator", "own_epoch", "sample_rng"]

_PAIR = struct.Struct("<QQ")
_shared = mmap.mmap(-1, _PAIR.size)


def own_epoch() -> None:
    """Share the epoch with nobody but children from here on. For a rank: ranks forked from one server would share it."""
    global _shared
    _shared = mmap.mmap(-1, _PAIR.size)


def enter_epoch(seed: int, epoch: int) -> None:
    """Make `sample_rng` in this process and in its present and future children draw for (seed, epoch)."""
    _PAIR.pack_into(_shared, 0, seed % 2**64, epoch)


def sample_rng(index: int) -> numpy.random.Generator:
    """The random generator of one sample in the current epoch, for augmentation inside `Dataset.__getitem__(index)`.

    Equal in every process, with any number of loader workers, before and after a restart. The seed is the loader's
    `data_seed` (else torch's initial seed), the epoch is that of `run.batches`; before the first batch both are 0.
    """
    seed, epoch = _PAIR.unpack_from(_shared, 0)
    return numpy.random.Generator(numpy.random.PCG64(numpy.random.SeedSequence([seed, epoch, index])))


def derive_seed(*words: int) -> int:
    """A 63-bit seed from non-negative integers (numpy's SeedSequence: distinct words give unrelated seeds)."""
    return int(numpy.random.SeedSequence(list(words)).generate_state(1, numpy.uint64)[0]) >> 1


def loader_generator(seed: int, epoch: int, rank: int) -> torch.Generator:
    """The generator that seeds the loader's workers in one epoch.

    With one of its own, starting an iterator draws nothing from the global stream (hazard R1) and the workers' base seed is
    the same after a restart.
    """
    generator = torch.Generator()
    generator.manual_seed(derive_seed(seed % 2**64, epoch, rank))
    return generator
