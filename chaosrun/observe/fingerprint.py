"""Fingerprints of live state: 64 bits that change when one bit of a tensor does. Fast, not cryptographic.

Computed from raw bits, dtype and shape: NaN payloads and the sign of zero count. On the CPU xxh3 reads the tensor's memory in
place. On another device the bits stay there: a multilinear hash, the sum of w_i * x_i mod 2^64 over the words x_i with fixed
random odd weights w_i (Lemire and Kaser, "Strongly universal string hashing is fast", 2014). Integer sums do not depend on
their order, so it is deterministic on a GPU; odd weights make every single flipped bit show. The two give different values for
one tensor: compare only fingerprints of the same device type.
"""

import ctypes
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from chaosrun.observe.modes import outside_modes

MASK = (1 << 64) - 1
CHUNK_WORDS = 1 << 22
"""Words reduced at once on a device: bounds the weights' and the products' memory to 32 MiB each."""
SMALL_WORDS = 1 << 16
"""A tensor of at most so many on a device is reduced together with others: alone, each takes several launches."""
JOINED_WORDS = 1 << 19
"""Of small tensors that are reduced together; the weights of up to 16 such sets are kept, 4 MiB each at most."""

SPOTS = 16
SPOT_ELEMENTS = 1024

NONE_DIGEST = xxhash.xxh3_64_intdigest(b"None")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    value: str
    """64 bits over all tensors in order, 16 hex digits."""
    each: bytes
    """One little-endian uint32 per tensor."""


def tensor_digest(tensor: Tensor) -> int:
    """64-bit digest of raw bits, dtype and shape; for a tensor that wraps others, of those. Raises TypeError for tensors
    without content (meta, …)."""
    return _tensor_digests([tensor])[0]


def fingerprint(tensors: Sequence[Tensor | None]) -> Fingerprint:
    """Fingerprint of a sequence of tensors; None (a parameter without gradient) differs from every tensor.

    Synchronises once per device that holds tensors, for any number of them.
    """
    return combined(tensor_digests(tensors))


def tensor_digests(tensors: Sequence[Tensor | None]) -> list[int]:
    """The digest of each tensor, NONE_DIGEST for None."""
    present = iter(_tensor_digests([tensor for tensor in tensors if tensor is not None]))
    return [NONE_DIGEST if tensor is None else next(present) for tensor in tensors]


def combined(tensor_digests: Sequence[int]) -> Fingerprint:
    """The fingerprint of the tensors that have these digests."""
    each = np.array(tensor_digests, dtype="<u8")
    return Fingerprint(value=xxhash.xxh3_64_hexdigest(each.tobytes()), each=(each & 0xFFFFFFFF).astype("<u4").tobytes())


def digests(named: Mapping[str, object]) -> dict[str, str]:
    """One digest per leaf of a nested state dict, by its path ("state/0/exp_avg"), sorted by path. The path of a sharded tensor
    names this rank's part ("weight[8:16]").

    Tensors and arrays become 16 hex digits; scalars stay readable ("int:3", "float:0x1.8p+1"). Lists and tuples count as the
    same. Raises TypeError naming the path for a leaf or key of another type, ValueError when two leaves have one path.
    """
    leaves: dict[str, str] = {}
    tensors: dict[str, Tensor] = {}

    def visit(path: str, value: Any) -> None:
        if isinstance(value, Mapping):
            children: Iterable[tuple[Any, Any]] = value.items()
        elif isinstance(value, list | tuple):
            children = enumerate(value)
        else:
            if path in leaves:
                raise ValueError(f"two values of the state are called {path!r}")
            if isinstance(value, Tensor):
                path += part_of(value)
                tensors[path] = value
                leaves[path] = ""
            else:
                leaves[path] = _leaf_digest(path, value)
            return
        if not value:
            leaves[path] = "empty"
        for key, child in children:
            if not isinstance(key, str | int):
                raise TypeError(f"{path or 'state'}: a key of type {type(key).__name__} cannot be compared across restarts")
            visit(f"{path}/{key}" if path else str(key), child)

    if named:
        visit("", named)
    leaves.update(
        (path, f"{digest:016x}") for path, digest in zip(tensors, _tensor_digests(list(tensors.values())), strict=True)
    )
    return dict(sorted(leaves.items()))


def spots(value: Any) -> Any:
    """The state with each large tensor replaced by SPOTS evenly spread pieces of it. Their digest takes almost no time, and
    differs for the state of another step, or one whose update is still under way."""
    match value:
        case Mapping():
            return {key: spots(each) for key, each in value.items()}
        case list() | tuple():
            return [spots(each) for each in value]
        case Tensor() if value.layout is torch.strided and (inner := _inner(value)):
            return spots(inner)
        case Tensor() if value.layout is torch.strided and value.is_contiguous() and value.numel() > 2 * SPOTS * SPOT_ELEMENTS:
            flat = value.detach().view(-1)
            apart = (len(flat) - SPOT_ELEMENTS) // (SPOTS - 1)
            return flat.as_strided((SPOTS, SPOT_ELEMENTS), (apart, 1)).contiguous()
        case _:
            return value


