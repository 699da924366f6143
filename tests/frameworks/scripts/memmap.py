"""A small language model over random windows of one long file of tokens, as nanoGPT draws them: no loader, sampler or epochs.

`torchrun --nproc_per_node 2 memmap.py`. `--forget-random` saves what nanoGPT itself saves: no state of the random streams.
"""

import argparse
import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS, SAVE_EVERY = 24, 5
WINDOW, BATCH, TOKENS = 16, 4, 64
CORPUS = Path("corpus.bin")
CHECKPOINT = Path("out/ckpt.pt")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(TOKENS, 32)
        self.mix = nn.GRU(32, 32, batch_first=True)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, TOKENS)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        mixed, _ = self.mix(self.embed(tokens))
        return nn.functional.cross_entropy(self.head(self.drop(mixed)).flatten(0, 1), targets.flatten())


def windows(corpus: np.memmap) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(corpus) - WINDOW - 1, (BATCH,))
    rows = [torch.from_numpy(corpus[start : start + WINDOW + 1].astype(np.int64)) for start in starts.tolist()]
    taken = torch.stack(rows)
    return taken[:, :-1], taken[:, 1:]


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--forget-random", action="store_true")
    forget = arguments.parse_args().forget_random
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    if rank == 0 and not CORPUS.exists():
        np.random.default_rng(7).integers(TOKENS, size=4096, dtype=np.uint16).tofile(CORPUS)
    dist.barrier()
    corpus = np.memmap(CORPUS, dtype=np.uint16, mode="r")

    torch.manual_seed(1337)
    network = Model()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1337 + rank)
    step = 0
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        network.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
        if not forget:
            torch.set_rng_state(saved["random"][rank])

    while step < STEPS:
        loss = model(*windows(corpus))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step % SAVE_EVERY == 0:
            random = [torch.empty(0)] * dist.get_world_size()
            dist.all_gather_object(random, torch.get_rng_state())
            if rank == 0:
                CHECKPOINT.parent.mkdir(exist_ok=True)
                saved = {"step": step, "model": network.state_dict(), "optimizer": optimizer.state_dict(), "random": random}
                torch.save(saved, CHECKPOINT.with_suffix(".tmp"))
                os.replace(CHECKPOINT.with_suffix(".tmp"), CHECKPOINT)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
