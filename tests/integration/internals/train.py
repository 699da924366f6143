"""A small training over any loader that accelerate prepares: sharding or dispatching, in whole or split batches, with a short
last batch or without, from samplers and streams of all kinds. For test_internals.

`--stock NAME` leaves one thing to accelerate that chaosrun does itself, in attempts that restore a checkpoint: its control.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs, set_seed
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, TensorDataset
from torch.utils.data.datapipes.iter import IterableWrapper

import chaosrun
from chaosrun.protocol import resume
from chaosrun.protocol.context import current
from chaosrun.protocol.randomness import enter_epoch, loader_generator

SEED = 3
EPOCHS = 3
STEPS = 4
"""In an epoch, at any number of workers."""
OVERFLOW_AFTER = (3, 6)
"""Steps, the latter the one that is restored."""
BATCH = 2
SPLIT_BATCH = 6
"""Divides into equal shares for 1, 2 and 3 workers."""


def main() -> None:
    args = parse_arguments()
    under = current()
    if args.stock and under is not None and under.order.resume is not None:
        STOCK[args.stock]()

    accelerator = Accelerator(
        cpu=args.precision != "fp16",
        mixed_precision=args.precision if args.precision in ("bf16", "fp16") else "no",
        rng_types=args.rng_types,
        kwargs_handlers=[GradScalerKwargs(growth_interval=3)] if args.precision == "fp16" else [],
        dataloader_config=DataLoaderConfiguration(
            dispatch_batches=args.loader == "dispatcher",
            split_batches=args.split,
            even_batches=args.ending not in ("uneven", "short"),
            use_seedable_sampler=args.source in ("shuffle", "augmented"),
            data_seed=SEED,
        ),
    )
    if args.precision == "scaler":
        # The real one, on the CPU: it grows every other step, and shrinks where a gradient overflows.
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    set_seed(SEED)
    model: Any = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    scheduler: Any = (
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.9, patience=2)
        if args.scheduler == "plateau"
        else torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: 1 / (1 + call))
    )
    loader: Any = make_loader(args, accelerator.num_processes)
    scheduler, loader = accelerator.prepare(scheduler, loader)

    run = chaosrun.attach(accelerator)
    metric = Metric()
    run.register("metric", metric)
    for batch in run.batches(loader, epochs=EPOCHS):
        samples = batch[0] if isinstance(batch, list | tuple) else batch
        # Every rank draws another number of numbers.
        noise = torch.rand(1 + accelerator.process_index, device=samples.device).sum() / 100
        loss = (model(samples + noise) - samples).square().mean()
        if args.precision == "scaler" and run.position.step in OVERFLOW_AFTER:
            loss = loss * float("inf")
        accelerator.backward(loss)
        optimizer.step()
        if args.scheduler == "plateau":
            scheduler.step(sum(accelerator.gather_for_metrics([loss.item()])))
        else:
            scheduler.step()
        optimizer.zero_grad()
        run.step(loss)
        # Without what fills up the last batch, if accelerate knows how much that is.
        gathered: Any = accelerator.gather_for_metrics(samples.flatten().tolist())
        metric.add(gathered)
    accelerator.end_training()


def make_loader(args: argparse.Namespace, workers: int) -> DataLoader[Any]:
    size = SPLIT_BATCH if args.split else BATCH
    together = SPLIT_BATCH if args.split else BATCH * workers
    short = (STEPS - 1) * together + 1
    samples = {"even": short, "short": short, "drop": STEPS * together + 1, "uneven": STEPS * together}[args.ending]
    values = torch.linspace(-1, 1, samples).unsqueeze(1)
    data = TensorDataset(values)
    drop = args.ending == "drop"
    options: dict[str, Any] = {"num_workers": args.loader_workers, "persistent_workers": args.persistent}
    match args.source:
        case "shuffle":
            return DataLoader(data, batch_size=size, shuffle=True, drop_last=drop, **options)
        case "sampler":
            return DataLoader(data, batch_size=size, sampler=EpochSampler(samples), drop_last=drop, **options)
        case "batches":
            return DataLoader(data, batch_sampler=EpochBatches(samples, size, drop), **options)
        case "strided":
            return DataLoader(data, batch_sampler=StridedBatches(samples, size, drop), **options)
        case "nested":
            batches = BatchSampler(EpochSampler(samples), size, drop)
            return DataLoader(data, sampler=batches, batch_size=None, **options)
        case "ragged":
            return DataLoader(data, batch_sampler=RaggedBatches(samples, STEPS * workers), **options)
        case "augmented":
            return DataLoader(EpochData(values), batch_size=size, shuffle=True, drop_last=drop, **options)
        case "stream":
            return DataLoader(Stream(values), batch_size=size, drop_last=drop, **options)
        case "epoch-stream":
            return DataLoader(EpochStream(values), batch_size=size, drop_last=drop, **options)
        case "drawn-stream":
            return DataLoader(DrawnStream(values), batch_size=size, drop_last=drop, **options)
        case "buffer":
            return DataLoader(IterableWrapper(list(values)).shuffle(buffer_size=8), batch_size=size, **options)
        case "global":
            return DataLoader(data, batch_size=size, sampler=GlobalSampler(samples), drop_last=drop, **options)
    raise ValueError(args.source)


class Metric:
    """What gather_for_metrics returned, in all."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def add(self, values: list[float]) -> None:
        self.count += len(values)
        self.total += sum(values)

    def state_dict(self) -> dict[str, float]:
        return {"count": self.count, "total": self.total}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.count, self.total = int(state["count"]), state["total"]