def _leaf_digest(path: str, value: Any) -> str:
    match value:
        case None | bool():
            return str(value)
        case int():
            return f"int:{int(value)}"
        case float() if math.isnan(value):
            return f"float:nan:{struct.pack('>d', value).hex()}"
        case float():
            return f"float:{float(value).hex()}"
        case str() if len(value) <= 80:
            return f"str:{value}"
        case str():
            return f"str:{xxhash.xxh3_64_hexdigest(value.encode(errors='surrogatepass'))}"
        case bytes() | bytearray():
            return f"bytes:{xxhash.xxh3_64_hexdigest(value)}"
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            array = np.ascontiguousarray(value)
            header = f"{value.dtype.str} {value.shape}".encode()
            return xxhash.xxh3_64_hexdigest(array.tobytes(), seed=xxhash.xxh3_64_intdigest(header))
        case _:
            kind = f"{type(value).__module__}.{type(value).__qualname__}"
            raise TypeError(f"{path}: a {kind} in the state cannot be compared across restarts; return tensors, numbers, text")


def _tensor_digests(tensors: Sequence[Tensor]) -> list[int]:
    """Digests in order. Enqueues the work of all devices first, then waits once for each device."""
    results = [0] * len(tensors)
    seeds: dict[int, int] = {}
    words: dict[torch.device, list[tuple[int, Tensor]]] = {}
    with outside_modes(), torch.no_grad():
        for index, tensor in enumerate(tensors):
            if type(tensor) not in _WHOLE:
                # For a sharded tensor (DTensor), this rank's part.
                tensor = local_part(tensor)
            seed = _seed(tensor.dtype, tensor.shape)
            if inner := _inner(tensor):
                results[index] = xxhash.xxh3_64_intdigest(np.array(_tensor_digests(inner), dtype="<u8").tobytes(), seed=seed)
                continue
            dense = _dense(tensor)
            if dense.device.type == "cpu":
                results[index] = xxhash.xxh3_64_intdigest(_memory(dense), seed=seed)
                continue
            seeds[index] = seed
            words.setdefault(dense.device, []).append((index, _words(dense)))
        parts: dict[int, list[int]] = {index: [] for index in seeds}
        for owners, sums in [_sums_on_device(each) for each in words.values()]:
            for index, value in zip(owners, sums.tolist(), strict=True):
                parts[index].append(value)
        for index, seed in seeds.items():
            results[index] = _finish(parts[index], seed)
    return results


def _sums_on_device(words: Iterable[tuple[int, Tensor]]) -> tuple[list[int], Tensor]:
    """The partial sums of numbered tensors on one device, in one tensor there, and whose each is."""
    owners: list[int] = []
    sums: list[Tensor] = []
    joined: dict[torch.dtype, list[tuple[int, Tensor]]] = {}
    for index, each in words:
        if 0 < len(each) <= SMALL_WORDS:
            joined.setdefault(each.dtype, []).append((index, each))
        else:
            parts = _partial_sums(each, _weights)
            owners += [index] * len(parts)
            sums += parts
    for small in joined.values():
        for together in _sets(small):
            owners += [index for index, _ in together]
            sums.append(_joined_sums([each for _, each in together]))
    return owners, torch.cat([each.reshape(-1) for each in sums]) if sums else torch.empty(0)


def _sets(words: Iterable[tuple[int, Tensor]]) -> Iterator[list[tuple[int, Tensor]]]:
    """In order, as many at a time as JOINED_WORDS allows."""
    together: list[tuple[int, Tensor]] = []
    size = 0
    for index, each in words:
        if size + len(each) > JOINED_WORDS:
            yield together
            together, size = [], 0
        together.append((index, each))
        size += len(each)
    yield together


_WHOLE = frozenset({Tensor, torch.nn.Parameter})


