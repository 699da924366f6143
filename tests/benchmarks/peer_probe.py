"""The training of jobs/probe, saved and resumed with accelerate alone, for launchers other than chaosrun.

`peer_probe.py FOLDER [MEGABYTES]`: saves a checkpoint every 10 steps, goes on from the newest, and kills the last rank once
after step 21. MEGABYTES of state are saved and restored beside the model's own, and never trained. Each process appends its
events to FOLDER/events-<pid>.jsonl. Runs under any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, cast

__all__ = ["SAVED_STEP", "STEPS", "STEP_S", "main"]

STEPS = 44
SAVE_EVERY_STEPS = 10
SAVED_STEP = 20
"""Of the checkpoint to go on from."""
KILL_AFTER_STEP = SAVED_STEP + 1
STEP_S = 0.02


def main(folder: Path, rank: int, megabytes: int = 0) -> None:
    events = folder / f"events-{os.getpid()}.jsonl"

    def note(event: str, **fields: object) -> None:
        with events.open("a") as file:
            file.write(json.dumps({"time_s": time.time(), "event": event, **fields}) + "\n")

    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed
    from torch.utils.data import DataLoader, TensorDataset

    configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    accelerator = Accelerator(cpu="BENCH_ON_GPU" not in os.environ, dataloader_config=configuration)
    torch.set_num_threads(1)
    set_seed(1)
    data = TensorDataset(torch.randn(340, 64), torch.randint(10, (340,)))
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(256, 10))
    if megabytes:
        model.register_parameter("frozen", torch.nn.Parameter(torch.ones(megabytes * 250_000), requires_grad=False))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10 * accelerator.num_processes, gamma=0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    loader = cast(Any, accelerator.prepare(DataLoader(data, batch_size=8, shuffle=True)))

    saved = sorted((folder / "checkpoints").glob("step-*"))
    step = 0
    if saved:
        accelerator.load_state(str(saved[-1]))
        step = int(saved[-1].name.removeprefix("step-"))
    while step < STEPS:
        epoch, done = divmod(step, len(loader))
        loader.set_epoch(epoch)
        batches = cast(Any, accelerator.skip_first_batches(loader, done)) if done else loader
        batches.set_epoch(epoch)
        for features, classes in batches:
            loss = torch.nn.functional.cross_entropy(model(features), classes)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            note("step", step=step, loss=loss.item())
            if step % SAVE_EVERY_STEPS == 0:
                accelerator.save_state(str(folder / "checkpoints" / f"step-{step:05d}"))
            if step == KILL_AFTER_STEP and rank == accelerator.num_processes - 1 and not (folder / "killed").exists():
                (folder / "killed").touch()
                note("kill", step=step)
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(STEP_S)
    note("done", step=step)
    accelerator.wait_for_everyone()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(os.environ["RANK"]), *map(int, sys.argv[2:]))
