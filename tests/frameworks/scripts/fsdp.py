"""FSDP2 (`fully_shard`) with torch.distributed.checkpoint, saved at once or in the background.

`torchrun --nproc_per_node 2 fsdp.py [--async-save]`. `--forget-optimizer` loads the weights alone.
"""

import argparse
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

EPOCHS, SAVE_EVERY = 3, 5
CHECKPOINTS = Path("checkpoints")


class App(Stateful):
    """What DCP saves and loads as one."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--async-save", action="store_true")
    arguments.add_argument("--forget-optimizer", action="store_true")
    given = arguments.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(5)
    data = TensorDataset(torch.randn(96, 16), torch.randn(96, 1))
    sampler = DistributedSampler(data, seed=5)
    loader = DataLoader(data, batch_size=4, sampler=sampler, generator=torch.Generator())
    blocks = [nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(3)]
    model = nn.Sequential(*blocks, nn.Linear(16, 1))
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=EPOCHS * len(loader))
    app = App(model, optimizer, scheduler)

    step = 0
    if last := newest():
        if given.forget_optimizer:
            dcp.load({"app": {"model": get_model_state_dict(model)}}, checkpoint_id=str(last))
        else:
            dcp.load({"app": app}, checkpoint_id=str(last))
        step = number(last)

    saving = None
    group = dist.new_group(backend="gloo") if given.async_save else None
    done, skipped = divmod(step, len(loader))
    for epoch in range(done, EPOCHS):
        sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if index < skipped:
                continue
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                target = str(CHECKPOINTS / f"step_{step}")
                if given.async_save:
                    if saving:
                        saving.result()
                    saving = dcp.async_save({"app": app}, checkpoint_id=target, process_group=group)
                else:
                    dcp.save({"app": app}, checkpoint_id=target)
                if rank == 0:
                    for old in sorted(complete(), key=number)[:-2]:
                        shutil.rmtree(old)
        skipped = 0
    if saving:
        saving.result()
    dist.destroy_process_group()


def complete() -> list[Path]:
    """DCP writes `.metadata` last."""
    return [path.parent for path in CHECKPOINTS.glob("step_*/.metadata")]


def newest() -> Path | None:
    found = max(complete(), key=number, default=None)
    # Every rank has to have looked before any writes again.
    dist.barrier()
    return found


def number(path: Path) -> int:
    return int(re.sub(r"\D", "", path.name))


if __name__ == "__main__":
    main()
