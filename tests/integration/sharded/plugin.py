"""A model that accelerate shards by its FSDP2 plugin, which it does on GPUs alone: see test_gpu.py."""

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, FullyShardedDataParallelPlugin, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chaosrun

WIDTH = 16


def main() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="size_based_wrap", min_num_params=100)
    config = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=5)
    accelerator = Accelerator(fsdp_plugin=plugin, dataloader_config=config)
    set_seed(5)
    data = TensorDataset(torch.randn(96, WIDTH), torch.randn(96, 1))
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    run = chaosrun.attach(accelerator)
    for inputs, targets in run.batches(loader, epochs=2):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    accelerator.end_training()


if __name__ == "__main__":
    main()
