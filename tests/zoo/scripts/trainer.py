"""A regression model trained with transformers' Trainer on data in memory, resumed from the last checkpoint."""

import argparse

import torch
from torch import nn
from torch.utils.data import Dataset
from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class Samples(Dataset):
    def __init__(self, count: int) -> None:
        self.inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"inputs": self.inputs[index], "labels": self.inputs[index].sum()}


class Regression(PreTrainedModel):
    config_class = PretrainedConfig

    def __init__(self, config: PretrainedConfig) -> None:
        super().__init__(config)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(16, 1)
        self.post_init()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        predicted = self.head(self.body(inputs)).squeeze(-1)
        return {"loss": nn.functional.mse_loss(predicted, labels), "logits": predicted}


parser = argparse.ArgumentParser()
parser.add_argument("--output-dir", default="trainer_output")
parser.add_argument("--batch", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--epochs", type=int, default=3)
parser.add_argument("--save-steps", type=int, default=4)
options = parser.parse_args()

torch.manual_seed(1)
arguments = TrainingArguments(
    output_dir=options.output_dir,
    num_train_epochs=options.epochs,
    per_device_train_batch_size=options.batch,
    gradient_accumulation_steps=options.accumulate,
    learning_rate=1e-2,
    save_steps=options.save_steps,
    logging_steps=1000,
    report_to="none",
    use_cpu=True,
    seed=3,
    disable_tqdm=True,
)
trainer = Trainer(model=Regression(PretrainedConfig()), args=arguments, train_dataset=Samples(40))
trainer.train(resume_from_checkpoint=get_last_checkpoint(options.output_dir))
