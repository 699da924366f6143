"""The samplers and dataset that decide the order of a loader's batches. Sets their epoch, and refuses those whose order cannot
be restored from a count of batches. Must not know positions, checkpoints or steps.
"""

import inspect
import random
import re
from collections.abc import Iterator
from typing import Any

import numpy
import torch
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from chaosrun.errors import MisuseError
from chaosrun.observe.script_state import is_own, script_state

UNSEEDABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
GENERATORS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
UPSTREAM = (
    *("dataset", "datasets", "datapipe", "_datapipe", "source_datapipe", "source", "pipeline"),
    *("ex_iterable", "ex_iterables", "_ex_iterable"),
)
"""Attributes by which an iterable dataset names what it reads from: accelerate's and torch's, datasets', webdataset's."""
MOST_WRAPPERS, MOST_VALUES = 16, 200
"""Limits of what is recorded of a source."""


def check_sources(loader: Any) -> None:
    """Raise MisuseError, with the remedy, where the order depends on something that a restart cannot restore.

    A sampler that counts its own passes, or reads the clock, cannot be recognised: only a drill shows it (data order).
    """
    base = loader.base_dataloader
    own = _own_generator(loader)
    if own:
        raise MisuseError(
            f"{own[0]} draws its order from a {own[1]} of its own, which has another position after a restart",
            hint="give the sampler a set_epoch(epoch) that seeds it by the job's seed and the epoch",
        )
    buffer = shuffle_buffer(base.dataset) if isinstance(base.dataset, IterableDataset) else None
    if buffer:
        raise MisuseError(
            f"the dataset shuffles in a buffer ({buffer}): which samples lie in it, and which comes next, follows a random "
            "stream that no checkpoint holds",
            hint="shuffle by index (a map dataset with shuffle=True and use_seedable_sampler=True), or shuffle the files by a "
            "seed and the epoch, in the dataset's set_epoch(epoch)",
        )
    epoch = "set_epoch" if _first_with(base.dataset, "set_epoch") else "generator" if _own_stream(base.dataset) else None
    if base.num_workers and base.persistent_workers and epoch and not _shares_its_epoch(base.dataset):
        raise MisuseError(
            f"persistent loader workers keep the dataset as it was in their first epoch: its {epoch} does not reach "
            "them, and workers that start in a later epoch begin with another one",
            hint="persistent_workers=False",
        )


def samplers(loader: Any) -> Iterator[Any]:
    """The objects that choose the samples of a map dataset, outermost first: batch samplers, samplers, their wrappers. A stream
    has none."""
    base = loader.base_dataloader
    if isinstance(base.dataset, IterableDataset):
        return
    waiting = [base.batch_sampler if base._auto_collation else base.sampler]
    met: set[int] = set()
    while waiting:
        source = waiting.pop(0)
        if source is None or id(source) in met:
            continue
        met.add(id(source))
        yield source
        for name, value in getattr(source, "__dict__", {}).items():
            if name in ("batch_sampler", "sampler", "_inner") or isinstance(value, Sampler):
                waiting.append(value)


def source_state(loader: Any) -> tuple[str | None, dict[str, str]]:
    """The type of the script's first own sampler or stream whose epoch is never set, None without one; and the values in the
    script's samplers and dataset, by paths that begin with their types."""
    found = list(samplers(loader))
    dataset = loader.base_dataloader.dataset
    chain = [dataset]
    while (inner := inspect.getattr_static(chain[-1], "dataset", None)) is not None and len(chain) < MOST_WRAPPERS:
        chain.append(inner)
    streams = chain if isinstance(dataset, IterableDataset) else []
    own = [source for source in [*found, *streams] if is_own(type(source).__module__)]
    told = any(_has(source, "set_epoch") for source in own)
    everything = [source for source in [*found, *chain] if is_own(type(source).__module__)]
    held = script_state({type(source).__name__: source for source in everything}, most=MOST_VALUES)
    return (None if told or not own else type(own[-1]).__name__), held


