"""Train a causal language model of transformers' Llama architecture with gradient accumulation that counts tokens.

The same global batch, cut into any number of workers × documents × micro-batches, gives the same losses up to rounding:

    python train.py --batch-size 8 --accumulation 1
    accelerate launch --multi_gpu --num_processes 2 train.py --batch-size 2 --accumulation 2
    chaosrun submit job.yaml

`--naive` averages means instead, as is often done: a token in a short micro-batch then weighs more, and the losses differ.

By default the model is small, its weights are random, and the text is Python's own language reference: nothing is downloaded.
`--dataset Salesforce/wikitext --model HuggingFaceTB/SmolLM-135M` takes text, tokenizer and weights from a hub.
"""

import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from data import IGNORE_INDEX, VOCABULARY, Documents, carried_text, hub_text, pad
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaForCausalLM

import chaosrun

WARM_UP_STEPS = 4


def main() -> None:
    args = parse_arguments()
    accelerator = Accelerator(
        cpu=args.cpu or not torch.cuda.is_available(),
        # Windows divide by what they count; only the naive loop has accelerate divide.
        gradient_accumulation_steps=args.accumulation if args.naive else 1,
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=args.seed),
    )
    if accelerator.device.type == "cpu":
        torch.set_num_threads(1)
    set_seed(args.seed)

    documents = load_documents(args)
    loader = DataLoader(documents, batch_size=args.batch_size, shuffle=True, collate_fn=pad)
    model = make_model(args)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    # accelerate steps a prepared scheduler once for each process at every optimizer step.
    workers = accelerator.num_processes
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda call: min(1.0, (call / workers + 1) / WARM_UP_STEPS))
    model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
    model.train()
    accelerator.print(
        f"{sum(weight.numel() for weight in model.parameters()):,} parameters, {len(documents)} documents, a global batch of "
        f"{workers} workers x {args.batch_size} documents x {args.accumulation} micro-batches"
    )

    train = train_naively if args.naive else train_by_tokens
    loss = train(args, accelerator, model, optimizer, scheduler, loader)
    accelerator.print(f"last loss {loss:.6f} nats per token")
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train_by_tokens(args: argparse.Namespace, accelerator: Accelerator, model, optimizer, scheduler, loader) -> float:
    """Each step's loss is the sum over the tokens of all its micro-batches and workers, divided once by their number."""
    run = chaosrun.attach(accelerator)
    loss = torch.tensor(0.0)
    for window in run.windows(loader, model, epochs=args.epochs, accumulation_steps=args.accumulation, count=number_of_targets):
        for batch in window:
            window.backward(cross_entropy(model, batch, reduction="sum"))
        accelerator.clip_grad_norm_(model.parameters(), args.clip)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        run.step(window.loss)
        loss = window.loss
        if args.print_losses:
            accelerator.print(f"step {run.position.step} loss {float(accelerator.reduce(loss, 'sum')):.9f}")  # pyright: ignore[reportArgumentType]
    return float(accelerator.reduce(loss, "sum"))  # pyright: ignore[reportArgumentType]


def train_naively(args: argparse.Namespace, accelerator: Accelerator, model, optimizer, scheduler, loader) -> float:
    """The classic mistake: the mean of each micro-batch, averaged over micro-batches and workers, however long they are."""
    run = chaosrun.attach(accelerator)
    loss = torch.tensor(0.0)
    for batch in run.batches(loader, epochs=args.epochs):
        with accelerator.accumulate(model):
            loss = cross_entropy(model, batch, reduction="mean")
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), args.clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        run.step(loss)
    return float(accelerator.reduce(loss.detach(), "mean"))  # pyright: ignore[reportArgumentType]


def cross_entropy(model: torch.nn.Module, batch: dict[str, Tensor], *, reduction: str) -> Tensor:
    """Over the tokens to be predicted, in nats, a scalar; padding counts nothing."""
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction=reduction
    )


def number_of_targets(batch: dict[str, Tensor]) -> int:
    return int((batch["labels"] != IGNORE_INDEX).sum())


def load_documents(args: argparse.Namespace) -> Documents:
    if args.dataset is None:
        return carried_text(args.context + 1, args.documents)
    return hub_text(args.dataset, args.subset, args.model, args.context + 1, args.documents)


def make_model(args: argparse.Namespace) -> torch.nn.Module:
    """Attention as plain matrix products ("eager"): fused kernels' backward passes are not deterministic on every device."""
    if args.model is not None:
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="eager")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=2 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.heads // 2,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        attn_implementation="eager",  # pyright: ignore[reportCallIssue]
    )
    return LlamaForCausalLM(config)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a causal language model with gradient accumulation.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=2, help="documents in a micro-batch, on each worker")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches in a step, on each worker")
    parser.add_argument("--naive", action="store_true", help="average the means of micro-batches: the classic mistake")
    parser.add_argument("--documents", type=int, help="use only the first so many documents")
    parser.add_argument("--context", type=int, default=128, help="tokens the model sees at once")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2e-3, help="learning rate after warming up")
    parser.add_argument("--clip", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--dataset", help="a text data set on a hub, such as Salesforce/wikitext (needs --model)")
    parser.add_argument("--subset", default="wikitext-2-v1", help="which part of that data set")
    parser.add_argument("--model", help="weights and tokenizer on a hub, such as HuggingFaceTB/SmolLM-135M (needs --dataset)")
    parser.add_argument("--cpu", action="store_true", help="leave GPUs alone")
    parser.add_argument("--print-losses", action="store_true", help="print the loss of every step")
    args = parser.parse_args()
    if (args.dataset is None) != (args.model is None):
        parser.error("--dataset and --model go together: the text is cut into the model's own tokens")
    return args


if __name__ == "__main__":
    main()
