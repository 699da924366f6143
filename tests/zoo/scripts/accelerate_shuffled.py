"""A classifier trained with accelerate: save_state every few steps; a restart loads the newest and skips what was done."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save-every", type=int, default=5)
options = parser.parse_args()

set_seed(11)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=7))
samples = torch.randn(48, 8, generator=torch.Generator().manual_seed(5))
data = TensorDataset(samples, (samples.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
loader = DataLoader(data, batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs * len(loader))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)

step = 0
saved = sorted(options.output.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    step = int(saved[-1].name.split("_")[1])

first_epoch, done = divmod(step, len(loader))
model.train()
for epoch in range(first_epoch, options.epochs):
    loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, done) if epoch == first_epoch and done else loader
    for inputs, labels in batches:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        if step % options.save_every == 0:
            accelerator.save_state(str(options.output / f"step_{step}"))
accelerator.print(f"finished after {step} steps")
