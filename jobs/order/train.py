"""Ten samples, shuffled: which rank sees which of them when, printed at the end. The task itself (twice the number) is trivial.

An ordinary accelerate script: `python train.py`, `torchrun --nproc_per_node 2 train.py`, `chaosrun submit job.yaml`.
"""

import argparse
from collections import defaultdict

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from torch.utils.data import DataLoader, Dataset

import chaosrun


class Numbers(Dataset[int]):
    def __init__(self, count: int) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> int:
        return index


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(),
        dataloader_config=chaosrun.dataloader_configuration(data_seed=args.data_seed),
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    set_seed(args.seed)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)

    # Again: the order of the samples is to follow from the seed alone, whatever the model drew.
    set_seed(args.seed)
    loader = DataLoader(Numbers(args.samples), batch_size=1, shuffle=True, num_workers=args.loader_workers)
    loader = accelerator.prepare(loader)

    seen: dict[int, list[int]] = defaultdict(list)
    run = chaosrun.attach(accelerator)
    for numbers in run.batches(loader, epochs=args.epochs):
        inputs = numbers.float().unsqueeze(1) / args.samples
        loss = torch.nn.functional.mse_loss(model(inputs), 2 * inputs)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen[run.epoch].extend(numbers.tolist())
        run.step(loss)

    for rank, epochs in enumerate(gather_object([dict(seen)])):
        for epoch, samples in epochs.items():
            accelerator.print(f"rank {rank} epoch {epoch + 1}: {samples}")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print the order in which ten samples are seen.")
    parser.add_argument("--seed", type=int, default=42)
    parser.add_argument("--data-seed", type=int, help="seed of the seedable order, if not that of the job")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
