"""A Lightning module on data of its own, resumed with ckpt_path from the newest checkpoint."""

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

SAMPLES = torch.randn(24, 4, generator=torch.Generator().manual_seed(2))

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--dropout", type=float, default=0.0)
parser.add_argument("--every", type=int, default=6)
parser.add_argument("--stateful", action="store_true")
parser.add_argument("--plateau", action="store_true", help="halve the learning rate after each step that is not much better")
parser.add_argument("--reload", type=int, default=0, help="epochs after which the data is drawn anew")
options = parser.parse_args()


class Regression(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(options.dropout), nn.Linear(8, 1))

    def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
        loss = nn.functional.mse_loss(self.layers(batch[0]).squeeze(-1), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if not options.plateau:
            return {"optimizer": optimizer}
        scheduler = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "loss", "interval": "step"}}


class Drawn(pl.LightningDataModule):
    """Other samples each time that the loader is made."""

    def train_dataloader(self) -> DataLoader:
        epoch = self.trainer.current_epoch if self.trainer else 0
        generator = torch.Generator().manual_seed(epoch)
        inputs = torch.randn(24, 4, generator=generator)
        return DataLoader(TensorDataset(inputs, inputs.sum(1)), batch_size=4, generator=generator)


pl.seed_everything(1, verbose=False)
kind = StatefulDataLoader if options.stateful else DataLoader
loader = kind(TensorDataset(SAMPLES, SAMPLES.sum(1)), batch_size=4, generator=torch.Generator().manual_seed(7))
saved = sorted(options.output.glob("*.ckpt"), key=lambda path: int(path.stem.split("=")[1]))
trainer = pl.Trainer(
    max_epochs=4,
    accelerator="cpu",
    devices=1,
    logger=False,
    reload_dataloaders_every_n_epochs=options.reload,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[ModelCheckpoint(dirpath=options.output, filename="{step}", save_top_k=-1, every_n_train_steps=options.every)],
)
trainer.fit(Regression(), Drawn() if options.reload else loader, ckpt_path=saved[-1] if saved else None)
