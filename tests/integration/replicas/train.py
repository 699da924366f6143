"""A small accelerate training under DDP, for test_ddp_pitfalls: each flag is one way of wrapping, building or breaking it."""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs, set_seed
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.protocol import context
from chaosrun.protocol.bucket_priming import BucketPrimer

SAMPLES = 83
SEED = 5
WIDTH = 40


class Net(nn.Module):
    """Batch statistics of each rank's own, a block used twice, one that nobody uses, an output tied to the input."""

    def __init__(self, *, shared: bool, unused: bool) -> None:
        super().__init__()
        self.shared = shared
        self.encode = nn.Linear(16, WIDTH, bias=False)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.block = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(3, 3) if unused else None
        self.decode = nn.Linear(WIDTH, 4)

    def forward(self, features: Tensor) -> Tensor:
        hidden = torch.relu(self.norm(self.encode(features)))
        for _ in range(2 if self.shared else 1):
            # Reentrant: each has a backward pass of its own, in which the shared block's gradient arrives once more.
            hidden = checkpoint(lambda value: torch.tanh(self.block(value)), hidden, use_reentrant=True)
        return self.decode(hidden + nn.functional.linear(features, self.encode.weight))


def main() -> None:
    args = parse_arguments()
    under = context.current()
    restored = under is not None and under.order.resume is not None
    if args.unprimed and restored:
        BucketPrimer.done = property(lambda self: True)  # pyright: ignore[reportAttributeAccessIssue]
    ddp = DistributedDataParallelKwargs(
        broadcast_buffers=args.broadcast_buffers,
        static_graph=args.static_graph,
        gradient_as_bucket_view=args.bucket_view,
        bucket_cap_mb=1e-6 if args.break_with == "bucket-cap" and restored else 25,  # pyright: ignore[reportArgumentType]
        comm_hook=DDPCommunicationHookType(args.comm_hook),
    )
    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=args.accumulation,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=SEED),
        kwargs_handlers=[ddp],
    )
    set_seed(SEED)
    data = TensorDataset(torch.randn(SAMPLES, 16), torch.randint(4, (SAMPLES,)))
    model = Net(shared=args.static_graph, unused=args.static_graph)
    if args.break_with == "frozen" and restored:
        model.decode.bias.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4, shuffle=True))
    bare = accelerator.unwrap_model(model)
    last = accelerator.is_last_process
    if args.break_with == "start" and last:
        nudge(bare.norm.weight)
    if args.break_with == "hook":
        bare.block.weight.register_post_accumulate_grad_hook(lambda parameter: None)

    run = chaosrun.attach(accelerator)
    for features, classes in run.batches(loader, epochs=2):
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(features), classes)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if args.break_with == "once" and under and (under.order.leg, under.order.attempt) == ("chaos", 2):
            raise RuntimeError("Expected to mark a variable ready only once. A complaint that does not come again.")
        if args.break_with == "replica" and last and run.position.step == 4:
            nudge(bare.block.bias)
        run.step(loss)


@torch.no_grad()
def nudge(parameter: Tensor) -> None:
    parameter.view(-1)[0].mul_(1 + 2**-20)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--static-graph", action="store_true")
    parser.add_argument("--bucket-view", action="store_true")
    parser.add_argument("--no-broadcast-buffers", dest="broadcast_buffers", action="store_false")
    parser.add_argument("--comm-hook", default="no")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--unprimed", action="store_true")
    parser.add_argument("--break-with", choices=["start", "replica", "bucket-cap", "frozen", "hook", "once"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
