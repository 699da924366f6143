"""Plain DDP under torchrun, as people write it."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
print(f"rank {dist.get_rank()} trains, attempt {os.environ['CHAOSRUN_ATTEMPT']}")
for _ in range(int(sys.argv[1])):
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.05)
dist.destroy_process_group()
