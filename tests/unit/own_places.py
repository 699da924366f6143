"""A training, and places beside its checkpoint in which a script may keep something: how each is changed. For
`test_observe_own`, which runs it as a process of its own."""

import decimal
import gc
import json
import locale
import logging
import os
import random
import signal
import smtplib
import sys
import types
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

from chaosrun.observe.own import Surroundings
from chaosrun.observe.state import ObservedState

os.environ["OF_BEFORE"] = "1"
before = Surroundings.now()
accelerator = Accelerator(cpu=True)
__hidden = 0


class Collate:
    def __init__(self) -> None:
        self.calls = [0]

    def __call__(self, samples: list[Any]) -> torch.Tensor:
        return torch.stack([sample[0] for sample in samples])


def loader_that_nobody_else_knows() -> DataLoader[Any]:
    data = TensorDataset(torch.arange(64.0).reshape(16, 4))
    return DataLoader(data, batch_size=4, sampler=WeightedRandomSampler([1.0] * 16, 16), collate_fn=Collate())


model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3)
prepared: list[Any] = list(accelerator.prepare(model, optimizer, loader_that_nobody_else_knows(), scheduler))
model, optimizer, loader, scheduler = prepared
state = ObservedState(accelerator)
registered = torch.nn.BatchNorm1d(2)
registered.register_buffer("unsaved", torch.zeros(2), persistent=False)
state.registered["norm"] = registered


def on(place: Any, name: str = "calls_so_far") -> Callable[[], None]:
    setattr(place, name, 0)
    return lambda: setattr(place, name, 1)


def a_global_like_a_private_one() -> None:
    global __hidden
    __hidden += 1


class Waiting:
    def __await__(self) -> Any:
        yield


def suspend() -> None:
    async def counting() -> None:
        count = random.random()
        await Waiting()
        print(count)

    coroutine = counting()
    coroutine.send(None)
    setattr(json, "waiting", coroutine)  # noqa: B010 (kept by a library, and nowhere else)


def open_at_random() -> Callable[[], Any]:
    descriptor = os.open(__file__, os.O_RDONLY)
    return lambda: os.lseek(descriptor, 8, os.SEEK_SET)


def flip_mkldnn() -> None:
    torch.backends.mkldnn.enabled = not torch.backends.mkldnn.enabled  # pyright: ignore[reportAttributeAccessIssue]


def pipe() -> Callable[[], Any]:
    reading, writing = os.pipe()
    json.pipe = reading, writing  # pyright: ignore[reportAttributeAccessIssue]
    return lambda: os.write(writing, b"xy")


def bump(place: Any, key: Any) -> None:
    place[key] += 1


sys.modules["settings"] = types.ModuleType("settings")
vars(sys.modules["settings"]).update(level=0)
PLACES: dict[str, Callable[[], Callable[[], Any]]] = {
    "nothing": lambda: lambda: None,
    "private global": lambda: a_global_like_a_private_one,
    "accelerator": lambda: on(accelerator),
    "prepared optimizer": lambda: on(optimizer),
    "prepared scheduler": lambda: on(scheduler),
    "prepared loader": lambda: on(loader),
    "optimizer's defaults": lambda: lambda: bump(optimizer.optimizer.defaults, "lr"),
    "dataset of the loader": lambda: on(loader.dataset),
    "labels of the dataset": lambda: lambda: bump(loader.dataset.tensors[0], 3),
    "weights of the sampler": lambda: lambda: bump(loader.batch_sampler.sampler.weights, 3),
    "collate function": lambda: lambda: bump(loader.collate_fn.calls, 0),
    "buffer's attribute": lambda: on(model[1].running_mean),
    "buffer that nobody saves": lambda: lambda: bump(registered.unsaved, 0),
    "frozen parameter": lambda: lambda: model[2].bias.requires_grad_(False),
    "strides": lambda: lambda: setattr(model[0].weight, "data", model[0].weight.data.t().contiguous().t()),
    "gradient": lambda: lambda: setattr(model[0].weight, "grad", torch.ones(4, 4)),
    "module of a library": lambda: on(torch.nn.functional),
    "another module of a library": lambda: on(json),
    "module made by hand": lambda: lambda: bump(vars(sys.modules["settings"]), "level"),
    "class of a library": lambda: on(torch.nn.Linear),
    "flag of a class of a library": lambda: lambda: setattr(torch.nn.Linear, "is_late", True),
    "setting of a library's module": lambda: lambda: bump(vars(smtplib), "SMTP_PORT"),
    "setting of NNPACK": lambda: lambda: torch.backends.nnpack.set_flags(False),  # pyright: ignore[reportAttributeAccessIssue]
    "arguments": lambda: lambda: sys.argv.append("x"),
    "environment": lambda: lambda: os.environ.update(OF_THE_SCRIPT="1"),
    "folder": lambda: lambda: os.chdir("/"),
    "place in a file": open_at_random,
    "setting of a library": lambda: flip_mkldnn,
    "variable of a library": lambda: lambda: setattr(torch.nn.functional, "relu", torch.tanh),
    "variable taken from the environment": lambda: lambda: os.environ.pop("OF_BEFORE"),
    "native environment": lambda: lambda: os.putenv("OF_NATIVE_CODE", "1"),
    "path of modules": lambda: lambda: sys.path.insert(0, "/later"),
    "type of autocast": lambda: lambda: torch.set_autocast_dtype("cpu", torch.float16),
    "setting of a backend": lambda: lambda: setattr(torch.backends.mkldnn, "deterministic", True),
    "traps of decimals": lambda: lambda: bump(decimal.getcontext().traps, decimal.Inexact),
    "errors of numpy": lambda: lambda: numpy.seterrcall(print),  # pyright: ignore[reportArgumentType]
    "hook of all modules": lambda: lambda: torch.nn.modules.module.register_module_forward_hook(print),
    "handler of a signal": lambda: lambda: signal.signal(signal.SIGUSR1, print),
    "filters of warnings": lambda: lambda: warnings.simplefilter("error"),
    "level of a logger": lambda: lambda: logging.getLogger("of the script").setLevel(10),
    "mask of new files": lambda: lambda: os.umask(0o27),
    "depth of calls": lambda: lambda: sys.setrecursionlimit(4000),
    "locale": lambda: lambda: locale.setlocale(locale.LC_ALL, "C.UTF-8"),
    "precision of decimals": lambda: lambda: setattr(decimal.getcontext(), "prec", 7),
    "nothing at last": lambda: lambda: None,
    "data in a pipe": pipe,
    "file in memory": lambda: lambda: os.memfd_create("of-the-script"),
    "suspended coroutine": lambda: suspend,
    "frozen garbage": lambda: gc.freeze,
}
