"""The resume protocol for data: bring a prepared loader to (epoch, batches done) so that the same samples follow, and keep a
ledger of the sample ids that go by.

For the resumed epoch `set_epoch` is called before and after `skip_first_batches`: either call alone replays the wrong epoch on
some accelerate version between 0.34 and 1.15 (hazard D2). The skipped loader is used once (D4); later epochs go back to the
original one with an explicit `set_epoch` (D3).
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler, get_sampler
from torch.utils.data import IterableDataset, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from chaosrun.errors import MisuseError
from chaosrun.train.randomness import enter_epoch, loader_generator

__all__ = ["SampleLedger", "check_loader", "open_epoch"]

UNSEEDABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
SHARE_SETTINGS = ("batch_size", "num_processes", "split_batches")


class SampleLedger:
    """Sample ids of the batches handed out, in order, as the batch sampler named them; None for a dataset without indices."""

    def __init__(self) -> None:
        self._pending: deque[list[Any]] = deque()
        self._watching = False

    def watch(self, loader: Any) -> None:
        """Listen to the sampler that feeds `loader` from its next iterator on."""
        base = loader.base_dataloader
        self._pending.clear()
        self._watching = not isinstance(base.dataset, IterableDataset)
        if not self._watching:
            return
        # DataLoader forbids assigning its samplers after construction; its iterator reads this very attribute.
        place = "batch_sampler" if base._auto_collation else "sampler"
        source = base.__dict__[place]
        if isinstance(source, _Overheard):
            source.ledger = self
        else:
            base.__dict__[place] = _Overheard(source, self)

    def heard(self, ids: list[Any]) -> None:
        self._pending.append(ids)

    def next_ids(self) -> list[Any] | None:
        """The ids of the batch that the loader has just handed out."""
        return self._pending.popleft() if self._watching else None


class _Overheard:
    """A sampler, telling the ledger what it yields; otherwise the sampler itself."""

    def __init__(self, inner: Any, ledger: SampleLedger) -> None:
        self._inner = inner
        self.ledger = ledger

    def __iter__(self) -> Iterator[Any]:
        for indices in self._inner:
            self.ledger.heard(_plain(indices if isinstance(indices, Iterable) else [indices]))
            yield indices

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def _plain(ids: Iterable[Any]) -> list[Any]:
    """Sample ids as JSON values: numbers out of numpy and torch, anything that is no number or text by its repr."""
    values = (value.item() if hasattr(value, "item") else value for value in ids)
    return [value if isinstance(value, int | float | str) else repr(value) for value in values]


def check_loader(accelerator: Accelerator, loader: Any) -> None:
    """Raise MisuseError, with the remedy, for a loader whose order cannot be restored exactly."""
    if not any(loader is known for known in accelerator._dataloaders):
        raise MisuseError(
            "run.batches() got a loader that accelerator.prepare() did not return",
            hint="write `loader = accelerator.prepare(loader)` before chaosrun.attach(accelerator), and pass that loader",
        )
    if getattr(loader, "use_stateful_dataloader", False):
        raise MisuseError(
            "a stateful dataloader restores its cursor but not its order",
            hint="use DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...) instead",
        )
    if isinstance(loader, DataLoaderDispatcher):
        raise MisuseError(
            "a dispatching loader (dispatch_batches=True) skips too few batches on resume (accelerate skips base batches)",
            hint="set dispatch_batches=False",
        )
    if not isinstance(loader, DataLoaderShard):
        raise MisuseError(
            f"run.batches() cannot resume a {type(loader).__name__}", hint="pass the loader that accelerator.prepare() returned"
        )
    sampler = get_sampler(loader)
    if isinstance(sampler, UNSEEDABLE) and not isinstance(sampler, SeedableRandomSampler):
        raise MisuseError(
            f"the loader draws with a {type(sampler).__name__}, whose order cannot be restored after a restart",
            hint="Accelerator(dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...))",
        )


def open_epoch(
    accelerator: Accelerator, loader: Any, *, epoch: int, batches_done: int, seed: int, ledger: SampleLedger
) -> Iterable[Any]:
    """The rest of `epoch` after its first `batches_done` batches, ready to be iterated once. `epoch` counts from 0."""
    loader.set_epoch(epoch)
    current: Any = loader
    if batches_done:
        current = accelerator.skip_first_batches(loader, batches_done)
        current.set_epoch(epoch)
        # accelerate's skipped loader forgets these (hazard D11), and with them how much of the last batch is padding (D12).
        current._drop_last = loader._drop_last
        current._non_blocking = loader._non_blocking
        for name in SHARE_SETTINGS:
            if hasattr(loader.batch_sampler, name):
                setattr(current.batch_sampler, name, getattr(loader.batch_sampler, name))
    enter_epoch(seed, epoch)
    current.base_dataloader.generator = loader_generator(seed, epoch, accelerator.process_index)
    ledger.watch(current)
    return current
