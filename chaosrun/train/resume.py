"""The resume protocol for data: bring a prepared loader to (epoch, batches done) so that the same samples follow.

For the resumed epoch `set_epoch` is called before and after `skip_first_batches`: either call alone replays the wrong epoch on
some accelerate version between 0.34 and 1.15 (hazard D2). The skipped loader is used once (D4); later epochs go back to the
original one with an explicit `set_epoch` (D3).
"""

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher, DataLoaderShard, SeedableRandomSampler, get_sampler
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from chaosrun.errors import MisuseError
from chaosrun.train.ledger import SampleLedger
from chaosrun.train.randomness import enter_epoch, loader_generator

__all__ = ["check_loader", "open_epoch"]

UNSEEDABLE = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
SHARE_SETTINGS = ("batch_size", "num_processes", "split_batches")


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
