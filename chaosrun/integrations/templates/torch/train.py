"""Train a small network that tells points of two rings apart, in a plain torch loop. Put your own data and model in its place.

`python train.py` trains in one process, `torchrun --nproc_per_node 2 train.py` in two, `chaosrun submit job.yaml` under faults:
the numbers of the latter two are the same. The lines that a torch script gets for chaosrun are numbered; all
others are torch's.
"""

import math

import torch
from accelerate import Accelerator  # 1
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chaosrun  # 2

SEED = 1
EPOCHS = 4


def main() -> None:
    torch.manual_seed(SEED)
    loader = DataLoader(two_rings(128), batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)

    # 3: in place of init_process_group, DistributedDataParallel, DistributedSampler and .to(device). chaosrun saves and
    # restores the training through this object, and finds the next batch after a restart; that is all it is for here.
    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        step_scheduler_with_optimizer=False,  # scheduler.step() is one step, as in torch, whatever the number of processes
        dataloader_config=chaosrun.dataloader_configuration(data_seed=SEED),  # a shuffle that follows from seed and epoch alone
    )
    # 4: checkpoints hold what is prepared here. Anything else with a state, such as averaged weights: run.register("name", it).
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    loss = torch.tensor(0.0)
    run = chaosrun.attach(accelerator)  # 5: after prepare()
    for points, rings in run.batches(loader, epochs=EPOCHS):  # 6: instead of the loops over epochs and batches
        loss = nn.functional.cross_entropy(model(points), rings)
        accelerator.backward(loss)  # 7: instead of loss.backward(), so that gradients add up in the same order after a restart
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)  # 8: once for every batch; checkpoints are saved, and faults strike, between this and the next one

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
