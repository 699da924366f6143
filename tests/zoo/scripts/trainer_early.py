"""A small model fine-tuned by Trainer, with early stopping, resumed from its newest checkpoint."""

import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

parser = argparse.ArgumentParser()
parser.add_argument("--output", type=Path, default="checkpoints")
options = parser.parse_args()


class Rows(Dataset):
    def __init__(self, rows: int, seed: int) -> None:
        stream = torch.Generator().manual_seed(seed)
        self.inputs, self.targets = torch.randn(rows, 4, generator=stream), torch.randn(rows, generator=stream)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.targets[index]}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.layers(inputs).squeeze(-1)
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


torch.manual_seed(1)
arguments = TrainingArguments(
    output_dir=str(options.output),
    per_device_train_batch_size=4,
    max_steps=60,
    learning_rate=5e-2,
    eval_strategy="steps",
    eval_steps=2,
    save_strategy="steps",
    save_steps=2,
    load_best_model_at_end=True,
    metric_for_best_model="loss",
    report_to=[],
    disable_tqdm=True,
    use_cpu=True,
    seed=3,
)
trainer = Trainer(
    model=Regression(),
    args=arguments,
    train_dataset=Rows(40, 5),
    eval_dataset=Rows(16, 6),
    callbacks=[EarlyStoppingCallback(early_stopping_patience=4)],
)
trainer.train(resume_from_checkpoint=get_last_checkpoint(str(options.output)) if options.output.exists() else None)
