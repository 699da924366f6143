"""A training that keeps a count of its steps where no checkpoint holds it, `--hides WHERE`, and reads it once, late.

A restart begins the count anew: up to step LATE every digest agrees with the undisturbed run's, and then the training parts
from it. An early verdict before that would be wrong.
"""

import argparse
import ctypes
import functools
import itertools
import os
import subprocess
import sys
import threading
import types
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, Dataset

import chaosrun

LATE = 13
SPOILT_TO = 7
count = 0


class Samples(Dataset[torch.Tensor]):
    seen = 0
    counts = False

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        self.seen += self.counts
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


class Passing:
    """State of rank 0 that is another one for some steps after a restart, and that nothing reads."""

    value = 0

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


class Holder:
    total = 0

    def __init__(self) -> None:
        self.own = 0


def in_a_global() -> int:
    global count
    count += 1
    return count


def in_a_closure() -> Callable[[], int]:
    total = 0

    def more() -> int:
        nonlocal total
        total += 1
        return total

    return more


def in_a_default(kept: list[int] = []) -> int:  # noqa: B006
    kept.append(0)
    return len(kept)


def in_a_generator() -> Iterator[int]:
    total = 0
    while True:
        total += 1
        yield total


def in_an_attribute(where: Any, name: str = "own") -> Callable[[], int]:
    def more() -> int:
        setattr(where, name, getattr(where, name, 0) + 1)
        return getattr(where, name)

    return more


def in_the_environment() -> int:
    os.environ["HIDDEN"] = str(int(os.environ.get("HIDDEN", 0)) + 1)
    return int(os.environ["HIDDEN"])


def in_a_file(flags: str) -> Callable[[], int]:
    """Of this attempt's own, or it would be no count that a restart begins anew."""
    path = Path(os.environ["CHAOSRUN_OUTPUT"]) / f"count-{os.environ['CHAOSRUN_ATTEMPT']}-{os.environ.get('RANK', 0)}"

    def more() -> int:
        with path.open(flags) as file:
            file.write("x")
        return path.stat().st_size

    return more


def in_a_thread() -> Callable[[], int]:
    """The thread's own variable."""
    asked, told = threading.Semaphore(0), list[int]()
    done = threading.Semaphore(0)

    def run() -> None:
        total = 0
        while True:
            asked.acquire()
            total += 1
            told[:] = [total]
            done.release()

    threading.Thread(target=run, daemon=True).start()

    def more() -> int:
        asked.release()
        done.acquire()
        return told[0]

    return more


def in_a_process() -> Callable[[], int]:
    program = "import sys\nfor number, _ in enumerate(sys.stdin, 1): print(number, flush=True)"
    child = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin and child.stdout
    asked, told = child.stdin, child.stdout

    def more() -> int:
        print(file=asked, flush=True)
        return int(told.readline())

    return more


@functools.cache
def remembered(step: int) -> int:
    return step


def in_a_cache(step: Callable[[], int]) -> int:
    remembered(step())
    return remembered.cache_info().currsize


def in_native_code() -> int:
    """One of its numbers a step: which one comes tells how many came before."""
    return ctypes.CDLL(None).rand() % 97


def in_an_order(kept: deque[Any]) -> Callable[[], int]:
    """Which of several things that a checkpoint knows comes first."""
    first = kept[0]

    def more() -> int:
        kept.rotate(1)
        return next(number for number, each in enumerate(kept) if each is first)

    return more


def in_bytes(kept: bytearray) -> int:
    kept.append(0)
    return len(kept)


def in_a_semaphore(kept: threading.Semaphore) -> int:
    kept.release()
    return kept._value


def in_a_tensor(tensor: torch.Tensor) -> int:
    tensor += 1
    return int(tensor.sum()) // tensor.numel()