def set_epoch(loader: Any, epoch: int) -> None:
    """Set the epoch of every sampler and the dataset. accelerate's own `set_epoch` stops at the first wrapper that it does not
    know (hazard D15) and, in a job of several processes, before the dataset (D10)."""
    loader.set_epoch(epoch)
    for sampler in samplers(loader):
        if _has(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
    origin = loader.base_dataloader.dataset
    dataset = _first_with(origin, "set_epoch")
    if dataset is not None:
        dataset.set_epoch(epoch)
    elif (generator := _own_stream(origin)) is not None:
        # As accelerate does where several processes read for themselves; with one process, or a dispatcher, it continues from
        # the generator's current state.
        generator.manual_seed(epoch)


def shuffle_buffer(dataset: Any) -> str | None:
    """The name of the first shuffle buffer in an iterable dataset's sources: torch's Shuffler, datasets' buffered examples,
    webdataset's shuffle, or a class of the script with such a name. None without one."""
    waiting, met = [dataset], set[int]()
    while waiting:
        source = waiting.pop(0)
        if id(source) in met or isinstance(source, str | bytes | torch.Tensor | numpy.ndarray):
            continue
        met.add(id(source))
        name = _buffer_name(source)
        if name:
            return name
        if isinstance(source, list | tuple):
            # The stages of a pipeline, or a stream's samples, of which the first is enough.
            waiting += [stage for stage in source[:64] if not isinstance(stage, int | float)]
            continue
        waiting += [value for value in (inspect.getattr_static(source, name, None) for name in UPSTREAM) if value is not None]
    return None


def _buffer_name(source: Any) -> str | None:
    # webdataset's stages are plain functions in a wrapper.
    function = getattr(inspect.getattr_static(source, "f", None), "__name__", "")
    name = type(source).__name__
    if re.search("shuffle", function, re.IGNORECASE):
        return function.lstrip("_")
    buffered = re.search("buf", name, re.IGNORECASE) or any("buf" in key for key in getattr(source, "__dict__", {}))
    return name if re.search("shuffl", name, re.IGNORECASE) and buffered else None


def unseedable_sampler(loader: Any) -> str | None:
    """The type of the torch sampler, if any, whose order cannot be restored."""
    return next((type(sampler).__name__ for sampler in _without_epoch(loader) if isinstance(sampler, UNSEEDABLE)), None)


def _own_generator(loader: Any) -> tuple[str, str] | None:
    """Types of the first sampler with its own generator that is never reseeded, and of that generator."""
    found = ((type(sampler).__name__, _generators(sampler)) for sampler in _without_epoch(loader))
    return next(((name, type(own[0]).__name__) for name, own in found if own), None)


def _without_epoch(loader: Any) -> Iterator[Any]:
    """The samplers that have no `set_epoch`, nor a generator that the `set_epoch` of one around them may seed."""
    found = list(samplers(loader))
    told = any(_has(sampler, "set_epoch") for sampler in found)
    return (sampler for sampler in found if not (_has(sampler, "set_epoch") or (told and _generators(sampler))))


def _generators(sampler: Any) -> list[Any]:
    return [value for value in getattr(sampler, "__dict__", {}).values() if isinstance(value, GENERATORS)]


def _has(source: Any, name: str) -> bool:
    """Looks the name up statically: a wrapper that forwards unknown names does not have them itself."""
    return inspect.getattr_static(source, name, None) is not None


def _own_stream(dataset: Any) -> torch.Generator | None:
    """The generator that an iterable dataset draws from, by accelerate's convention."""
    stream = _first_with(dataset, "generator")
    generator = getattr(stream, "generator", None)
    return generator if isinstance(stream, IterableDataset) and isinstance(generator, torch.Generator) else None


def _first_with(dataset: Any, name: str) -> Any:
    """The dataset, or the first one it wraps, that has this attribute."""
    met: set[int] = set()
    while dataset is not None and id(dataset) not in met:
        met.add(id(dataset))
        # IterableDatasetShard passes its epoch on to a dataset, which may have none.
        if _has(dataset, name) and type(dataset).__name__ != "IterableDatasetShard":
            return dataset
        dataset = inspect.getattr_static(dataset, "dataset", None)
    return None


def _shares_its_epoch(dataset: Any) -> bool:
    """`datasets` keeps a stream's epoch in shared memory, where persistent workers see it."""
    epoch = getattr(_first_with(dataset, "set_epoch"), "_epoch", None)
    return isinstance(epoch, torch.Tensor) and epoch.is_shared()
