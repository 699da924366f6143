"""Train a small network that tells points of two rings apart. Put your own data and model in its place.

`python train.py` trains in one process, `torchrun --nproc_per_node 2 train.py` in two, `chaosrun submit job.yaml` under faults:
the numbers of the latter two are the same. The four lines that chaosrun needs are numbered.
"""

import math

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chaosrun  # 1

SEED = 1
EPOCHS = 4


def main() -> None:
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        # accelerate's own settings, with a shuffle that follows from seed and epoch alone: a restart finds its place in it.
        dataloader_config=chaosrun.dataloader_configuration(data_seed=SEED),
    )
    set_seed(SEED)
    loader = DataLoader(two_rings(128), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10, gamma=0.5)
    # Checkpoints hold what is prepared here. Anything else with a state, such as averaged weights: run.register("name", it).
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    loss = torch.tensor(0.0)
    run = chaosrun.attach(accelerator)  # 2: after the last prepare()
    for points, rings in run.batches(loader, epochs=EPOCHS):  # 3: instead of the loops over epochs and batches
        loss = nn.functional.cross_entropy(model(points), rings)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)  # 4: once for every batch; checkpoints are saved, and faults strike, between this and the next one

    accelerator.print(f"loss {loss.item():.4f} after {run.position.step} steps")
    accelerator.end_training()


def two_rings(count: int) -> TensorDataset:
    """Points on a plane, shape (count, 2), and the ring that each lies on, 0 or 1."""
    rings = torch.arange(count) % 2
    angles = 2 * math.pi * torch.rand(count)
    radii = 1.0 + rings + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack((radii * angles.cos(), radii * angles.sin()), dim=1), rings)


if __name__ == "__main__":
    main()
