"""Ray Train's TorchTrainer: a training function in two Ray workers, with Ray Train's checkpoints.

`python ray_train.py` starts a small Ray of its own. Run again, `TorchTrainer` finds its run's newest checkpoint by itself.
"""

import os
import tempfile
import time
from pathlib import Path

import ray
import ray.train
import ray.train.torch
import torch
from ray.train import Checkpoint, CheckpointConfig, RunConfig, ScalingConfig
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, SAVE_EVERY = 3, 5
STEP_S = 0.3
"""Ray Train's controller learns of a reported checkpoint when it next asks its workers, every two seconds: one that is killed
before has not been kept. Steps of a real model take long enough."""


def train() -> None:
    torch.manual_seed(2)
    data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
    loader = ray.train.torch.prepare_data_loader(DataLoader(data, batch_size=4, shuffle=True))
    model = ray.train.torch.prepare_model(nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    if checkpoint := ray.train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            saved = torch.load(Path(folder) / "state.pt")
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]

    done, skipped = divmod(step, len(loader))
    for epoch in range(done, EPOCHS):
        loader.sampler.set_epoch(epoch)
        for index, (x, y) in enumerate(loader):
            if index < skipped:
                continue
            loss = nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(STEP_S)
            step += 1
            if step % SAVE_EVERY == 0:
                with tempfile.TemporaryDirectory() as folder:
                    state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                    torch.save(state, Path(folder) / "state.pt")
                    first = ray.train.get_context().get_world_rank() == 0
                    ray.train.report({"loss": loss.item()}, checkpoint=Checkpoint.from_directory(folder) if first else None)
        skipped = 0


def main() -> None:
    ray.init(num_cpus=2, include_dashboard=False)
    trainer = ray.train.torch.TorchTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="rings", storage_path=os.path.abspath("runs"), checkpoint_config=CheckpointConfig(num_to_keep=2)
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main()