class EpochSampler(Sampler[int]):
    """Samples in an order of the epoch, from a generator that every epoch seeds anew."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.generator = torch.Generator()

    def set_epoch(self, epoch: int) -> None:
        self.generator.manual_seed(SEED + epoch)

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.samples, generator=self.generator).tolist()

    def __len__(self) -> int:
        return self.samples


class GlobalSampler(EpochSampler):
    """Draws its order from the global stream."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def set_epoch(self, epoch: int) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(self.samples).tolist()


class StridedBatches(BatchSampler):
    """Batches without any randomness: every n-th sample."""

    def __init__(self, samples: int, batch_size: int, drop_last: bool) -> None:
        self.samples, self.batch_size, self.drop_last = samples, batch_size, drop_last

    def order(self) -> list[int]:
        return [start + index for start in range(3) for index in range(0, self.samples - start, 3)]

    def __iter__(self) -> Iterator[list[int]]:
        order = self.order()
        for number in range(len(self)):
            yield order[number * self.batch_size : (number + 1) * self.batch_size]

    def __len__(self) -> int:
        return self.samples // self.batch_size if self.drop_last else -(-self.samples // self.batch_size)


class EpochBatches(StridedBatches):
    """Batches in an order of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(SEED + self.epoch)).tolist()


class RaggedBatches(Sampler[list[int]]):
    """So many batches of one, two and three samples, in an order of the epoch; without a batch size."""

    epoch = 0

    def __init__(self, samples: int, batches: int) -> None:
        self.samples, self.batches = samples, batches

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        for number in range(self.batches):
            yield [(self.epoch + 3 * number + offset) % self.samples for offset in range(1 + number % 3)]

    def __len__(self) -> int:
        return self.batches


class EpochData(Dataset[torch.Tensor]):
    """A map dataset whose samples change from epoch to epoch."""

    epoch = 0

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.values[index] + self.epoch

    def __len__(self) -> int:
        return len(self.values)


class Stream(IterableDataset[torch.Tensor]):
    """Samples in a fixed order."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def __iter__(self) -> Iterator[torch.Tensor]:
        worker = torch.utils.data.get_worker_info()
        yield from self.values[self.order()][worker.id if worker else 0 :: worker.num_workers if worker else 1]

    def order(self) -> torch.Tensor:
        return torch.arange(len(self.values))


class EpochStream(Stream):
    """Samples in an order of the epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> torch.Tensor:
        return torch.randperm(len(self.values), generator=torch.Generator().manual_seed(SEED + self.epoch))


class DrawnStream(Stream):
    """Samples in an order drawn from the dataset's generator, which accelerate's convention has seeded by the epoch."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(values)
        self.generator = torch.Generator().manual_seed(SEED)

    def order(self) -> torch.Tensor:
        return torch.randperm(len(self.values), generator=self.generator)


def skip_as_accelerate_does() -> None:
    """A second loader for the rest of the epoch, told the epoch before and after."""
    stock_skip(lambda loader, batches: batches, before=True)


def skip_without_telling_the_first() -> None:
    stock_skip(lambda loader, batches: batches, before=False)


def skip_as_many_as_dispatched() -> None:
    """The right number for a dispatcher of whole batches, whose last batch is then filled up with the wrong first one."""
    stock_skip(lambda loader, batches: batches * loader.state.num_processes, before=True)


def stock_skip(count: Any, before: bool) -> None:
    def open_epoch(accelerator: Any, loader: Any, *, epoch: int, batches_done: int, seed: int, ledger: Any) -> Any:
        if before or not batches_done:
            loader.set_epoch(epoch)
        rest = accelerator.skip_first_batches(loader, count(loader, batches_done)) if batches_done else loader
        rest.set_epoch(epoch)
        enter_epoch(seed, epoch)
        rest.base_dataloader.generator = loader_generator(seed, epoch, accelerator.process_index)
        ledger.watch(rest)
        return rest

    resume.open_epoch = open_epoch


def tell_the_epoch_as_accelerate_does() -> None:
    resume.set_epoch = lambda loader, epoch: loader.set_epoch(epoch)


def leave_the_random_streams_to_the_iterator() -> None:
    resume._with_its_randomness = lambda loader, device, read_before: iter(loader)


STOCK = {
    "skip": skip_as_accelerate_does,
    "skip-then-epoch": skip_without_telling_the_first,
    "skip-dispatched": skip_as_many_as_dispatched,
    "epoch": tell_the_epoch_as_accelerate_does,
    "rng": leave_the_random_streams_to_the_iterator,
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--loader", choices=["shard", "dispatcher"], default="shard")
    parser.add_argument("--split", action="store_true", help="split_batches")
    parser.add_argument("--ending", choices=["even", "drop", "uneven", "short"], default="even")
    parser.add_argument("--source", default="shuffle")
    parser.add_argument("--rng-types", nargs="*", choices=["torch", "cuda", "generator"])
    parser.add_argument("--precision", choices=["no", "bf16", "fp16", "scaler"], default="no")
    parser.add_argument("--scheduler", choices=["lambda", "plateau"], default="lambda")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--stock", choices=[*STOCK])
    return parser.parse_args()


if __name__ == "__main__":
    main()
