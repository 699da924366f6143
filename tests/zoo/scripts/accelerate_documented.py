"""accelerate as its guide to checkpoints shows it: only the first epoch after a restart skips batches."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
options = parser.parse_args()

set_seed(11)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7))
samples = torch.randn(32, 8, generator=torch.Generator().manual_seed(5))
data = TensorDataset(samples, (samples.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

overall_step = 0
saved = sorted(options.output.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    overall_step = int(saved[-1].name.split("_")[1])
starting_epoch, resume_step = divmod(overall_step, len(loader))

model.train()
for epoch in range(starting_epoch, 3):
    active = accelerator.skip_first_batches(loader, resume_step) if epoch == starting_epoch and resume_step else loader
    for inputs, labels in active:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        overall_step += 1
        if overall_step % 3 == 0:
            accelerator.save_state(str(options.output / f"step_{overall_step}"))
