"""The resume protocol for data: moves a prepared loader to (epoch, batches done) so that the same samples follow.

The batches already done are skipped inside the prepared loader itself: its sampler drops them before anything is read; a stream
reads and drops them. accelerate's `skip_first_batches` builds a second loader, which forgets settings of the first (hazards
D11, D12), skips too little of a dispatcher (D8), does not pass the epoch on (D2, D9, D15) and must be dropped after one epoch
(D3, D4). Continuing the loader itself avoids all of these.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, SupportsIndex

import torch
from accelerate import Accelerator
from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher, DataLoaderShard
from accelerate.utils import gather_object
from torch.utils.data import IterableDataset

from chaosrun.errors import MisuseError
from chaosrun.observe.ledger import SampleLedger
from chaosrun.observe.rng import capture_rng, digest_rng, restore_rng
from chaosrun.protocol.adoption import CALL, Adopted
from chaosrun.protocol.loader_workers import seed_loader
from chaosrun.protocol.randomness import enter_epoch
from chaosrun.protocol.sources import samplers, set_epoch

CPU = torch.device("cpu")


def check_loader(accelerator: Accelerator, loader: Any) -> None:
    """Raise MisuseError, with the remedy, for a loader that no resume protocol can handle. A collective where ranks may differ
    in their number of batches."""
    if not any(loader is known for known in accelerator._dataloaders):
        if isinstance(accelerator, Adopted):
            raise MisuseError(
                "run.batches() got a loader that chaosrun.attach() was not given",
                hint=f"make it once, before the loop over epochs, and pass it to both: {CALL}",
            )
        raise MisuseError(
            "run.batches() got a loader that accelerator.prepare() did not return",
            hint="write `loader = accelerator.prepare(loader)` before chaosrun.attach(accelerator), and pass that loader "
            "itself (skip_first_batches is not needed: what is done is skipped)",
        )
    # Not isinstance: the loaders pretend to be torch's.
    if not issubclass(type(loader), DataLoaderShard | DataLoaderDispatcher):
        raise MisuseError(
            f"run.batches() cannot resume a {type(loader).__name__}", hint="pass the loader that accelerator.prepare() returned"
        )
    _check_lengths(loader)


def _check_lengths(loader: Any) -> None:
    """Raise MisuseError when the ranks would get different numbers of batches. A collective where that is possible: only
    without `even_batches`. (Lengths are those that the samplers report; if ranks wait forever nevertheless, that is found as a
    hang.)"""
    shard = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    if not isinstance(shard, BatchSamplerShard) or shard.even_batches or shard.drop_last or shard.num_processes == 1:
        return
    lengths = gather_object([_length(shard)])
    if len(set(lengths)) > 1:
        counts = ", ".join(map(str, lengths))
        raise MisuseError(
            f"even_batches=False gives the ranks different numbers of batches ({counts}): those with more would wait for the "
            "others for ever, in their first backward pass alone",
            hint="even_batches=True, drop_last=True, or a number of samples that the ranks' batches divide",
        )


def open_epoch(
    accelerator: Accelerator, loader: Any, *, epoch: int, batches_done: int, seed: int, ledger: SampleLedger
) -> Iterable[Any]:
    """The rest of `epoch` after its first `batches_done` batches, ready to be iterated once. `epoch` counts from 0."""
    base = loader.base_dataloader
    sampler = None if isinstance(base.dataset, IterableDataset) else _resumable(loader)
    set_epoch(loader, epoch)
    enter_epoch(seed, epoch)
    seed_loader(base, seed=seed, epoch=epoch, rank=accelerator.process_index)
    if sampler is None:
        loader.skip_batches = batches_done
    elif issubclass(type(loader), DataLoaderDispatcher):
        # It pads its last batch from the first one, which is therefore read again (but not yielded again).
        together = 1 if loader.split_batches else accelerator.num_processes
        loader.skip_batches = min(batches_done, 1)
        sampler.skip_once(together * batches_done, keep=together)
    else:
        sampler.skip_once(batches_done)
    ledger.watch(loader)
    if not batches_done:
        return loader
    return _with_its_randomness(loader, accelerator.device, _read_before(accelerator, loader, batches_done))


def batches_of(loader: Any, *, epoch: int | None = None) -> int | None:
    """Batches on this rank in this epoch, or in the loader's current one; None for a stream, whose length is an estimate when
    loader workers read it."""
    if isinstance(loader.base_dataloader.dataset, IterableDataset):
        return None
    if epoch is not None:
        set_epoch(loader, epoch)
    try:
        return len(loader)
    except TypeError:
        return None


def total_batch_size(accelerator: Accelerator, loader: Any) -> int | None:
    """Samples that all ranks take together; None where the sampler fixes no number. (accelerate's own property fails for a
    dispatcher and for a batch sampler without a size.)"""
    source = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    size = getattr(source, "batch_size", None) or loader.base_dataloader.batch_size
    return size if size is None or accelerator.split_batches else size * accelerator.num_processes


def _read_before(accelerator: Accelerator, loader: Any, batches_done: int) -> int:
    """Base batches that a resumed pass reads up to the one that accelerate had fetched ahead when the position was saved."""
    dispatched = issubclass(type(loader), DataLoaderDispatcher)
    together = accelerator.num_processes if dispatched and not loader.split_batches else 1
    if isinstance(loader.base_dataloader.dataset, IterableDataset):
        return together * (batches_done + 1)
    return together * (2 if dispatched else 1)


def _with_its_randomness(loader: Any, device: torch.device, read_before: int) -> Iterator[Any]:
    """The batches of an epoch entered in its middle, with the rank's random streams as they were at that moment.

    Starting an iterator may draw from them (hazard R1), and `rng_types` gives every rank those of rank 0: right at the
    beginning of an epoch, but here it would overwrite the restored streams. Fetching a sample may also draw: samples fetched
    before that moment have drawn already, later ones have not. On a rank that reads nothing itself, that moment is the first
    batch.
    """
    before = capture_rng(device)
    base = loader.base_dataloader
    watched = base.__dict__.pop("__iter__", None)
    waiting = True

    def begin() -> Iterator[Any]:
        base.__dict__.pop("__iter__")
        return follow(watched() if watched else type(base).__iter__(base))

    def follow(batches: Iterator[Any]) -> Iterator[Any]:
        nonlocal waiting
        for number, batch in enumerate(batches, start=1):
            if number == read_before:
                restore_rng(before, device)
                waiting = False
            yield batch

    base.__dict__["__iter__"] = begin
    batches = iter(loader)
    batch = next(batches, None)
    base.__dict__.pop("__iter__", None)
    if waiting:
        restore_rng(before, device)
    if batch is None:
        return
    yield batch
    yield from batches


def _resumable(loader: Any) -> "_Resumable":
    """The loader's sampler, wrapped so that it can skip. Replaced only once, as a persistent iterator keeps the first one it
    found."""
    base = loader.base_dataloader
    # DataLoader forbids assigning its samplers after construction; its iterator reads this attribute.
    place = "batch_sampler" if base._auto_collation else "sampler"
    source = base.__dict__[place]
    if type(source) is not _Resumable:
        *_, innermost = samplers(loader)
        source = base.__dict__[place] = _Resumable(source, type(innermost).__name__)
    return source


class _Resumable:
    """Wraps a sampler, and skips the batches already done when next iterated; in all else it behaves as the sampler, including
    its type."""

    def __init__(self, sampler: Any, name: str) -> None:
        self._inner = sampler
        self._name = name
        self._skip, self._keep = 0, 0

    def skip_once(self, skip: int, keep: int = 0) -> None:
        """Yield only the first `keep` of the first `skip` entries."""
        self._skip, self._keep = skip, keep

    def __iter__(self) -> Iterator[Any]:
        # A generator, so decided at the first entry: torch's iterator calls `iter` twice and uses one (hazard D16).
        left_out = range(self._keep, self._skip)
        self._skip, self._keep = 0, 0
        before = digest_rng(CPU)
        for number, entry in enumerate(self._inner):
            if number == 0 and digest_rng(CPU) != before:
                raise MisuseError(
                    f"{self._name} draws from the global random stream, or seeds it, when it is asked for an order: "
                    "that stream has another position after a restart",
                    hint="draw from a torch.Generator of the sampler's own, which its set_epoch(epoch) seeds by seed and epoch",
                )
            if number not in left_out:
                yield entry

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._inner, memo)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        # A pickled loader holds its own sampler; this class cannot be pickled, as pickle compares __class__.
        return self._inner.__reduce_ex__(protocol)

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # accelerate checks `isinstance(loader.sampler, BatchSampler)` to find how much of the last batch is padding.
        return type(self._inner)


def _length(shard: BatchSamplerShard) -> int | None:
    """Batches of this rank, None where the sampler has no length."""
    try:
        if not shard.split_batches:
            return len(shard)
        # Its own length counts a short last batch on every rank, although the last ranks may get none of it.
        inner = shard.batch_sampler
        assert shard.batch_size is not None
        full, short = divmod(len(inner.sampler), shard.batch_size)  # type: ignore[arg-type]
        share = shard.batch_size // shard.num_processes
        return full + (short > share * shard.process_index)
    except (AttributeError, TypeError):
        return None
