"""Train a small Llama to go on with a repeating pattern, by transformers' Trainer, with the Trainer's own checkpoints.

`torchrun --nproc_per_node 2 train.py` trains in two processes. Started again, whatever ended it, it goes on from its last
checkpoint; `chaosrun submit job.yaml` kills it and proves that. Nothing in here knows of chaosrun, and nothing is downloaded:
the weights are random. Put your own data and model in their place.
"""

import os

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

SEED = 1
TOKENS = 32
OUTPUT = "output"


def main() -> None:
    args = TrainingArguments(
        output_dir=OUTPUT,
        seed=SEED,
        data_seed=SEED,
        num_train_epochs=2,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        warmup_steps=5,
        logging_steps=5,
        save_steps=5,
        save_total_limit=2,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        ddp_find_unused_parameters=False,
    )
    set_seed(SEED)
    config = LlamaConfig(
        vocab_size=TOKENS,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        attention_dropout=0.1,
    )
    # "eager": the backward passes of fused attention kernels are not deterministic on every device.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    trainer = Trainer(model=model, args=args, train_dataset=Patterns(96))
    last = get_last_checkpoint(OUTPUT) if os.path.isdir(OUTPUT) else None
    trained = trainer.train(resume_from_checkpoint=last)
    trainer.accelerator.print(f"loss {trained.training_loss:.4f} after {trained.global_step} steps")


class Patterns(Dataset[dict[str, torch.Tensor]]):
    """Rows of 32 tokens in which four tokens, drawn for each row, repeat."""

    def __init__(self, count: int) -> None:
        self._rows = torch.randint(TOKENS, (count, 4)).repeat(1, 8)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


if __name__ == "__main__":
    main()
