"""A Lightning module whose checkpoints are written in the background, to storage that takes its time."""

import argparse
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

SAMPLES = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))


class SlowStorage(TorchCheckpointIO):
    """A share on the network."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        time.sleep(0.1)
        super().save_checkpoint(checkpoint, path, storage_options)


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        time.sleep(0.04)
        return nn.functional.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
options = parser.parse_args()

pl.seed_everything(1, verbose=False)
loader = DataLoader(TensorDataset(SAMPLES, SAMPLES.sum(1)), batch_size=4, generator=torch.Generator().manual_seed(7))
saved = sorted(options.output.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    plugins=[AsyncCheckpointIO(SlowStorage())],
    callbacks=[ModelCheckpoint(dirpath=options.output, filename="{step}", save_top_k=-1, every_n_epochs=1)],
)
trainer.fit(Regression(), loader, ckpt_path=saved[-1] if saved else None)
