"""Training whose forward and backward pass are CUDA graphs; with `whole`, the optimizer's step as well."""

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import chaosrun

torch.manual_seed(1)
accelerator = Accelerator(dataloader_config=chaosrun.dataloader_configuration(data_seed=1))
model = nn.Sequential(nn.Linear(8, 64), nn.Dropout(0.1), nn.Linear(64, 4)).to(accelerator.device)
optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
loader = DataLoader(TensorDataset(torch.randn(64, 8), torch.randn(64, 4)), batch_size=8, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
graphed = torch.cuda.make_graphed_callables(model, (torch.zeros(8, 8, device=accelerator.device),))
run = chaosrun.attach(accelerator)
for inputs, targets in run.batches(loader, epochs=2):
    loss = (graphed(inputs) - targets).square().mean()
    accelerator.backward(loss)
    if "whole" in sys.argv:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)
