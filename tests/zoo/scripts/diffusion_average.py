"""A denoiser with diffusers' EMAModel, which is saved and loaded as in diffusers' own examples."""

import argparse
import os
from pathlib import Path

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.modeling_utils import ModelMixin
from diffusers.training_utils import EMAModel

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
parser.add_argument("--steps", type=int, default=24)
options = parser.parse_args()


class Denoiser(ModelMixin, ConfigMixin):
    @register_to_config
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.SiLU(), torch.nn.Linear(width, 8))

    def forward(self, noisy):
        return self.body(noisy)


torch.manual_seed(1)
images, noise = torch.randn(2, options.steps, 16, 8, generator=torch.Generator().manual_seed(2))
model = Denoiser()
average = EMAModel(model.parameters(), use_ema_warmup=True, model_cls=Denoiser, model_config=model.config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
step = 0
saved = sorted(options.output.glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
if saved:
    average.load_state_dict(EMAModel.from_pretrained(saved[-1] / "ema", Denoiser).state_dict())
    model.load_state_dict(Denoiser.from_pretrained(saved[-1] / "model").state_dict())
    state = torch.load(saved[-1] / "optimizer.pt")
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]

while step < options.steps:
    loss = (model(images[step] + noise[step]) - noise[step]).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    average.step(model.parameters())
    step += 1
    if step % 5 == 0:
        incoming = options.output / "incoming"
        average.save_pretrained(incoming / "ema")
        model.save_pretrained(incoming / "model")
        torch.save({"optimizer": optimizer.state_dict(), "step": step}, incoming / "optimizer.pt")
        os.rename(incoming, options.output / f"checkpoint-{step}")
