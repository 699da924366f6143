"""Documents of unequal length as token ids, and how a batch of them is padded. Knows nothing of models or of accelerate."""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["IGNORE_INDEX", "VOCABULARY", "Documents", "carried_text", "hub_text", "pad"]

VOCABULARY = 256
"""Of the text that Python carries: its bytes."""
IGNORE_INDEX = -100
BOUNDARY = 0
SHORTEST = 24


class Documents(Dataset[Tensor]):
    """Token ids of each document, int64 of shape (tokens,), at least two of them."""

    def __init__(self, documents: list[list[int]]) -> None:
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(self._documents[index])


def carried_text(longest: int, limit: int | None) -> Documents:
    """The paragraphs of Python's own language reference, as bytes between two zero bytes, cut to `longest` tokens."""
    paragraphs = [part.strip().encode() for name in sorted(topics) for part in topics[name].split("\n\n")]
    chosen = [text for text in paragraphs if len(text) >= SHORTEST][:limit]
    return Documents([[BOUNDARY, *text, BOUNDARY][:longest] for text in chosen])


def hub_text(dataset: str, subset: str, tokenizer: str, longest: int, limit: int | None) -> Documents:
    """The non-empty texts of a data set's training split on a hub, with a tokenizer of that hub. Needs `datasets`."""
    # Here: the text that Python carries must not need them.
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    from transformers import AutoTokenizer

    encode = AutoTokenizer.from_pretrained(tokenizer)
    texts = [text for text in load_dataset(dataset, subset, split="train")["text"] if text.strip()]
    tokens = encode(texts, truncation=True, max_length=longest, return_attention_mask=False)["input_ids"]
    return Documents([ids for ids in tokens if len(ids) > 1][:limit])


def pad(documents: list[Tensor]) -> dict[str, Tensor]:
    """A batch, padded at the end to its longest document: `input_ids` and `labels`, int64 of shape (documents, length).

    A label is the token that follows, IGNORE_INDEX where nothing does; nothing is to be shifted again. What an input is padded
    with does not matter: a causal model's earlier positions cannot see it. Where padding begins, a document's length tells, not
    the value of a token, which may well occur in the text.
    """
    length = max(len(tokens) for tokens in documents) - 1
    inputs = torch.zeros(len(documents), length, dtype=torch.long)
    labels = torch.full((len(documents), length), IGNORE_INDEX)
    for row, tokens in enumerate(documents):
        inputs[row, : len(tokens) - 1] = tokens[:-1]
        labels[row, : len(tokens) - 1] = tokens[1:]
    return {"input_ids": inputs, "labels": labels}
