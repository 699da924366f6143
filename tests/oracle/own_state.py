"""A training script that keeps much beside weights (a loss scale, an average of its weights, BatchNorm, random streams, a
patience), in windows of two batches, under DDP and gloo; `--wrong` breaks one thing of how that is saved or brought back."""

import argparse
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--wrong", default="")
parser.add_argument("--stream", action="store_true")
args = parser.parse_args()
wrong: str = args.wrong
output = Path(os.environ["CHAOSRUN_OUTPUT"])

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(7)
inputs = torch.randn(40, 8)
data = TensorDataset(inputs, (inputs[:, :4] > 0).float())


class Stream(IterableDataset[Any]):
    """Its own share in an order of its own, shuffled through a buffer."""

    def __init__(self) -> None:
        self.read, self.buffer, self.draws = 0, list[int](), random.Random(rank)

    def __iter__(self) -> Iterator[Any]:
        while self.read < len(data) or self.buffer:
            while self.read < len(data) and len(self.buffer) < 12:
                self.buffer.append(self.read)
                self.read += 1
            yield data[self.buffer.pop(self.draws.randrange(len(self.buffer)))]
        self.read = 0


def build() -> torch.nn.Module:
    layers = [torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Tanh(), torch.nn.Dropout(0.1)]
    return torch.nn.Sequential(*layers, torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))


model = build()
named = list(model.named_parameters())
parts = [[p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim == 1]]
resumed = any(output.glob("checkpoint-*"))
if resumed and wrong == "order":
    parts[1].reverse()
if resumed and wrong == "order-alike":
    parts[1][1:3] = parts[1][2:0:-1]
optimizer = torch.optim.AdamW([{"params": parts[0], "weight_decay": 0.1}, {"params": parts[1], "weight_decay": 0.0}], lr=1e-2)
second = torch.optim.SGD([p for _, p in named if p.shape == (16, 16)], lr=1e-3, momentum=0.9)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=4)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
stream, generator = Stream(), torch.Generator().manual_seed(5 + rank)
steps = passed = epoch = patience = 0
peak = 0.0

torch.manual_seed(100 + rank)
numpy.random.seed(200 + rank)
random.seed(300 + rank)


def number(path: Path) -> int:
    return int(path.name.split("-")[1])


saved = sorted(output.glob("checkpoint-*"), key=str if wrong == "text" else number)
if saved and wrong == "one-rank" and rank == 1:
    saved.pop()
if saved:
    state: dict[str, Any] = torch.load(saved[-1] / "state.pt", weights_only=False)
    own: dict[str, Any] = torch.load(saved[-1] / f"rank-{0 if wrong == 'rng-of-rank-0' else rank}.pt", weights_only=False)
    weights = state["model"]
    if wrong == "buffers":
        weights = {name: value for name, value in weights.items() if "running" not in name and "num_batches" not in name}
    if wrong == "renamed":
        weights = {name.replace("4.weight", "4.kernel"): value for name, value in weights.items()}
    if wrong == "rounded":
        weights = {name: value.bfloat16().to(value.dtype) for name, value in weights.items()}
    model.load_state_dict(weights, strict=False)
    if wrong == "average-unsaved":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    elif wrong == "average":
        average.module.load_state_dict(state["model"])
    else:
        average.load_state_dict(state["average"])
    if wrong == "average-of-none":
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer.load_state_dict(state["optimizer"])
    if wrong == "moments-rounded":
        for kept in optimizer.state.values():
            kept["exp_avg"] = kept["exp_avg"].bfloat16().float()
    if wrong == "settings":
        optimizer.param_groups[0]["weight_decay"] = 0.0
    if wrong == "betas":
        for group in optimizer.param_groups:
            group["betas"] = (0.8, 0.999)
    if wrong != "second":
        second.load_state_dict(state["second"])
    scheduler.load_state_dict(state["scheduler"])
    if wrong == "scheduler-twice":
        scheduler.step()
    if wrong != "scaler":
        scaler.load_state_dict(state["scaler"])
    if wrong == "scaler-count":
        scaler._init_growth_tracker = 0
    steps, epoch, passed = state["steps"], state["epoch"], state["passed"]
    if wrong == "step-off":
        steps += 1
    if wrong != "peak":
        peak, patience = state["peak"], state["patience"]
    if wrong == "streams-of-rank-0":
        other: dict[str, Any] = torch.load(saved[-1] / "rank-0.pt", weights_only=False)
        own |= {name: other[name] for name in ("torch", "numpy", "python")}
    if wrong != "torch-rng":
        torch.set_rng_state(own["torch"])
    if wrong != "numpy":
        numpy.random.set_state(own["numpy"])
    if wrong != "python":
        random.setstate(own["python"])
    if wrong != "generator":
        generator.set_state(own["generator"])
    if wrong == "reseeded":
        generator.manual_seed(77)
    if wrong != "buffer":
        stream.buffer = own["buffer"]
    if wrong != "stream-draws":
        stream.draws.setstate(own["draws"])
    stream.read = own["read"]

wrapped = DistributedDataParallel(model)
criterion = torch.nn.BCEWithLogitsLoss()
began = generator.get_state()


def save() -> None:
    folder = output / f"checkpoint-{steps}"
    folder.mkdir(exist_ok=True)
    kept = {"torch": torch.get_rng_state(), "numpy": numpy.random.get_state(), "python": random.getstate()}
    kept |= {"generator": began, "buffer": list(stream.buffer), "read": stream.read, "draws": stream.draws.getstate()}
    torch.save(kept, folder / f"rank-{rank}.pt")
    dist.barrier()
    if rank == 0:
        whole = {"model": model.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
        whole |= {"second": second.state_dict(), "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}
        whole |= {"steps": steps, "epoch": epoch, "passed": passed, "peak": peak, "patience": patience}
        if wrong == "average-unsaved":
            del whole["average"]
        torch.save(whole, folder / "state.pt")
        for old in sorted(output.glob("checkpoint-*"), key=str if wrong == "keeps-by-text" else number)[:-2]:
            shutil.rmtree(old)
    dist.barrier()


while epoch < args.epochs:
    began = generator.get_state()
    source: Any = stream if args.stream else data
    sampler = None if args.stream else RandomSampler(data, generator=generator)
    loader = DataLoader(source, batch_size=4, sampler=sampler, drop_last=True, generator=torch.Generator())
    for index, (batch, targets) in enumerate(loader):
        if index < passed and not args.stream:
            continue
        batch = batch * (1 + 0.1 * float(numpy.random.rand()) + 0.1 * random.random())
        loss = criterion(wrapped(batch), targets) / 2
        scaler.scale(loss).backward()
        passed = index + 1 if not args.stream else passed + 1
        if wrong == "window" and passed % 2 and steps % 3 == 2:
            save()
        if passed % 2:
            continue
        for each in (optimizer, second):
            scaler.step(each)
        scaler.update()
        for each in (optimizer, second):
            each.zero_grad()
        scheduler.step()
        average.update_parameters(model)
        steps += 1
        patience = 0 if loss.item() > peak else patience + 1
        peak = max(peak, loss.item())
        if steps % 3 == 0 and wrong != "window":
            save()
    epoch, passed = epoch + 1, 0
dist.destroy_process_group()
