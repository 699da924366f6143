"""Plain training, as people write it: DDP where a launcher says so."""

import argparse
import os
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument("--sleep", type=float, default=0.05)
    options = parser.parse_args()

    model: torch.nn.Module = torch.nn.Linear(4, 2)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    print(f"rank {os.environ.get('RANK', 0)} trains, attempt {os.environ['CHAOSRUN_ATTEMPT']}")
    context = "spawn" if options.loader_workers else None
    loader = DataLoader(TensorDataset(torch.ones(8, 4)), num_workers=options.loader_workers, multiprocessing_context=context)
    steps = 0
    while steps < options.steps:
        for (inputs,) in loader:
            if steps < options.steps:
                model(inputs).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                steps += 1
                time.sleep(options.sleep)
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(options.exit_code)


if __name__ == "__main__":
    main()
