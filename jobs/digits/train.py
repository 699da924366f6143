"""Train a small convolutional network on scikit-learn's handwritten digits, with augmentation and batch normalisation.

An ordinary accelerate script: `python train.py`, `torchrun --nproc_per_node 3 train.py`, `chaosrun submit job.yaml`.
"""

import argparse
import copy
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from model import DigitNet, MovingAverage
from sklearn.datasets import load_digits
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import chaosrun

TEST_EVERY = 4
SHIFT_PIXELS = 1
NOISE = 0.05


class AugmentedDigits(Dataset[tuple[Tensor, Tensor]]):
    """Images of shape (1, 8, 8) in 0 to 1, each shifted and noised anew in every epoch."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self._images = images
        self._labels = labels

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        # Keyed on seed, epoch and index: the same picture whichever process fetches it, and however often it restarted.
        rng = chaosrun.sample_rng(index)
        down, right = (int(pixels) for pixels in rng.integers(-SHIFT_PIXELS, SHIFT_PIXELS, size=2, endpoint=True))
        image = torch.roll(self._images[index], (down, right), dims=(1, 2))
        return image + NOISE * torch.from_numpy(rng.standard_normal(image.shape, dtype="float32")), self._labels[index]


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    set_seed(args.seed)

    pixels, digits = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).float().reshape(-1, 1, 8, 8) / 16
    labels = torch.from_numpy(digits)
    held_out = torch.arange(len(images)) % TEST_EVERY == 0
    loader = DataLoader(
        AugmentedDigits(images[~held_out], labels[~held_out]),
        batch_size=args.batch_size,
        shuffle=True,
        num_workers=args.loader_workers,
    )
    steps = args.epochs * math.ceil(len(loader) / accelerator.num_processes)

    model = DigitNet(args.width, args.dropout)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)
    # accelerate steps a prepared scheduler once for each process at every optimizer step.
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=steps * accelerator.num_processes)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    average = MovingAverage(accelerator.unwrap_model(model), args.average_decay)

    run = chaosrun.attach(accelerator)
    run.register("average", average)
    for batch_images, batch_labels in run.batches(loader, epochs=args.epochs):
        loss = F.cross_entropy(model(batch_images), batch_labels)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        average.update(accelerator.unwrap_model(model))
        run.step(loss)
        if args.print_losses:
            accelerator.print(f"step {run.position.step} loss {float(loss.detach()).hex()}")

    if accelerator.is_main_process:
        averaged = copy.deepcopy(accelerator.unwrap_model(model))
        average.copy_to(averaged)
        share = accuracy(averaged, images[held_out].to(accelerator.device), labels[held_out].to(accelerator.device))
        print(f"accuracy {share:.4f} on {int(held_out.sum())} held-out digits after {steps} steps")
    accelerator.wait_for_everyone()
    accelerator.end_training()


@torch.no_grad()
def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    model.eval()
    return (model(images).argmax(dim=1) == labels).float().mean().item()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small convolutional network on handwritten digits.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16, help="images in a batch, on each worker")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--width", type=int, default=16, help="channels of the first convolution")
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--average-decay", type=float, default=0.95)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--print-losses", action="store_true", help="print the exact training losses of worker 0 at every step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
