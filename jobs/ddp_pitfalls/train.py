"""Train two branches, of which each worker may use another one: what DistributedDataParallel makes of it, case by case.

An ordinary accelerate script: `torchrun --nproc_per_node 3 train.py --case unused`, `chaosrun submit job.yaml`.
"""

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs, set_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

import chaosrun

FEATURES = 24
CLASSES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    what: str
    one_branch: bool = False
    """Forward takes net1 on workers of even rank, net2 on the others, instead of both everywhere."""
    outside: bool = False
    """The other branch is used all the same, but not through the wrapped model's forward."""
    find_unused_parameters: bool = False
    static_graph: bool = False
    seed_by_rank: bool = False
    same_order: bool = False
    """The sampler shuffles once: no set_epoch reaches it."""


CASES = {
    "seeds-differ": Case(what="other initial weights on each worker, until DDP sends out worker 0's", seed_by_rank=True),
    "drift": Case(what="a branch by rank that DDP does not expect: gradients are not averaged", one_branch=True),
    "unused": Case(what="the same, and DDP looks for unused parameters", one_branch=True, find_unused_parameters=True),
    "ready-twice": Case(
        what="the same, and the unused branch is used outside the wrapped forward",
        one_branch=True,
        outside=True,
        find_unused_parameters=True,
    ),
    "all-used": Case(what="the same, without looking: every parameter gets its gradient", one_branch=True, outside=True),
    "static-graph": Case(what="the same, as a static graph", one_branch=True, outside=True, static_graph=True),
    "no-set-epoch": Case(what="every epoch in the order of the first", same_order=True),
}


class TwoBranches(nn.Module):
    """Features of shape (batch, FEATURES) to logits of shape (batch, CLASSES), by way of the named branches."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.2)
        self.net1 = nn.Linear(FEATURES, CLASSES, bias=False)
        self.net2 = nn.Linear(FEATURES, CLASSES, bias=False)

    def forward(self, features: Tensor, branches: tuple[str, ...]) -> Tensor:
        hidden = self.dropout(features)
        return torch.stack([getattr(self, name)(hidden) for name in branches]).sum(dim=0)


class ShuffledOnce(Sampler[int]):
    """A random order, the same in every epoch."""

    def __init__(self, samples: int, seed: int) -> None:
        self._order = torch.randperm(samples, generator=torch.Generator().manual_seed(seed)).tolist()

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)


def main() -> None:
    args = parse_arguments()
    case = CASES[args.case]
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
        kwargs_handlers=[
            DistributedDataParallelKwargs(
                find_unused_parameters=case.find_unused_parameters, static_graph=case.static_graph, bucket_cap_mb=1
            )
        ],
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    rank = accelerator.process_index
    set_seed(args.seed)
    data = TensorDataset(torch.randn(args.samples, FEATURES), torch.randint(CLASSES, (args.samples,)))
    sampler = ShuffledOnce(args.samples, args.seed) if case.same_order else None
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=sampler is None, sampler=sampler)

    if case.seed_by_rank:
        set_seed(args.seed + rank)
    model = TwoBranches()
    first_weight = model.net1.weight.flatten()[0].item()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs * math.ceil(len(loader)))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    bare = accelerator.unwrap_model(model)
    print(f"rank {rank}: net1.weight[0] {first_weight:.6f} before prepare, {bare.net1.weight.flatten()[0]:.6f} after")

    own, other = ("net1", "net2") if rank % 2 == 0 else ("net2", "net1")
    run = chaosrun.attach(accelerator)
    for features, classes in run.batches(loader, epochs=args.epochs):
        logits = model(features, (own,) if case.one_branch else (own, other))
        if case.outside:
            logits = logits + getattr(bare, other)(features)
        loss = nn.functional.cross_entropy(logits, classes)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)
        if args.print_losses:
            accelerator.print(f"step {run.position.step} loss {float(loss.detach()).hex()}")

    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a model of two branches under DistributedDataParallel.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases:\n" + "\n".join(f"  {name:<14}{case.what}" for name, case in CASES.items()),
    )
    parser.add_argument("--case", choices=CASES, default="unused")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=110)
    parser.add_argument("--batch-size", type=int, default=4, help="samples in a batch, on each worker")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--print-losses", action="store_true", help="print the exact training losses of worker 0 at every step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
