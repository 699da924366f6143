"""Train a small byte-level language model on Python's own language reference.

An ordinary accelerate script, with the same numbers under each launcher:

    python train.py
    accelerate launch --multi_gpu --num_processes 3 train.py      (or torchrun --nproc_per_node 3; both work on CPU too)
    chaosrun submit job.yaml

The lines marked `chaosrun` are all that it needs; outside chaosrun they neither record nor save anything.
"""

import argparse
import math

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from data import IGNORE_INDEX, VOCABULARY, Chunks, split_documents
from model import ByteLM
from torch import Tensor
from torch.utils.data import DataLoader

import chaosrun

ACCUMULATION_STEPS = 2
WARM_UP = 0.1
LOWEST_RATE = 0.1


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(),
        gradient_accumulation_steps=ACCUMULATION_STEPS,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    set_seed(args.seed)

    training, validation = split_documents(args.documents)
    train_set = Chunks(training, args.context, args.chunks)
    train_loader = make_loader(train_set, args, shuffle=True)
    validation_loader = make_loader(Chunks(validation, args.context), args, shuffle=False)
    steps = args.epochs * math.ceil(math.ceil(len(train_loader) / accelerator.num_processes) / ACCUMULATION_STEPS)

    model = ByteLM(
        vocabulary=VOCABULARY,
        context=args.context,
        width=args.width,
        layers=args.layers,
        heads=args.heads,
        dropout=args.dropout,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # accelerate steps a prepared scheduler once for each process at every optimizer step, so the horizon counts them too.
    horizon = steps * accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: warm_up_then_cosine(call / horizon))
    model, optimizer, scheduler, train_loader, validation_loader = accelerator.prepare(
        model, optimizer, scheduler, train_loader, validation_loader
    )
    size = sum(weight.numel() for weight in model.parameters())
    accelerator.print(
        f"{size:,} parameters, {len(train_set)} chunks of text, {steps} steps, {accelerator.num_processes} workers"
    )

    run = chaosrun.attach(accelerator)  # chaosrun
    # Dividing by a constant lets every byte weigh the same. The mean of each micro-batch would be averaged again over the
    # window and the workers, and a byte in a short document's padded chunk would weigh more.
    targets_per_batch = train_set.target_count / len(train_set) * args.batch_size
    losses: list[Tensor] = []
    for inputs, targets in run.batches(train_loader, epochs=args.epochs):  # chaosrun
        with accelerator.accumulate(model):
            loss = losses_of_chunks(model, inputs, targets).sum() / targets_per_batch
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.step(loss)  # chaosrun
        losses.append(loss.detach())
        if accelerator.sync_gradients:
            if args.print_losses:
                accelerator.print(f"step {run.position.step} loss", *(float(loss).hex() for loss in losses))
            losses.clear()

    bits = validate(accelerator, model, validation_loader) / math.log(2)
    accelerator.print(f"validation loss {bits:.4f} bits per byte ({bits.hex()})")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def losses_of_chunks(model: torch.nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    """The summed cross-entropy of each chunk, in nats, shape (batch,); padding counts nothing."""
    logits = model(inputs)
    # Flattened first: over a 3-dimensional input this loss has no deterministic kernel on CUDA.
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORE_INDEX, reduction="none")
    return losses.view_as(targets).sum(dim=1)


@torch.no_grad()
def validate(accelerator: Accelerator, model: torch.nn.Module, loader: DataLoader[tuple[Tensor, Tensor]]) -> float:
    """Nats per byte over the held-out documents: one sum over all workers, divided once."""
    model.eval()
    loss, count = 0.0, 0
    for inputs, targets in loader:
        counts = (targets != IGNORE_INDEX).sum(dim=1)
        # gather_for_metrics leaves out the chunks that were repeated to make the workers' shares even.
        losses, counts = accelerator.gather_for_metrics((losses_of_chunks(model, inputs, targets), counts))
        loss += losses.double().sum().item()
        count += int(counts.sum().item())
    return loss / count


def make_loader(chunks: Chunks, args: argparse.Namespace, *, shuffle: bool) -> DataLoader[tuple[Tensor, Tensor]]:
    return DataLoader(
        chunks,
        batch_size=args.batch_size,
        shuffle=shuffle,
        num_workers=args.loader_workers,
        # A generator of its own: starting an iterator draws a seed, and must not draw it from the stream that dropout uses.
        generator=torch.Generator().manual_seed(args.seed),
    )


def warm_up_then_cosine(done: float) -> float:
    """Share of the highest learning rate after `done` (0 to 1) of the training."""
    if done < WARM_UP:
        return done / WARM_UP
    return LOWEST_RATE + (1 - LOWEST_RATE) * (1 + math.cos(math.pi * min(1.0, (done - WARM_UP) / (1 - WARM_UP)))) / 2


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level language model on Python's language reference.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=8, help="chunks in a micro-batch, on each worker")
    parser.add_argument("--documents", type=int, help="use only the first so many documents")
    parser.add_argument("--chunks", type=int, help="train on only the first so many chunks")
    parser.add_argument("--loader-workers", type=int, default=0)
    parser.add_argument("--context", type=int, default=128, help="bytes the model sees at once")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--lr", type=float, default=8e-3, help="highest learning rate")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--print-losses", action="store_true", help="print the exact training losses of worker 0 at every step")
    return parser.parse_args()


if __name__ == "__main__":
    main()
