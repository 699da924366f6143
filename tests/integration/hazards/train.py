"""Scripts that do one thing which a resume does not forgive, or must not mind: `--case NAME`, see test_hazards."""

import argparse
import time
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.protocol.context import current

SAMPLES = 44
SEED = 3


class Stateful:
    """A value of the script's own that may be registered."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(7)
        self.mean = torch.ones(())

    def state_dict(self) -> dict[str, Any]:
        return {"generator": self.generator.get_state(), "mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.generator.set_state(state["generator"])
        self.mean = state["mean"]


class Tied(torch.nn.Module):
    """Two layers that share a weight, and a buffer that no state dict holds but that the output depends on."""

    calls: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.rise = torch.nn.Linear(1, 8)
        self.first = torch.nn.Linear(8, 8, bias=False)
        self.second = torch.nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight
        self.fall = torch.nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.calls += 1
        hidden = torch.nn.functional.dropout(self.second(torch.tanh(self.first(self.rise(samples)))), 0.1, self.training)
        return self.fall(hidden) * (1 + 0.01 * self.calls)


def samples_of(case: str) -> torch.Tensor:
    samples = torch.linspace(-1, 1, SAMPLES).unsqueeze(1)
    if case != "hash-order":
        return samples
    # A set of strings: its order is that of their hashes, which Python salts anew in every process.
    order = list({f"sample-{number}" for number in range(SAMPLES)})
    return samples[[int(name.removeprefix("sample-")) for name in order]]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", required=True)
    case = parser.parse_args().case
    context = current()
    restarted = context is not None and context.order.resume is not None
    if case == "threads" and restarted:
        torch.set_num_threads(2)
    specific = case == "device-specific"
    data_seed: Any = None if specific or case == "no-seed" else SEED
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=data_seed)
    )
    if case != "no-seed":
        set_seed(SEED, device_specific=specific)
    loader: Any = DataLoader(
        TensorDataset(samples_of(case)), batch_size=5 if case == "batch-size" and restarted else 4, shuffle=case != "hash-order"
    )
    model: Any = Tied()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    own = Stateful()
    run = chaosrun.attach(accelerator)
    if case.endswith("-registered"):
        run.register("own", own)
    for steps_of_this_process, (samples,) in enumerate(run.batches(loader, epochs=3), start=1):
        if case.startswith("generator"):
            samples = samples + 0.1 * torch.randn(samples.shape, generator=own.generator)
        loss = (model(samples) - samples).square().mean()
        if case.startswith("running-mean"):
            own.mean = own.mean.lerp(loss.detach(), 0.1)
            loss = loss / own.mean
        if case == "own-warm-up":
            optimizer.param_groups[0]["lr"] = 1e-2 * min(1.0, steps_of_this_process / 20)
        if case == "wall-clock":
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + time.monotonic() % 1000)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        run.step(loss)
    accelerator.end_training()


if __name__ == "__main__":
    main()
