"""The training of a preflight's drill: a small network with dropout and momentum, for some seconds.

An ordinary accelerate script, with everything that a restart must restore, and nothing that takes long.
"""

import argparse

STEPS_AN_EPOCH = 8
BATCH_SIZE = 16
"""Samples of a step, on each worker."""
WIDTH = 64


def main() -> None:
    import torch
    from accelerate import Accelerator
    from accelerate.utils import set_seed
    from torch.utils.data import DataLoader, TensorDataset

    import chaosrun

    parser = argparse.ArgumentParser(description="Train a small network on synthetic data, for a preflight's drill.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=3)
    args = parser.parse_args()
    data_order = chaosrun.dataloader_configuration(data_seed=args.seed)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=data_order)
    set_seed(args.seed)
    count = STEPS_AN_EPOCH * BATCH_SIZE * accelerator.num_processes
    data = TensorDataset(torch.randn(count, WIDTH), torch.randint(10, (count,)))
    loader = DataLoader(data, batch_size=BATCH_SIZE, shuffle=True)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 4 * WIDTH),
        torch.nn.LayerNorm(4 * WIDTH),
        torch.nn.GELU(),
        torch.nn.Dropout(0.1),
        torch.nn.Linear(4 * WIDTH, 10),
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


if __name__ == "__main__":
    main()
