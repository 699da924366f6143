"""accelerate with a stateful loader: save_state keeps the loader's place, load_state puts it back."""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--save-every", type=int, default=4)
options = parser.parse_args()

set_seed(11)
accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
samples = torch.randn(72, 8, generator=torch.Generator().manual_seed(5))
data = TensorDataset(samples, (samples.sum(1) > 0).long())
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
loader = DataLoader(data, batch_size=2, shuffle=False, generator=torch.Generator().manual_seed(3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

step = 0
saved = sorted(options.output.glob("step_*"), key=lambda path: int(path.name.split("_")[1]))
if saved:
    accelerator.load_state(str(saved[-1]))
    step = int(saved[-1].name.split("_")[1])

model.train()
for inputs, labels in loader:
    loss = nn.functional.cross_entropy(model(inputs), labels)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    if step % options.save_every == 0:
        accelerator.save_state(str(options.output / f"step_{step}"))
accelerator.print(f"finished after {step} steps")
accelerator.end_training()
