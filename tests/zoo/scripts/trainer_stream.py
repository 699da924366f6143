"""transformers' Trainer on a stream shorter than max_steps: Trainer begins the stream again, and resumes by skipping."""

import argparse
from collections.abc import Iterator

import torch
from torch import nn
from torch.utils.data import IterableDataset
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Stream(IterableDataset):
    """Records as a socket or a file would give them: in order, and then no more."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        source = torch.Generator().manual_seed(4)
        for _ in range(20):
            inputs = torch.randn(6, generator=source)
            yield {"inputs": inputs, "labels": inputs.mean()}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 1))

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(inputs).squeeze(-1), labels)}


parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="trainer_output")
parser.add_argument("--max-steps", type=int, default=25)
options = parser.parse_args()

torch.manual_seed(1)
arguments = TrainingArguments(
    output_dir=options.output_dir,
    max_steps=options.max_steps,
    per_device_train_batch_size=2,
    learning_rate=1e-2,
    save_steps=4,
    logging_steps=1000,
    report_to="none",
    use_cpu=True,
    seed=3,
    disable_tqdm=True,
)
trainer = Trainer(model=Regression(), args=arguments, train_dataset=Stream())
trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output_dir))