def counters(accelerator: Accelerator, wrapped: Any, prepared: Any, data: Samples, step: Callable[[], int]) -> dict[str, Any]:
    model, optimizer = accelerator.unwrap_model(wrapped), prepared.optimizer
    numbers, hooked = itertools.count(1), Holder()
    generator = in_a_generator()
    hook_count = in_a_closure()

    def hook(*_: Any) -> None:
        hooked_by_library[0] = hook_count()

    hooked_by_library = [0]
    return {
        "global": lambda: in_a_global,
        "closure": in_a_closure,
        "default": lambda: in_a_default,
        "generator": lambda: lambda: next(generator),
        "iterator": lambda: lambda: next(numbers),
        "object": lambda: in_an_attribute(hooked),
        "class": lambda: in_an_attribute(Holder, "total"),
        "function": lambda: in_an_attribute(in_a_closure, "calls"),
        "module": lambda: in_an_attribute(model, "calls"),
        "dataset": lambda: lambda: data.seen // 4,
        "library": lambda: in_an_attribute(torch, "hidden_count"),
        "environment": lambda: in_the_environment,
        "file": lambda: in_a_file("a"),
        "thread": in_a_thread,
        "process": in_a_process,
        "cache": lambda: functools.partial(in_a_cache, step),
        "tensor": lambda: functools.partial(in_a_tensor, torch.zeros(3)),
        "array": lambda: functools.partial(in_an_array, numpy.zeros(3)),
        "hook": lambda: (optimizer.register_step_post_hook(hook), lambda: hooked_by_library[0])[1],
        "wrapper": lambda: in_an_attribute(wrapped, "calls_so_far"),
        "prepared": lambda: in_an_attribute(prepared, "calls_so_far"),
        "accelerator": lambda: in_an_attribute(accelerator, "calls_so_far"),
        "namespace": lambda: in_an_attribute(types.SimpleNamespace()),
        "order": lambda: in_an_order(deque([*model.parameters(), *model.parameters(), *range(20)])),
        "bound": lambda: iter(range(1, 99)).__next__,
        "bytes": lambda: functools.partial(in_bytes, bytearray()),
        "semaphore": lambda: functools.partial(in_a_semaphore, threading.Semaphore(0)),
        "native code": lambda: in_native_code,
        "nothing": lambda: step,
    }


def in_an_array(array: numpy.ndarray) -> int:
    array += 1
    return int(array[0])


WHERE = (
    *("global", "closure", "default", "generator", "iterator", "object", "class", "function", "module", "dataset", "library"),
    *("environment", "file", "thread", "process", "cache", "tensor", "array", "hook", "stack", "workers"),
    *("wrapper", "prepared", "accelerator", "namespace", "order", "bound", "bytes", "semaphore"),
)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--hides", choices=(*WHERE, "native code", "nothing"), default="nothing")
    parser.add_argument("--spoils", choices=("weights", "passing"), help="What is wrong after a restart, for all to see.")
    args = parser.parse_args()
    hides, spoilt = args.hides, args.spoils if os.environ["CHAOSRUN_ATTEMPT"] != "1" else None
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1))
    set_seed(1)
    data = Samples()
    data.counts = hides == "dataset"
    loader = DataLoader(data, batch_size=4, shuffle=True, num_workers=2 if hides == "workers" else 0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    run = chaosrun.attach(accelerator)
    run.register("passing", passing := Passing())
    known = counters(accelerator, model, optimizer, data, lambda: run.position.step + 1)
    if hides == "stack":
        for batch, number in zip(run.batches(loader, epochs=3), itertools.count(1), strict=False):
            train(accelerator, model, optimizer, run, batch, lambda number=number: number)
        return
    more = known["nothing" if hides == "workers" else hides]()
    for batch in run.batches(loader, epochs=3):
        passing.value = int(spoilt == "passing" and run.position.step < SPOILT_TO)
        if spoilt == "weights":
            accelerator.unwrap_model(model).bias.data += 1e-3
        train(accelerator, model, optimizer, run, batch, more)


def train(accelerator: Any, model: Any, optimizer: Any, run: Any, batch: torch.Tensor, more: Callable[[], int]) -> None:
    """One step; at step LATE its loss depends on the count."""
    counted, step = more(), run.position.step + 1
    loss = model(batch).square().mean()
    if step == LATE:
        loss = loss * (1 + counted)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    run.step(loss)


if __name__ == "__main__":
    main()
