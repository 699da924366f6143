"""The text that every CPython carries, cut into padded training examples. Knows nothing of models or of accelerate."""

from pydoc_data.topics import topics

import torch
from torch import Tensor
from torch.utils.data import Dataset

__all__ = ["IGNORE_INDEX", "VOCABULARY", "Chunks", "split_documents"]

VOCABULARY = 256
IGNORE_INDEX = -100
BOUNDARY = b"\0"
VALIDATION_EVERY = 10


def split_documents(limit: int | None = None) -> tuple[list[bytes], list[bytes]]:
    """The language reference as (training, validation) documents; every tenth topic, by name, is held out whole.

    A document never lies on both sides, so the validation loss is of text that was not seen.
    """
    documents = [topics[name].encode() for name in sorted(topics)][:limit]
    training = [text for index, text in enumerate(documents) if index % VALIDATION_EVERY]
    return training, documents[::VALIDATION_EVERY]


class Chunks(Dataset[tuple[Tensor, Tensor]]):
    """Documents of unequal length as (inputs, targets), both int64 of shape (context,).

    A document starts and ends with a zero byte. Its last chunk is padded at the end: with zeros in the inputs, which a causal
    model's earlier positions cannot see, and with IGNORE_INDEX in the targets. `limit` keeps the first so many chunks.
    """

    def __init__(self, documents: list[bytes], context: int, limit: int | None = None) -> None:
        self._context = context
        marked = [BOUNDARY + text + BOUNDARY for text in documents]
        # One byte more than the context: the last input of a chunk is the first of the next, so every byte is a target once.
        pieces = [text[start : start + context + 1] for text in marked for start in range(0, len(text) - 1, context)]
        self._pieces = pieces[:limit]

    def __len__(self) -> int:
        return len(self._pieces)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = torch.frombuffer(bytearray(self._pieces[index]), dtype=torch.uint8).long()
        inputs = torch.zeros(self._context, dtype=torch.long)
        targets = torch.full((self._context,), IGNORE_INDEX)
        inputs[: len(piece) - 1] = piece[:-1]
        targets[: len(piece) - 1] = piece[1:]
        return inputs, targets

    @property
    def target_count(self) -> int:
        """How many bytes the model is asked to predict in one pass."""
        return sum(len(piece) - 1 for piece in self._pieces)
