"""The resume protocols of `data.resume`: how a restarted attempt finds its place in the data, and the loaders that each needs.

Only `seedable` is exact; `resume` implements it. The others do what training scripts commonly do with accelerate's own means,
and correct nothing, so that a drill shows the effect:

- `plain`          iterate again: the interrupted epoch starts over at its first batch
- `skip`           `accelerator.skip_first_batches` in the interrupted epoch, the loader itself in later ones
- `stateful`       accelerate saves and loads the state of torchdata's StatefulDataLoader; iterate
- `stateful_skip`  both: the loaded state waits for the epoch after the skipped one
"""

from collections.abc import Iterable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, is_torchdata_stateful_dataloader_available

from chaosrun.errors import MisuseError
from chaosrun.observe.ledger import SampleLedger
from chaosrun.protocol import resume
from chaosrun.protocol.context import current
from chaosrun.protocol.randomness import enter_epoch
from chaosrun.protocol.sources import check_sources, unseedable_sampler
from chaosrun.records.order import DataResume
from chaosrun.records.position import Position

STATEFUL = frozenset({"stateful", "stateful_skip"})
SKIPPING = frozenset({"skip", "stateful_skip"})

CONFIGURE = (
    "Accelerator(dataloader_config=chaosrun.dataloader_configuration(data_seed=...)) makes the loader that data.resume needs"
)


def dataloader_configuration(data_seed: int | None = None, **settings: Any) -> DataLoaderConfiguration:
    """The value for `Accelerator(dataloader_config=...)` with which the loaders fit `data.resume` of the job file.

    Outside chaosrun, as by default, that is a seedable sampler. `data_seed` seeds its order (None: torch's initial seed when
    the loader is prepared) and `chaosrun.sample_rng`; `settings` are the other fields of DataLoaderConfiguration. Raises
    MisuseError for a field that the protocol decides, and when it needs torchdata and there is none.
    """
    context = current()
    protocol = context.order.data_resume if context else "seedable"
    decided = sorted(settings.keys() & {"use_seedable_sampler", "use_stateful_dataloader"})
    if decided:
        raise MisuseError(
            f"dataloader_configuration() got {decided[0]}, which data.resume decides (here: {protocol})",
            hint="leave it out and set data.resume, or build accelerate's DataLoaderConfiguration yourself",
        )
    if protocol in STATEFUL and not is_torchdata_stateful_dataloader_available():
        raise MisuseError(
            f"data.resume: {protocol} needs torchdata 0.8 or later, which is not installed",
            hint="pip install 'chaosrun[stateful]'",
        )
    if protocol in STATEFUL and data_seed is not None:
        # A stateful loader's workers fetch their first samples as soon as it is prepared.
        enter_epoch(data_seed, 0)
    settings["data_seed"] = data_seed
    return DataLoaderConfiguration(
        use_seedable_sampler=protocol == "seedable", use_stateful_dataloader=protocol in STATEFUL, **settings
    )


def check_loader(protocol: DataResume, accelerator: Accelerator, loader: Any) -> None:
    """Raise MisuseError, with the remedy, for a loader that this protocol cannot restore."""
    resume.check_loader(accelerator, loader)
    stateful = bool(getattr(loader, "use_stateful_dataloader", False))
    if stateful and protocol == "seedable":
        raise MisuseError(
            "data.resume is seedable, and the loader is stateful: it restores its cursor but not its order",
            hint=f"{CONFIGURE}; to see what a stateful loader does, set data.resume: stateful",
        )
    if stateful and protocol not in STATEFUL:
        raise MisuseError(
            f"data.resume is {protocol}, and the loader is stateful: accelerate would restore its state nevertheless",
            hint=f"set data.resume: stateful, or: {CONFIGURE}",
        )
    if not stateful and protocol in STATEFUL:
        raise MisuseError(
            f"data.resume is {protocol}, and the loader is not stateful: it has no state to restore",
            hint=f"{CONFIGURE}; on its own, DataLoaderConfiguration(use_stateful_dataloader=True)",
        )
    unseedable = unseedable_sampler(loader)
    if unseedable and protocol == "seedable":
        replaced = f"{CONFIGURE}; on its own, DataLoaderConfiguration(use_seedable_sampler=True, data_seed=...)"
        own = (
            "use a sampler of your own whose set_epoch(epoch) seeds its torch.Generator: accelerate replaces shuffle=True only"
        )
        raise MisuseError(
            f"data.resume is seedable, and the loader draws with a {unseedable}, whose order cannot be restored",
            hint=replaced if unseedable == "RandomSampler" else own,
        )
    if protocol == "seedable":
        check_sources(loader)


def resumed_position(protocol: DataResume, position: Position) -> Position:
    """The position at which a restarted attempt resumes when the checkpoint was saved at `position`."""
    if protocol == "plain":
        return Position(epoch=position.epoch, batches=0, step=position.step)
    return position


def open_epoch(
    protocol: DataResume,
    accelerator: Accelerator,
    loader: Any,
    *,
    epoch: int,
    batches_done: int,
    seed: int,
    ledger: SampleLedger,
) -> Iterable[Any]:
    """The rest of `epoch` after its first `batches_done` batches under this protocol, ready to be iterated once."""
    if protocol == "seedable":
        return resume.open_epoch(accelerator, loader, epoch=epoch, batches_done=batches_done, seed=seed, ledger=ledger)
    rest = accelerator.skip_first_batches(loader, batches_done) if batches_done and protocol in SKIPPING else loader
    enter_epoch(seed, epoch)
    ledger.watch(rest)
    return rest