def _inner(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the content of one without memory: a sparse one, or a subclass that wraps others (8-bit optimizer
    state); else none. For a sharded tensor its local part."""
    if tensor.layout is torch.sparse_coo:
        whole = tensor.detach().coalesce()
        return [whole.indices(), whole.values()]
    wraps = type(tensor) not in _WHOLE and tensor.layout is torch.strided and hasattr(tensor, "__tensor_flatten__")
    if not wraps or local_part(tensor) is not tensor:
        return []
    wrapper: Any = tensor
    names, _ = wrapper.__tensor_flatten__()
    return [getattr(tensor, name) for name in names]


def _dense(tensor: Tensor) -> Tensor:
    """A tensor whose memory is this one's logical elements in order: itself when it is contiguous, else a copy."""
    if tensor.layout is not torch.strided or tensor.device.type == "meta" or tensor.is_quantized:
        raise TypeError(f"cannot fingerprint a {tensor.layout} tensor of {tensor.dtype} on {tensor.device}")
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return tensor.detach().resolve_conj().resolve_neg().contiguous()


def _memory(dense: Tensor) -> ctypes.Array[ctypes.c_char]:
    """The memory of a CPU tensor, valid while the tensor lives. Avoids numpy for speed, as it runs for every tensor, twice a
    step."""
    address, size = dense.data_ptr(), dense.nbytes
    if not address and size:
        # A wrapper around other tensors, or one whose storage was freed.
        raise TypeError(f"cannot fingerprint a {type(dense).__name__} of {dense.dtype} without memory of its own")
    return (ctypes.c_char * size).from_address(address)


@lru_cache(maxsize=4096)
def _seed(dtype: torch.dtype, shape: torch.Size) -> int:
    return xxhash.xxh3_64_intdigest(f"{dtype} {tuple(shape)}".encode())


_WORD_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int32, 16: torch.int32}


def _words(dense: Tensor) -> Tensor:
    """The raw bits as integer words of the element's size (at most 32 bits), so that any storage offset is aligned."""
    return dense.detach().reshape(-1).view(_WORD_TYPES[dense.element_size()])


def _partial_sums(words: Tensor, weights: Callable[[torch.device], Tensor]) -> list[Tensor]:
    """Weighted sums mod 2^64 of the words, one 0-dim int64 tensor per chunk, on the words' device."""
    table = weights(words.device)
    return [(chunk * table[: len(chunk)]).sum() for chunk in words.split(len(table)) if len(chunk)]


def _joined_sums(words: list[Tensor]) -> Tensor:
    """The weighted sum mod 2^64 of each of these tensors, which are of one type and not empty: the same as alone."""
    if len(words) == 1:
        return _partial_sums(words[0], _weights)[0]
    weights, ends = _joined_weights(words[0].device, tuple(map(len, words)))
    running = (torch.cat(words) * weights).cumsum(0)
    return torch.diff(running[ends], prepend=running.new_zeros(1))


@lru_cache(maxsize=16)
def _joined_weights(device: torch.device, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """The weights of tensors of these lengths one after the other, and where each of them ends."""
    table, ends = _weights(device), [end - 1 for end in accumulate(lengths)]
    return torch.cat([table[:length] for length in lengths]), torch.tensor(ends, device=device)


def _finish(partial_sums: Sequence[int], seed: int) -> int:
    """Combine a tensor's chunk sums, each times its own odd weight, and mix dtype and shape into all bits."""
    total = 0
    for number, partial in enumerate(partial_sums):
        total += partial * (_splitmix(number) | 1)
    return xxhash.xxh3_64_intdigest((total & MASK).to_bytes(8, "little"), seed=seed)


def _splitmix(number: int) -> int:
    """SplitMix64 (Steele, Lea, Flood 2014): the number-th of a fixed sequence of well mixed 64-bit values."""
    mixed = (number + 1) * 0x9E3779B97F4A7C15 & MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & MASK
    return mixed ^ mixed >> 31


@lru_cache(maxsize=16)
def _weights(device: torch.device) -> Tensor:
    """Fixed random odd weights, the same on every machine (PCG64 streams are stable across numpy versions)."""
    drawn = np.random.PCG64(0x63686173).random_raw(CHUNK_WORDS) | np.uint64(1)
    return torch.from_numpy(drawn.view(np.int64)).to(device)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of the tensor: the tensor itself, or a DTensor's local part, in the same memory."""
    return getattr(tensor, "_local_tensor", tensor)


def _rank() -> int:
    """This process's rank, even after the script has destroyed its process group."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else int(os.environ["RANK"])


def part_of(tensor: torch.Tensor) -> str:
    """This rank's part of a sharded tensor, as an index into the whole: "[8:16, 0:4]"; "" for one that is whole here.

    Ranks with the same part hold the same bits.
    """
    if hasattr(tensor, "_fqns"):
        return f"[flat, rank {_rank()}]"
    placements = getattr(tensor, "placements", ())
    if all(placement.is_replicate() for placement in placements):
        return ""
    if not local_part(tensor).numel():
        # More ranks than rows. Two ranks with an empty part must not count as holding the same part.
        return f"[nothing, rank {_rank()}]"
    # As torch.distributed.checkpoint gets it.
    chunks = tensor.__create_chunk_list__()  # type: ignore[attr-defined]
    return "+".join(
        f"[{', '.join(f'{at}:{at + size}' for at, size in zip(chunk.offsets, chunk.sizes, strict=True))}]" for chunk in chunks
    )
