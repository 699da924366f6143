"""Train a small network that tells points of two rings apart, by Lightning, with Lightning's own checkpoints.

`python train.py` trains in two processes. Started again, whatever ended it, it resumes from its last checkpoint;
`chaosrun submit job.yaml` kills it and proves that. Nothing in here knows of chaosrun. Put your own data and model in their
place.
"""

import math
import os
from typing import Any

import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

SEED = 1
EPOCHS = 4
SAVE_EVERY = 5


class TwoRings(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Dropout(0.1), nn.Linear(32, 2))
        self.data = two_rings(128)

    def train_dataloader(self) -> StatefulDataLoader[Any]:
        # Lightning saves where a stateful loader stands; torch's own DataLoader would begin its epoch again. The sampler that
        # Lightning would put in place of a shuffle draws from the global random stream, which Lightning does not save.
        sampler = StatefulDistributedSampler(self.data, seed=SEED)
        return StatefulDataLoader(self.data, batch_size=8, sampler=sampler)

    def training_step(self, batch: tuple[torch.Tensor, torch.Tensor], batch_number: int) -> torch.Tensor:
        points, rings = batch
        # Lightning saves no random state. Dropout that follows from the step needs none.
        torch.manual_seed(SEED + 1000 * self.global_step + self.global_rank)
        loss = nn.functional.cross_entropy(self.network(points), rings)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=20, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    lightning.seed_everything(SEED)
    trainer = lightning.Trainer(
        accelerator="auto",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "2")),
        strategy="ddp",
        use_distributed_sampler=False,
        max_epochs=EPOCHS,
        callbacks=[ModelCheckpoint("checkpoints", save_last=True, every_n_train_steps=SAVE_EVERY)],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(TwoRings(), ckpt_path="last")
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss']:.4f} after {trainer.global_step} steps")


def two_rings(count: int) -> TensorDataset:
    """Points on a plane, shape (count, 2), and the ring that each lies on, 0 or 1."""
    rings = torch.arange(count) % 2
    angles = 2 * math.pi * torch.rand(count)
    radii = 1.0 + rings + 0.1 * torch.randn(count)
    return TensorDataset(torch.stack((radii * angles.cos(), radii * angles.sin()), dim=1), rings)


if __name__ == "__main__":
    main()
