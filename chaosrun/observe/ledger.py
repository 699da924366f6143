"""The ledgers of sample ids: the indices that a loader's sampler yields, assigned to batches as the loader hands them out, or
when a forward pass takes the tensors of a batch.

They hook in where every iterator of torch and torchdata takes its next indices: they see the indices fetched, not those a
restored loader skips, and change neither loader nor sampler.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch.utils.data import IterableDataset, Subset
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from chaosrun.observe.contents import address_of, batch_tensors
from chaosrun.processes import start_ticks

_drawn: "WeakKeyDictionary[_BaseDataLoaderIter, deque[Any]]" = WeakKeyDictionary()
"""By iterator, the indices it has drawn from its sampler and not yet returned as a batch."""
_with_workers: "WeakSet[_BaseDataLoaderIter]" = WeakSet()
"""Iterators that loader workers read for."""
_next_index = _BaseDataLoaderIter._next_index
_Iterator = ref[_BaseDataLoaderIter]
"""Unlike an id, it never stands for another iterator once this one is gone."""
SAMPLED = 256
"""So many elements of a tensor are compared to recognise it."""
KEPT_BATCHES = 16
"""At most so many batches are kept that no forward pass has taken."""


class SampleLedger:
    """Sample ids of the batches handed out, in order, as the batch sampler yielded them; None if they cannot be known: for a
    dataset without indices, and for loader workers that may overtake each other."""

    def __init__(self) -> None:
        listen()
        self._handed_out: deque[list[Any] | None] = deque()
        self._watching = False

    def watch(self, loader: Any) -> None:
        """Listen to the next iterator of `loader`."""
        from accelerate.data_loader import DataLoaderDispatcher  # already imported where a session watches

        base = loader.base_dataloader
        self._handed_out = deque()
        in_order = base.num_workers == 0 or getattr(base, "in_order", True)
        # A dispatcher reads on rank 0 alone and splits each batch among the ranks.
        dispatched = issubclass(type(loader), DataLoaderDispatcher)
        self._watching = in_order and not dispatched and not isinstance(base.dataset, IterableDataset)
        if not self._watching:
            return

        def begin() -> Iterator[Any]:
            # Once: the ledger follows this iterator, not those that the script makes later.
            base.__dict__.pop("__iter__", None)
            return self._follow(type(base).__iter__(base))

        # accelerate calls this attribute to get the iterator.
        base.__dict__["__iter__"] = begin

    def next_ids(self) -> list[Any] | None:
        """The ids of the batch that the loader has just handed out."""
        return self._handed_out.popleft() if self._watching else None

    def _follow(self, iterator: Any) -> Iterator[Any]:
        handed_out = self._handed_out
        on_their_way = getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0)
        drawn = _drawn.setdefault(iterator, _room_for(iterator))
        # Ids older than the batches in flight were dropped: by a restored loader, or with an unfinished pass.
        while len(drawn) > on_their_way:
            drawn.popleft()
        # Missing ids were drawn before the ledger listened.
        drawn.extendleft([None] * (on_their_way - len(drawn)))
        for batch in iterator:
            indices = drawn.popleft() if drawn else None
            handed_out.append(None if indices is None else _plain(indices))
            yield batch


class BatchLedger:
    """Batches from all loaders of this process, recognised by their tensors, as loaders fetch ahead and a batch may be skipped.
    Ids are unknown for a batch that was changed on its way to the model, or that looks like another."""

    def __init__(self) -> None:
        listen()
        self._handed_out: deque[_HandedOut] = deque(maxlen=KEPT_BATCHES)
        self._reached: dict[_Iterator, int] = {}
        """By iterator, the number of the batch of it that was taken last; without those that are no more."""
        self._since: dict[_Iterator, int] = {}
        """By iterator, how many batches it has handed out since the last forward pass that took some; the newest last."""
        self._newest: list[Any] | None = None
        """The ids of the newest batch."""
        self._beside: set[_Iterator] = set()
        """Iterators whose batches went through a model that was not training."""
        self._unknown = False
        """The last forward pass took tensors that no loader has handed out."""
        self._begins = True
        """No forward pass has taken a batch yet."""
        self.passes = 0
        """Number of passes over loaders whose batches were taken."""
        _BaseDataLoaderIter.__next__ = self._telling(_BaseDataLoaderIter.__next__)

    def taken(self, tensors: Iterable[torch.Tensor]) -> list[Any] | None:
        """The ids of the batch to which these tensors belong."""
        tensors = list(tensors)
        addresses = {address_of(tensor) for tensor in tensors} - {0}
        found = self._at(addresses) or self._copied(tensors)
        self._unknown = found is None
        if found is None:
            return None
        while self._handed_out[0] is not found:
            self._handed_out.popleft()
        self._count(found)
        return found.ids

    def passed_by(self) -> None:
        """The batch that was handed out last goes through a model that is not training."""
        self._beside.update(list(self._since)[-1:])

    def fetched(self, *, skipping: bool) -> list[Any] | None:
        """The ids of the one batch that a loader has yielded for this forward pass; None if there was none, or several.
        `skipping`: before its first pass the script skips batches that it has already trained on."""
        iterator, count = next(reversed(self._since.items()), (None, 0))
        others = self._since.keys() - self._beside - {iterator}
        alone = not others and (count == 1 or (count > 1 and self._begins and skipping))
        self._since, self._beside, self._begins = {}, set(), False
        newest = self._handed_out[-1] if self._handed_out else None
        if alone and self._unknown and newest and newest.iterator == iterator:
            self._count(newest)  # tensors that the script derived from a batch come from the pass over this loader
        return self._newest if alone else None

    def _count(self, taken: "_HandedOut") -> None:
        """Count passes: an iterator's first batch begins one, as does a batch earlier than its last. Loaders that are read in
        turn begin none when their turn comes again."""
        if taken.iterator not in self._reached:
            self._reached = {iterator: number for iterator, number in self._reached.items() if iterator() is not None}
        if taken.number < self._reached.get(taken.iterator, taken.number + 1):
            self.passes += 1
        self._reached[taken.iterator] = taken.number

    def _at(self, addresses: set[int]) -> "_HandedOut | None":
        """The newest batch at one of these addresses. An address that batches of other samples share (of class weights) tells
        nothing, unless there is no other: of a batch, or of what the model is given (a buffer that is filled anew)."""
        holding = [entry for entry in reversed(self._handed_out) if addresses & entry.addresses]
        first: dict[int, _HandedOut] = {}
        shared = {each for entry in holding for each in entry.addresses if first.setdefault(each, entry).ids != entry.ids}
        found = next((entry for entry in holding if addresses & (entry.addresses - shared or entry.addresses)), None)
        return found or (holding[0] if holding and addresses <= shared else None)

    def _copied(self, tensors: list[torch.Tensor]) -> "_HandedOut | None":
        """The batch of which these tensors are copies (on another device, for instance); None if several are possible."""
        samples = _samples(tensors) if self._handed_out else set()
        alike = [(len(samples & entry.samples()), entry) for entry in self._handed_out]
        most = max((count for count, _ in alike), default=0)
        best = [entry for count, entry in alike if count == most]
        return best[0] if most and len(best) == 1 else None

    def _telling(self, following: Any) -> Any:
        def __next__(iterator: Any) -> Any:
            on_their_way = getattr(iterator, "_send_idx", 0) - getattr(iterator, "_rcvd_idx", 0)
            drawn = _drawn.get(iterator)
            while drawn and len(drawn) > on_their_way:
                drawn.popleft()  # from an interrupted pass
            try:
                batch = following(iterator)
            except StopIteration:
                # Batches that no training pass took were evaluated, or skipped.
                self._since.pop(ref(iterator), None)
                raise
            drawn = _drawn.get(iterator)
            in_order = getattr(iterator, "_in_order", True)
            ids = _plain(drawn.popleft()) if drawn and in_order else None
            tensors = batch_tensors(batch)
            self._newest = ids
            this = ref(iterator)
            self._since[this] = self._since.pop(this, 0) + 1
            if tensors:
                addresses = {address_of(tensor) for tensor in tensors} - {0}
                self._handed_out.append(_HandedOut(tensors, addresses, ids, this, iterator._num_yielded))
            return batch

        return __next__


@dataclass(frozen=True, slots=True, eq=False)
class _HandedOut:
    tensors: list[torch.Tensor]
    """Kept alive, so that no other tensor gets their addresses."""
    addresses: set[int]
    ids: list[Any] | None
    iterator: _Iterator
    number: int
    """How many batches the iterator has yielded, this one included."""
    _sampled: list[Any] = field(default_factory=lambda: [None, set()])
    """The tensors' versions when `samples` was asked last, and its answer."""

    def samples(self) -> set[tuple[Any, ...]]:
        """`_samples` of its tensors as they are now: a script may change them in place."""
        versions = [_version(each) for each in self.tensors]
        if self._sampled[0] != versions:
            self._sampled[:] = versions, _samples(self.tensors)
        return self._sampled[1]


