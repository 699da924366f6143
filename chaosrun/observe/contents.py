"""The digest of a batch: all its bytes, whatever it is made of; and the tensors in it."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash

from chaosrun.observe.fingerprint import tensor_digest


def content_digest(content: Any) -> str:
    """A digest of all bytes of a batch or an item: tensors and arrays by content, dtype and shape, plain values by their text.

    Objects are looked into, once on the way down; of one without attributes only its type counts (a repr may hold an address).
    """
    hasher = xxhash.xxh3_64()
    inside: set[int] = set()

    def visit(value: Any) -> None:
        match value:
            case torch.Tensor() if value.grad_fn is not None:
                # Computed, by another module perhaps: no content of a batch.
                hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
            case torch.Tensor():
                hasher.update(tensor_digest(value).to_bytes(8, "little"))
            case numpy.ndarray() | numpy.generic() if not value.dtype.hasobject:
                hasher.update(f"{value.dtype.str}{value.shape}".encode() + numpy.ascontiguousarray(value).tobytes())
            case str() | bytes() | int() | float() | complex() | None:
                hasher.update(repr(value).encode())
            case torch.nn.Module() | torch.device() | torch.dtype() | type():
                hasher.update(type(value).__qualname__.encode())
            case _ if id(value) in inside:
                hasher.update(b"<")
            case _:
                inside.add(id(value))
                look_into(value)
                inside.discard(id(value))

    def look_into(value: Any) -> None:
        match value:
            case Mapping():
                hasher.update(f"{{{len(value)}".encode())
                for key in value:
                    visit(key)
                    visit(value[key])
            case list() | tuple():
                hasher.update(f"[{len(value)}".encode())
                for item in value:
                    visit(item)
            case set() | frozenset():
                # The order of a set is no content.
                hasher.update(f"({len(value)}".encode() + "".join(sorted(map(content_digest, value))).encode())
            case numpy.ndarray():
                hasher.update(f"{value.dtype.str}{value.shape}".encode())
                visit(value.tolist())
            case _:
                hasher.update(type(value).__qualname__.encode())
                visit(_attributes(value))

    visit(content)
    return hasher.hexdigest()


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in slots_of(kind)]
    held = {name: getattr(value, name) for name in slots if name not in ("__dict__", "__weakref__") and hasattr(value, name)}
    return {**held, **getattr(value, "__dict__", {})}


def slots_of(kind: type) -> tuple[str, ...]:
    """Those that this class declares itself."""
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors of a state dict or a batch, however deep in lists and mappings."""
    match value:
        case torch.Tensor():
            yield value
        case Mapping():
            for item in value.values():
                yield from tensors_in(item)
        case list() | tuple():
            for item in value:
                yield from tensors_in(item)
