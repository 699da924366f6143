"""A stream of Hugging Face datasets, split by node, whose state every rank saves with its model.

`torchrun --nproc_per_node 2 stream.py`. `--buffer N` shuffles through a buffer of N examples, which its state leaves out.
"""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from datasets import load_dataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

STEPS, SAVE_EVERY, BATCH = 20, 5, 4
SHARDS, ROWS = 4, 48
CHECKPOINTS = Path("checkpoints")


def write_shards(folder: Path) -> None:
    """Lines of JSON, as a crawl leaves them."""
    folder.mkdir(exist_ok=True)
    for shard in range(SHARDS):
        rows = [{"id": row, "x": [(row * k) % 17 / 17 for k in range(1, 9)]} for row in range(shard * ROWS, (shard + 1) * ROWS)]
        (folder / f"{shard}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--buffer", type=int, default=0)
    buffer = arguments.parse_args().buffer
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        write_shards(Path("data"))
    dist.barrier()
    rows = load_dataset("json", data_files=f"{Path('data').resolve()}/*.jsonl", split="train", streaming=True)
    if buffer:
        rows = rows.shuffle(seed=1, buffer_size=buffer)
    rows = split_dataset_by_node(rows, rank=rank, world_size=world).map(lambda row: {"y": row["x"][0] - row["x"][1]})
    rows = rows.with_format("torch")
    loader = DataLoader(rows, batch_size=BATCH)

    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = 0
    mine = CHECKPOINTS / f"rank-{rank}.pt"
    if mine.exists():
        saved = torch.load(mine, weights_only=False)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        rows.load_state_dict(saved["rows"])
        step = saved["step"]

    while step < STEPS:
        for batch in loader:
            loss = nn.functional.mse_loss(model(batch["x"])[:, 0], batch["y"])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            if step % SAVE_EVERY == 0:
                CHECKPOINTS.mkdir(exist_ok=True)
                parts = {"model": network.state_dict(), "optimizer": optimizer.state_dict(), "rows": rows.state_dict()}
                torch.save({**parts, "step": step}, mine.with_suffix(".tmp"))
                dist.barrier()
                os.replace(mine.with_suffix(".tmp"), mine)
                dist.barrier()
            if step == STEPS:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
