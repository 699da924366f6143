"""A classifier trained with accelerate, whose states are named automatically; a restart loads the newest and skips what was
done."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Progress:
    """How many steps are done."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="project")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--save-every", type=int, default=4)
options = parser.parse_args()

set_seed(11)
project = ProjectConfiguration(project_dir=str(options.output), automatic_checkpoint_naming=True, total_limit=2)
accelerator = Accelerator(cpu=True, project_config=project)
samples = torch.randn(64, 8, generator=torch.Generator().manual_seed(5))
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
loader = DataLoader(TensorDataset(samples, (samples.sum(1) > 0).long()), batch_size=4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
progress = Progress()
accelerator.register_for_checkpointing(progress)
if (options.output / "checkpoints").exists():
    accelerator.load_state()

first, done = divmod(progress.steps, len(loader))
for epoch in range(first, options.epochs):
    batches = accelerator.skip_first_batches(loader, done) if epoch == first and done else loader
    for inputs, labels in batches:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.steps += 1
        if progress.steps % options.save_every == 0:
            accelerator.save_state()
