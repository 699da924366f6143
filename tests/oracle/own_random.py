"""A training script with a resume of its own, of the parts that its argument names (JSON, see `test_random_scripts.Parts`).
After a restart it does not restore what "lost" names. It prints a digest of each step and, at its end, of all that it holds."""

import copy
import hashlib
import io
import json
import os
import pickle
import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

parts: dict[str, Any] = json.loads(sys.argv[1])
lost: str = parts["lost"]
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
output = Path(os.environ["CHAOSRUN_OUTPUT"])
SAMPLES, BATCH, STEPS = 36, 4, 24
if ranks > 1:
    dist.init_process_group("gloo")


def seed_all(seed: int) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


seed_all(3)
inputs = torch.randn(SAMPLES, 6)
targets = inputs[:, :2].sum(1, keepdim=True) + 0.1 * torch.randn(SAMPLES, 1)


class Rows(Dataset[Any]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        noise = 0.05 * torch.randn(6) if parts["augment"] else torch.zeros(6)
        return inputs[index] + noise, targets[index]


class Stream(IterableDataset[Any]):
    seen = 0

    def __iter__(self) -> Iterator[Any]:
        for number in range(self.seen, 1 << 30):
            row = (number * 7 + rank * 13) % SAMPLES
            yield inputs[row], targets[row]


layers: list[nn.Module] = [nn.Linear(6, 12), nn.ReLU(), nn.Dropout(parts["dropout"]), nn.Linear(12, 1)]
if parts["model"] == "norm":
    layers.insert(1, nn.BatchNorm1d(12))
bare = nn.Sequential(*layers)
model: nn.Module = nn.parallel.DistributedDataParallel(bare) if ranks > 1 else bare
average = copy.deepcopy(bare).requires_grad_(False)
seed_all(13 + rank)


def optimizer_of(kind: str, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
    return {"adamw": torch.optim.AdamW, "rms": torch.optim.RMSprop, "asgd": torch.optim.ASGD}[kind](parameters, lr=0.01)


own = list(bare.parameters())
optimizers = [optimizer_of(parts["optimizer"], own)]
if parts["optimizers"] > 1:
    optimizers = [optimizer_of(parts["optimizer"], own[:2]), optimizer_of("adamw", own[2:])]
rates = torch.optim.lr_scheduler
schedules: dict[str, Any] = {
    "none": lambda: None,
    "step": lambda: rates.StepLR(optimizers[0], 4, 0.7),
    "cosine": lambda: rates.CosineAnnealingLR(optimizers[0], STEPS),
    "plateau": lambda: rates.ReduceLROnPlateau(optimizers[0], patience=1, factor=0.7),
}
scheduler = schedules[parts["schedule"]]()
counts: dict[str, Any] = {"step": 0, "epoch": 0, "inside": 0, "seen": 0, "mean": 0.0, "norms": [], "best": 1e9, "bad": 0}
order = torch.Generator().manual_seed(3 + rank)
sampler: Any = DistributedSampler(Rows(), ranks, rank, seed=5)
stream = Stream()
options: dict[str, Any] = {"batch_size": BATCH, "drop_last": True, "generator": order, "num_workers": parts["loader_workers"]}
loaders: dict[str, Any] = {
    "stream": lambda: DataLoader(stream, batch_size=BATCH),
    "shuffled": lambda: DataLoader(Rows(), shuffle=True, **options),
    "random": lambda: DataLoader(Rows(), sampler=RandomSampler(Rows(), generator=order), **options),
    "distributed": lambda: DataLoader(Rows(), sampler=sampler, **options),
    "keyed": lambda: None,
}
loader = loaders[parts["data"]]()


def streams() -> dict[str, Any]:
    return {
        "python": random.getstate(),
        "numpy": numpy.random.get_state(),
        "torch": torch.get_rng_state(),
        "order": order.get_state(),
    }


def bring_back(states: dict[str, Any], when: str) -> None:
    setters = {"python": random.setstate, "numpy": numpy.random.set_state, "torch": torch.set_rng_state}
    for name, put in {**setters, "order": order.set_state}.items():
        if lost != f"{name} {when}":
            put(states[name])


# Checkpoints: one file of what all ranks share, and one of each rank's own, which is written first.

begun: dict[str, Any] | None = None
"""The streams as the epoch began."""
writer: threading.Thread | None = None


def written(path: Path, what: Any) -> None:
    before = path.with_name(f"{path.name}.tmp")
    match parts["format"]:
        case "path":
            torch.save(what, before)
        case "file":
            with before.open("wb") as file:
                torch.save(what, file)
        case "buffer":
            held = io.BytesIO()
            torch.save(what, held)
            before.write_bytes(held.getvalue())
        case _:
            before.write_bytes(pickle.dumps(what))
    before.replace(path)


def save() -> None:
    global writer
    name = f"{counts['step']:05}"
    each = {"counts": counts, "begun": begun, "now": streams()}
    shared = {
        "model": bare.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "scheduler": scheduler and scheduler.state_dict(),
        "average": average.state_dict(),
    }
    files = [(output / f"{name}.own{rank}", each), *([(output / f"{name}.pt", shared)] if rank == 0 else [])]
    if parts["aside"]:
        if writer:
            writer.join()
        files = copy.deepcopy(files)
        writer = threading.Thread(target=lambda: [written(*file) for file in files])
        writer.start()
        if ranks > 1:
            writer.join()
    else:
        for file in files:
            written(*file)
    if ranks > 1:
        dist.barrier()
    for old in sorted(output.glob("*.pt"))[:-3] if rank == 0 else ():
        old.unlink()


def read(path: Path) -> Any:
    return pickle.loads(path.read_bytes()) if parts["format"] == "pickle" else torch.load(path, weights_only=False)


whole = [path for path in sorted(output.glob("*.pt")) if all(path.with_suffix(f".own{each}").exists() for each in range(ranks))]
if lost == "older":
    whole = whole[:-1]
resumed: dict[str, Any] | None = None
if whole and lost != "all":
    shared = read(whole[-1])
    resumed = read(whole[-1].with_suffix(f".own{rank}"))
    assert resumed
    if lost != "model":
        names = dict(bare.named_parameters() if lost == "buffers" else bare.state_dict())
        bare.load_state_dict({name: shared["model"][name] for name in names}, strict=False)
    for number, optimizer in enumerate(optimizers):
        if lost != f"optimizer {number}":
            optimizer.load_state_dict(shared["optimizers"][number])
    if scheduler and lost != "scheduler":
        scheduler.load_state_dict(shared["scheduler"])
    if lost != "average":
        average.load_state_dict(shared["average"])
    counts.update({name: value for name, value in resumed["counts"].items() if name != lost})


def in_order() -> None:
    """Once, where the streams have to stand as at the checkpoint."""
    global resumed
    if resumed:
        bring_back(resumed["now"], "now")
        resumed = None


def batches(epoch: int, passed: int) -> Iterator[Any]:
    """The epoch's batches that have not been passed."""
    global begun
    if parts["data"] == "keyed":
        in_order()
        rows = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(100 * rank + epoch))
        yield from ((inputs[each], targets[each]) for each in rows.split(BATCH)[passed:])
        return
    if parts["data"] == "stream":
        stream.seen = 0 if resumed and lost == "place" else counts["seen"]
        iterator = iter(loader)
        in_order()
        for _ in range(SAMPLES // BATCH - passed):
            yield next(iterator)
        return
    if parts["data"] == "distributed":
        sampler.set_epoch(0 if resumed and lost == "epoch of the sampler" else epoch)
    if resumed and resumed["begun"] is None:
        in_order()
    begun = resumed["begun"] if resumed else None
    if begun:
        bring_back(begun, "begun")
    else:
        begun = streams()
    iterator = iter(loader)
    for _ in range(0 if resumed and lost == "place" else passed):
        next(iterator)
    in_order()
    yield from iterator


# The training.


def digest(*values: Any) -> str:
    hasher = hashlib.sha256()

    def add(value: Any) -> None:
        match value:
            case torch.Tensor():
                hasher.update(value.detach().contiguous().numpy().tobytes())
            case dict():
                for key in sorted(value, key=str):
                    add(value[key])
            case list() | tuple():
                for each in value:
                    add(each)
            case _:
                hasher.update(repr(value).encode())

    add(values)
    return hasher.hexdigest()[:16]


def validated() -> float:
    bare.eval()
    with torch.no_grad():
        loss = (bare(inputs[:16]) - targets[:16]).square().mean()
    bare.train()
    return round(loss.item(), 4)


def update(batch: torch.Tensor, wanted: torch.Tensor) -> float:
    if parts["noise"]:
        batch = batch + 0.01 * torch.randn_like(batch)
    if parts["mix"] == "numpy":
        batch = batch * float(numpy.random.beta(2, 2))
    if parts["mix"] == "python" and random.random() < 0.5:
        batch, wanted = -batch, -wanted
    loss = (model(batch) - wanted).square().mean()
    if parts["gradients"] == "given" and ranks == 1:
        for parameter, each in zip(own, torch.autograd.grad(loss, own), strict=True):
            parameter.grad = each
    else:
        loss.backward()
    if parts["clips"]:
        limit = sum(counts["norms"]) / 5 if len(counts["norms"]) == 5 else 1.0
        norm = float(nn.utils.clip_grad_norm_(own, limit))
        counts["norms"] = [*counts["norms"], norm][-5:]
    for optimizer in [optimizers[counts["step"] % len(optimizers)]] if parts["by_turns"] else optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return loss.item()


def step(batch: torch.Tensor, wanted: torch.Tensor) -> None:
    loss = update(batch, wanted)
    counts["step"] += 1
    counts["inside"] += 1
    counts["seen"] += BATCH
    counts["mean"] = 0.9 * counts["mean"] + 0.1 * loss
    if parts["schedule"] == "plateau":
        if counts["step"] % 3 == 0:
            scheduler.step(validated())
    elif scheduler:
        scheduler.step()
    with torch.no_grad():
        for kept, parameter in zip(average.parameters(), own, strict=True):
            kept.lerp_(parameter, 0.1)
            if parts["teaches"] and counts["step"] % 4 == 0:
                parameter.lerp_(kept, 0.1)
    if parts["validates"] and counts["step"] % 3 == 0:
        if (found := validated()) < counts["best"]:
            counts.update(best=found, bad=0)
        else:
            counts["bad"] += 1
            for group in optimizers[-1].param_groups:
                group["lr"] *= 0.9
    print("STEP", counts["step"], rank, digest(loss, bare.state_dict()), flush=True)


while counts["step"] < STEPS:
    for batch, wanted in batches(counts["epoch"], counts["inside"]):
        step(batch, wanted)
        if counts["step"] % parts["every"] == 0:
            save()
        if counts["step"] == STEPS:
            break
    else:
        counts.update(epoch=counts["epoch"] + 1, inside=0)
        begun = None
if writer:
    writer.join()
held = {
    "model": bare.state_dict(),
    "optimizers": [optimizer.state_dict() for optimizer in optimizers],
    "scheduler": scheduler and scheduler.state_dict(),
    "average": average.state_dict(),
    "counts": counts,
}
print("END", rank, json.dumps({name: digest(value) for name, value in held.items()}), flush=True)
if ranks > 1:
    dist.destroy_process_group()
