"""The configuration of dataloaders that the job's resume protocol needs, so that one script serves every protocol."""

from typing import Any

from accelerate.utils import DataLoaderConfiguration, is_torchdata_stateful_dataloader_available

from chaosrun.errors import MisuseError
from chaosrun.protocol.context import current
from chaosrun.protocol.randomness import enter_epoch
from chaosrun.protocol.strategies import STATEFUL


def dataloader_configuration(data_seed: int | None = None, **settings: Any) -> DataLoaderConfiguration:
    """What to give to `Accelerator(dataloader_config=...)` so that the loaders fit `data.resume` of the job file.

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
        # The workers of a stateful loader fetch their first samples as soon as it is prepared.
        enter_epoch(data_seed, 0)
    settings["data_seed"] = data_seed
    return DataLoaderConfiguration(
        use_seedable_sampler=protocol == "seedable", use_stateful_dataloader=protocol in STATEFUL, **settings
    )
