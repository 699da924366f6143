"""DDP over torchdata's StatefulDataLoader, with a loading process for each rank: every rank saves where its own loader stands.

`torchrun --nproc_per_node 2 stateful.py`. `--loader-forgotten` begins the epoch at its start.
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

EPOCHS, SAVE_EVERY = 3, 5
CHECKPOINTS = Path("checkpoints")


class Rows(Dataset[dict[str, torch.Tensor]]):
    """Each row follows from its number alone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(index)
        return {"x": torch.randn(8, generator=drawn), "y": torch.randn(1, generator=drawn)}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--loader-forgotten", action="store_true")
    forgotten = arguments.parse_args().loader_forgotten
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(3)
    sampler = StatefulDistributedSampler(Rows(), seed=3)
    loader = StatefulDataLoader(Rows(), batch_size=4, sampler=sampler, num_workers=1, generator=torch.Generator())
    network = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, nesterov=True)

    epoch = step = 0
    mine = CHECKPOINTS / "last" / f"rank-{rank}.pt"
    if mine.exists():
        saved = torch.load(mine)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        epoch, step = saved["epoch"], saved["step"]
        if not forgotten:
            loader.load_state_dict(saved["loader"])

    for now in range(epoch, EPOCHS):
        sampler.set_epoch(now)
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            if step % SAVE_EVERY == 0:
                save(rank, {"model": network, "optimizer": optimizer, "loader": loader}, epoch=now, step=step)
    dist.destroy_process_group()


def save(rank: int, parts: dict, **numbers: int) -> None:
    """A folder for each step, a file for each rank; `last` points to the newest once all ranks have written theirs."""
    folder = CHECKPOINTS / f"step-{numbers['step']:04}"
    folder.mkdir(parents=True, exist_ok=True)
    torch.save({**{name: part.state_dict() for name, part in parts.items()}, **numbers}, folder / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        link = CHECKPOINTS / "last.new"
        link.unlink(missing_ok=True)
        link.symlink_to(folder.name)
        link.replace(CHECKPOINTS / "last")
    dist.barrier()


if __name__ == "__main__":
    main()
