"""torchrl's Trainer over a collector of its own, with the Trainer's checkpoints."""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import nn
from torchrl.trainers import Trainer

SAMPLES = torch.randn(96, 4, generator=torch.Generator().manual_seed(2))

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
options = parser.parse_args()


class Collector:
    init_random_frames = 0

    def __init__(self) -> None:
        self.collected = 0

    def __iter__(self) -> Iterator[TensorDict]:
        while self.collected < len(SAMPLES):
            inputs = SAMPLES[self.collected : self.collected + 4]
            self.collected += len(inputs)
            yield TensorDict({"inputs": inputs, "targets": inputs.sum(1, keepdim=True)}, [len(inputs)])

    def state_dict(self) -> dict[str, int]:
        return {"collected": self.collected}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.collected = state["collected"]

    def update_policy_weights_(self) -> None: ...

    def shutdown(self) -> None: ...


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"loss": nn.functional.mse_loss(self.layers(batch["inputs"]), batch["targets"])}, [])


torch.manual_seed(1)
options.output.mkdir(parents=True, exist_ok=True)
checkpoint = options.output / "trainer.pt"
loss = Loss()
trainer = Trainer(
    collector=Collector(),
    total_frames=len(SAMPLES),
    frame_skip=1,
    optim_steps_per_batch=1,
    loss_module=loss,
    optimizer=torch.optim.Adam(loss.parameters(), lr=1e-2),
    progress_bar=False,
    save_trainer_file=checkpoint,
    save_trainer_interval=20,
)
if checkpoint.exists():
    trainer.load_from_file(checkpoint, weights_only=False)
trainer.train()
