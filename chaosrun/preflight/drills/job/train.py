"""The training of a preflight's drill: a small network with dropout and momentum, for some seconds.

An ordinary accelerate script, with everything that a restart must restore, and nothing that takes long.
"""

import argparse


def main() -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset

    import chaosrun

    args = parse_arguments()
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(), dataloader_config=chaosrun.dataloader_configuration(data_seed=args.seed)
    )
    set_seed(args.seed)
    count = args.steps_an_epoch * args.batch_size * accelerator.num_processes
    data = TensorDataset(torch.randn(count, args.width), torch.randint(10, (count,)))
    loader = DataLoader(data, batch_size=args.batch_size, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(args.width, 4 * args.width),
        torch.nn.LayerNorm(4 * args.width),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(4 * args.width, 10),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    # accelerate steps a prepared scheduler once for each process at every optimizer step.
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5 * accelerator.num_processes, gamma=0.9)
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

    run = chaosrun.attach(accelerator)
    for features, classes in run.batches(loader, epochs=args.epochs):
        loss = torch.nn.functional.cross_entropy(model(features), classes)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(loss)

    accelerator.wait_for_everyone()
    accelerator.end_training()


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small network on synthetic data, for a preflight's drill.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps-an-epoch", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=16, help="samples of a step, on each worker")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    return parser.parse_args()


if __name__ == "__main__":
    main()
