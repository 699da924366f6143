"""`stall_probe.py FOLDER BYTES REPEATS`, RANK and its like set: one rank that times the ways of saving one state, by turns.

Leaves FOLDER/stall.json (rank 0's): by way, a list of seconds for which the slowest rank stood still; and under "until
committed" how long a save beside the training took in all.
"""

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from accelerate import Accelerator

from chaosrun.faults.points import FaultPoints
from chaosrun.protocol.background import Writer
from chaosrun.protocol.checkpointing import Checkpointer
from chaosrun.protocol.state import TrainingState
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.position import Position

LAYERS = 8
WIDTH = 1024
COPIES = 3
"""Of each parameter: its value and AdamW's two moments."""
KEEP = 2
"""Checkpoints that each way keeps, as accelerate's `total_limit` does for `save_state`."""
WARM_UP = KEEP + 1
"""Saves before memory is used again for files, as it is from then on."""


def main(folder: Path, size: int, repeats: int) -> None:
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    legs = {mode: LegLayout(folder / mode, None) for mode in ("sync", "async")}
    orders = {mode: _order(leg, rank, ranks) for mode, leg in legs.items()}
    writer = Writer(orders["async"], legs["async"])
    torch.set_num_threads(1)
    accelerator = Accelerator()
    device = accelerator.device
    rows = max(1, size // COPIES // 4 // LAYERS // WIDTH)
    model = torch.nn.ModuleList(torch.nn.Linear(WIDTH, rows, bias=False) for _ in range(LAYERS))
    optimizer = torch.optim.AdamW(model.parameters())
    model.to(device)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 0.1)
    optimizer.step()
    optimizer.zero_grad()
    prepared_model, prepared_optimizer = accelerator.prepare(model, optimizer)
    assert prepared_model is not None
    assert prepared_optimizer is not None
    state = TrainingState(accelerator)
    savers = {
        mode: Checkpointer(
            accelerator, state, orders[mode], leg, FaultPoints(orders[mode], leg), writer=writer if mode == "async" else None
        )
        for mode, leg in legs.items()
    }
    tensors = _tensors(model, optimizer)
    # Of a GPU's state, to this machine's memory.
    copies = [torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor) for tensor in tensors]
    found: dict[str, list[float]] = {}
    kept: list[Path] = []

    def timed(name: str, act: Callable[[], object]) -> None:
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        act()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took = torch.tensor(time.perf_counter() - began, dtype=torch.float64, device=device)
        torch.distributed.all_reduce(took, torch.distributed.ReduceOp.MAX)
        found.setdefault(name, []).append(float(took))

    def plain() -> None:
        if len(kept) == KEEP:
            oldest = kept.pop(0)
            if accelerator.is_main_process:
                shutil.rmtree(oldest)
        kept.append(folder / "plain" / f"{len(found.get('save_state', []))}-{len(found.get('and fsync', []))}")
        accelerator.save_state(str(kept[-1]), safe_serialization=True)
        accelerator.wait_for_everyone()

    def synced() -> None:
        plain()
        for path in kept[-1].iterdir() if rank == 0 else ():
            with path.open("rb") as file:
                os.fsync(file.fileno())
        accelerator.wait_for_everyone()

    for repeat in range(repeats + WARM_UP):
        position = Position(epoch=0, batches=repeat + 1, step=repeat + 1)
        settle(accelerator)
        timed("save_state", plain)
        settle(accelerator)
        timed("and fsync", synced)
        settle(accelerator)
        timed("sync", lambda at=position: savers["sync"].save(at, {}))
        settle(accelerator)
        began = time.perf_counter()
        timed("async", lambda at=position: savers["async"].save(at, {}))
        assert savers["async"].pending, savers["async"].because
        savers["async"].wait()
        found.setdefault("until committed", []).append(time.perf_counter() - began)
        settle(accelerator)
        timed("memcpy", lambda: [copy.copy_(tensor, non_blocking=True) for copy, tensor in zip(copies, tensors, strict=True)])
    if rank == 0:
        # The first of each gets its memory and its files' pages.
        told = {name: {"first_s": values[0], "values_s": values[WARM_UP:]} for name, values in found.items()}
        (folder / "stall.json").write_text(json.dumps(told))
    accelerator.wait_for_everyone()
    accelerator.end_training()


def settle(accelerator: Accelerator) -> None:
    """Nothing of the save before is still being written."""
    os.sync()
    accelerator.wait_for_everyone()


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [*(parameter.detach() for parameter in model.parameters()), *moments]


def _order(leg: LegLayout, rank: int, ranks: int) -> WorkerOrder:
    return WorkerOrder(
        leg="chaos",
        leg_path=str(leg.path),
        storage_path=None,
        attempt=1,
        script="/train.py",
        cwd="/",
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        node_rank=0,
        seed=0,
        threads=1,
        master_addr=os.environ["MASTER_ADDR"],
        master_port=int(os.environ["MASTER_PORT"]),
        deterministic="off",
        every_steps=1,
        keep=KEEP,
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(float(sys.argv[2])), int(sys.argv[3]))
