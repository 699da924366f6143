"""The digest of a batch: all its bytes, whatever it is made of."""

from collections.abc import Mapping
from typing import Any

import numpy
import torch
import xxhash

from chaosrun.train.fingerprint import tensor_digest

__all__ = ["content_digest"]


def content_digest(content: Any) -> str:
    """A digest of all bytes of a batch or an item: tensors and arrays by content, dtype and shape, plain values by their text.

    Objects are looked into; of one without attributes only its type counts (its repr may hold an address).
    """
    hasher = xxhash.xxh3_64()

    def visit(value: Any) -> None:
        match value:
            case torch.Tensor():
                hasher.update(tensor_digest(value).to_bytes(8, "little"))
            case numpy.ndarray() | numpy.generic() if not value.dtype.hasobject:
                hasher.update(f"{value.dtype.str}{value.shape}".encode() + numpy.ascontiguousarray(value).tobytes())
            case str() | bytes() | int() | float() | complex() | None:
                hasher.update(repr(value).encode())
            case Mapping():
                hasher.update(f"{{{len(value)}".encode())
                for key in value:
                    visit(key)
                    visit(value[key])
            case list() | tuple():
                hasher.update(f"[{len(value)}".encode())
                for item in value:
                    visit(item)
            case _:
                hasher.update(type(value).__qualname__.encode())
                visit(getattr(value, "__dict__", {}))

    visit(content)
    return hasher.hexdigest()