def _version(tensor: torch.Tensor) -> object:
    """A value that changes with each change in place; a new one at each call if the tensor does not count its changes."""
    with suppress(Exception):  # of an inference tensor, or of any subclass
        return tensor._version
    return object()


def _samples(tensors: Iterable[torch.Tensor]) -> set[tuple[Any, ...]]:
    """Some values of each tensor with several; tensors without plain memory (sparse, nested, meta) are left out."""
    found: set[tuple[Any, ...]] = set()
    for tensor in tensors:
        with suppress(RuntimeError, TypeError, NotImplementedError):  # each layout raises a different error
            flat = tensor.detach().reshape(-1)
            if flat.numel() > 1:
                found.add((tensor.dtype, tensor.shape, *flat[:: flat.numel() // SAMPLED + 1].tolist()))
    return found


def listen() -> None:
    """Make this process's loaders remember the indices they draw. Call before a stateful loader with workers is prepared, as
    that draws its first batches."""
    _BaseDataLoaderIter._next_index = _remembering


def loader_workers() -> list[tuple[int, int]]:
    """Pid and start time (clock ticks since boot) of each worker of the loaders that were read from; some may have ended."""
    workers = (worker for iterator in list(_with_workers) for worker in iterator._workers)  # pyright: ignore[reportAttributeAccessIssue]
    return [(worker.pid, started) for worker in workers if (started := start_ticks(worker.pid))]


def _remembering(self: _BaseDataLoaderIter) -> Any:
    indices = _next_index(self)
    if self._num_workers:
        _with_workers.add(self)
    if self._dataset_kind == _DatasetKind.Map:
        _drawn.setdefault(self, _room_for(self)).append(_in_whole(self._dataset, indices))
    return indices


def _in_whole(dataset: Any, indices: Any) -> Any:
    """The indices in the whole dataset of which this one is a `Subset`: a script may resume with a subset of what is left."""
    alone = _is_one(indices)
    with suppress(Exception):  # indices of any kind, which the dataset itself may refuse
        while type(dataset) is Subset:
            indices = dataset.indices[indices] if alone else [dataset.indices[each] for each in indices]
            dataset = dataset.dataset
    return indices


def _room_for(iterator: Any) -> "deque[Any]":
    # The most batches in flight, and the one drawn before the oldest of them is returned.
    ahead = iterator._prefetch_factor * iterator._num_workers if iterator._num_workers else 0
    return deque(maxlen=ahead + 1)


def _plain(indices: Any) -> list[Any]:
    """Sample ids as JSON values: numpy's and torch's numbers as numbers, anything but numbers and texts by its repr."""
    values: Any = [indices] if _is_one(indices) else indices
    ids = [value.tolist() if hasattr(value, "tolist") else value for value in values]
    return [value if isinstance(value, int | float | str) else repr(value) for value in ids]


def _is_one(indices: Any) -> bool:
    """Whether it is a single index, not those of a batch; a sampler that is a tensor yields tensors without a dimension."""
    return isinstance(indices, str | bytes) or not isinstance(indices, Iterable) or getattr(indices, "ndim", 1) == 0
