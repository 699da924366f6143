"""Train a small Llama to go on with a repeating pattern, by transformers' Trainer. Put your own data and model in its place.

`python train.py` trains in one process, `torchrun --nproc_per_node 2 train.py` in two, `chaosrun submit job.yaml` under faults:
the numbers of the latter two are the same. Nothing is downloaded: the weights are random.
"""

import math

import torch
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import TrainOutput

import chaosrun

SEED = 1
TOKENS = 32


class ChaosTrainer(Trainer):
    """A Trainer whose loop over epochs and batches is chaosrun's.

    The Trainer's own: its arguments, collator, loader, optimizer, scheduler, clipping, `training_step` and `compute_loss`
    (override them as ever), and after the training `evaluate`, `predict` and `save_model`. Not used: callbacks, logging and
    evaluation within the training, gradient accumulation, and the Trainer's checkpoints (save_strategy,
    resume_from_checkpoint), whose place chaosrun's take.
    """

    def train(self, *_, **__) -> TrainOutput:
        args = self.args
        if args.gradient_accumulation_steps != 1:
            raise ValueError(
                "this loop makes a step of every batch: gradient_accumulation_steps must be 1, or use run.windows()"
            )
        loader = self.get_train_dataloader()
        steps = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * len(loader))
        self.current_gradient_accumulation_steps = 1
        self.create_optimizer()
        model, self.optimizer = self.accelerator.prepare(self.model, self.optimizer)
        self.model_wrapped = model
        scheduler = self.create_scheduler(num_training_steps=steps)

        loss = torch.tensor(0.0)
        run = chaosrun.attach(self.accelerator)  # after prepare(); checkpoints hold what is prepared …
        run.register("scheduler", scheduler)  # … and what is registered: the Trainer leaves its scheduler unprepared
        for batch in run.batches(loader, epochs=math.ceil(steps / len(loader))):
            loss = self.training_step(model, batch)
            if args.max_grad_norm > 0:
                self.accelerator.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            self.optimizer.step()
            scheduler.step()
            self.optimizer.zero_grad()
            self.state.global_step = run.position.step + 1
            run.step(loss)  # once for every batch; checkpoints are saved, and faults strike, between this and the next one
            if run.position.step == steps:
                break
        run.finish()
        return TrainOutput(run.position.step, loss.item(), {})


def main() -> None:
    args = TrainingArguments(
        output_dir="output",
        seed=SEED,
        data_seed=SEED,  # the shuffle follows from this and the epoch alone: a restart finds its place in it again
        num_train_epochs=2,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        warmup_steps=5,
        save_strategy="no",
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
    trainer = ChaosTrainer(model=model, args=args, train_dataset=Patterns(96))
    trained = trainer.train()
    trainer.accelerator.print(f"loss {trained.training_loss:.4f} after {trained.global_step} steps")
    trainer.accelerator.end_training()


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
