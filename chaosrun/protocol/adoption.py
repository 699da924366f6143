"""Presents a script's own model, optimizer, loader and scheduler, which accelerate did not prepare, as a prepared training.

Nothing is wrapped or moved and no data is split among ranks: the script does that. The rest of `protocol` works with
accelerate's bookkeeping, which is added here, so that checkpoints, data order and trace work the same way.
"""

import os
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.data_loader import prepare_data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from chaosrun.errors import MisuseError

CALL = "run = chaosrun.attach(model, optimizer, loader), with schedulers and further ones of each in any order"


class Adopted(Accelerator):
    """Made by `adopt`. `loaders`: the prepared loader that `run.batches` uses in place of each loader of the script."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(cpu=device.type == "cpu", device_placement=False)
        self.loaders: dict[int, Any] = {}


def adopt(objects: Sequence[Any]) -> Adopted:
    """Raises MisuseError for what cannot be adopted, naming its type."""
    models = [item for item in objects if isinstance(item, torch.nn.Module)]
    optimizers = [item for item in objects if isinstance(item, torch.optim.Optimizer)]
    loaders = [item for item in objects if isinstance(item, DataLoader)]
    schedulers = [item for item in objects if isinstance(item, LRScheduler)]
    known = {id(item) for item in (*models, *optimizers, *loaders, *schedulers)}
    for item in objects:
        if id(item) not in known or isinstance(item, AcceleratedOptimizer):
            raise MisuseError(f"chaosrun.attach() got a {type(item).__name__} beside its first argument", hint=CALL)
    if not (models and optimizers and loaders):
        raise MisuseError(
            f"chaosrun.attach() got {len(models)} models, {len(optimizers)} optimizers and {len(loaders)} loaders", hint=CALL
        )
    workers = int(os.environ.get("WORLD_SIZE", "1"))
    if workers > 1 and not torch.distributed.is_initialized():
        raise MisuseError(
            f"chaosrun.attach() came before the process group of {workers} ranks was made",
            hint="torch.distributed.init_process_group() first, and DistributedDataParallel or fully_shard around the model",
        )
    accelerator = Adopted(next((p.device for model in models for p in model.parameters()), torch.device("cpu")))
    # As accelerate keeps them: without the DDP wrapper.
    accelerator._models = [model.module if isinstance(model, DistributedDataParallel) else model for model in models]
    accelerator._optimizers = [AcceleratedOptimizer(optimizer, device_placement=False) for optimizer in optimizers]
    accelerator._schedulers = [
        AcceleratedScheduler(scheduler, accelerator._optimizers, step_with_optimizer=False) for scheduler in schedulers
    ]
    for loader in loaders:
        accelerator.loaders[id(loader)] = _unsplit(loader)
    accelerator._dataloaders = list(accelerator.loaders.values())
    return accelerator


def _unsplit(loader: DataLoader[Any]) -> Any:
    """A prepared loader that yields the batches of `loader` on this rank, in an order that depends on the epoch number only."""
    alone = {"num_processes": 1, "process_index": 0, "dispatch_batches": False, "put_on_device": False}
    return prepare_data_loader(loader, **alone, use_seedable_sampler=True, data_seed=torch.initial_seed())
