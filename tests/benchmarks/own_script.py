"""`own_script.py STEPS SAVE_EVERY`: a small transformer under plain DDP, with a checkpoint and a resume of its own.

A script as teams write it, which has never heard of chaosrun. Each process appends to own-<pid>.jsonl where it runs: when it
reached its first line, when its training began (the step that it goes on from), and each step, with the process's CPU time.
"""

import json
import os
import sys
import time
from pathlib import Path

BEGAN_S = time.time()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset  # noqa: E402

VOCABULARY, CONTEXT, WIDTH = 256, 128, 64
CHECKPOINT = Path("checkpoints") / "latest.pt"


def main(steps: int, save_every: int) -> None:
    rank = int(os.environ["RANK"])
    events = Path(f"own-{os.getpid()}.jsonl")

    def note(event: str, **fields: object) -> None:
        with events.open("a") as file:
            line = {"time_s": time.time(), "cpu_s": time.process_time(), "rank": rank, "event": event, **fields}
            file.write(json.dumps(line) + "\n")

    note("first_line", began_s=BEGAN_S)
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    data = TensorDataset(torch.randint(VOCABULARY, (1490, CONTEXT)))
    sampler = DistributedSampler(data, seed=1)
    loader = DataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator().manual_seed(1))
    layer = nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=4 * WIDTH, batch_first=True)
    encoder = nn.TransformerEncoder(layer, num_layers=2)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(VOCABULARY, WIDTH), encoder, nn.Linear(WIDTH, VOCABULARY)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, weights_only=True)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["rng"][rank])
        step = saved["step"]
    note("training", step=step)
    while step < steps:
        epoch, done = divmod(step, len(loader))
        sampler.set_epoch(epoch)
        for index, (tokens,) in enumerate(loader):
            if index < done:
                continue
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            step += 1
            note("step", step=step)
            if step % save_every == 0:
                save(model, optimizer, step, rank)
            if step == steps:
                break
    dist.destroy_process_group()


def save(model: DistributedDataParallel, optimizer: torch.optim.Optimizer, step: int, rank: int) -> None:
    streams = [torch.empty_like(torch.get_rng_state()) for _ in range(dist.get_world_size())]
    dist.all_gather(streams, torch.get_rng_state())
    if rank == 0:
        CHECKPOINT.parent.mkdir(exist_ok=True)
        staged = CHECKPOINT.with_suffix(".new")
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "rng": streams, "step": step}
        torch.save(state, staged)
        os.replace(staged, CHECKPOINT)
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
