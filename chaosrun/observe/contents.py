"""The digest of a batch of any types, over all its bytes; and the tensors in it."""

import argparse
import contextlib
import functools
import itertools
import logging
import os
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash
from torch.utils.data import Dataset, Sampler
from torch.utils.data.dataloader import _BaseDataLoaderIter

from chaosrun.observe.fingerprint import local_part, tensor_digest
from chaosrun.observe.held import attributes

MOST_ENTRIES = 512
DEEPEST = 9
SHORT = 24
PLAIN_DEPTH = 2
"""A value nested deeper than this that is no tensor of numbers belongs to a library."""
PLACES = (
    *("data", "loader", "sampler", "itera", "shard", "stream", "shuffle", "generator", "loops", "progress"),
    *("time", "elapsed"),
    *("argv", "args", "config", "hparams", "resum", "restart", "attempt"),
)
"""Parts of the names of entries that are left out."""
ARGUMENTS = frozenset({"opt", "opts", "option", "options", "cfg", "cfgs", "flags", "cli"})
"""Names of what a script was started with, where it holds no tensors: an optimizer may be called so, too."""
STATE_BYTES = (16, 5056)
"""Sizes of the state of torch's generators, on a GPU and on the CPU."""

OWN_FOLDER = "{leg}/"
"""Replaces the leg's own folder in paths."""

MOST_OBJECTS = 4096
"""One digest looks into so many objects (a thread pool may hold half the program); further ones count by their type."""
MOST_NESTED = 100
OUTER = 2
"""Levels of containers around a call's inputs: one for positional and named together, one for each of the two."""
NAMED = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, logging.Logger)
"""Objects that lead to the whole program: only their names count."""
OPAQUE = (torch.nn.Module, torch.device, torch.dtype, torch.utils.data.DataLoader, type)
"""Only the type of such an object counts."""
TOLD_BY_STATE = (torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
"""Where such an object is pickled as a whole, its state_dict counts."""

_PLAIN = frozenset({str, bytes, int, float, bool, complex, type(None), numpy.ndarray})
_CONTAINERS = (dict, list, tuple)
_NOT_IN_A_BATCH = (*OPAQUE, *NAMED, *TOLD_BY_STATE, Dataset, Sampler, _BaseDataLoaderIter, numpy.generic)
"""Objects that hold no tensors of the batch that they are in."""

Components = Mapping[str, Mapping[str, object]]
"""A training's state, by component and by name inside it."""


def input_digest(inputs: Any) -> str:
    """The content's digest. If the batch holds more than tensors and arrays, a second digest, of those alone, follows after
    "/"."""
    digest = _Digest()
    digest.visit(inputs)
    both = digest.others and digest.tensors.digest() != xxhash.xxh3_64().digest()
    return f"{digest.hasher.hexdigest()}/{digest.tensors.hexdigest()}" if both else digest.hasher.hexdigest()


def content_digest(content: Any) -> str:
    """A digest of all bytes of a batch or an item: tensors and arrays by content, dtype and shape, plain values by their text.

    Objects are traversed, each once. An object without attributes counts by its type (a repr may hold an address), a function
    or module by its name, an optimizer or scheduler by its state_dict. A tensor without plain memory (nested, quantized,
    compressed sparse, a subclass around others) counts by its parts; if they are unknown (meta, mkldnn, a library's own), by
    type, dtype and shape, so that no batch raises. A path below the leg's own folder counts relative to it.
    """
    digest = _Digest()
    digest.visit(content)
    return digest.hasher.hexdigest()


class _Digest:
    def __init__(self) -> None:
        self.hasher, self.tensors = xxhash.xxh3_64(), xxhash.xxh3_64()
        self.others = False
        """Something else than tensors, and the outer containers around them, was found."""
        self._inside: set[int] = set()
        """Ids of the objects that are being looked into."""
        self._known: dict[int, tuple[Any, str]] = {}
        """By id, objects (so that they stay alive) and their digests."""
        self._folders = _run_folders(os.environ.get("CHAOSRUN_OUTPUT", ""))

    def visit(self, value: Any) -> None:
        match value:
            case torch.Tensor() if value.grad_fn is not None:
                # Computed, perhaps by another module: its values are not part of a batch.
                self.hasher.update(f"{value.dtype}{tuple(value.shape)}".encode())
            case torch.Tensor():
                self._add_tensor(value)
            case numpy.ndarray() | numpy.generic() if not value.dtype.hasobject:
                content = f"{value.dtype.str}{value.shape}".encode() + numpy.ascontiguousarray(value).tobytes()
                self.hasher.update(content)
                self.tensors.update(content)
            case str() | bytes():
                self._add(self._without_run_folder(repr(value)))
            case int() | float() | complex() | None:
                self._add(repr(value))
            case _ if isinstance(value, OPAQUE):
                self._add(type(value).__qualname__)
            case _ if isinstance(value, NAMED):
                self._add(str(getattr(value, "__qualname__", None) or getattr(value, "__name__", value)))
            case os.PathLike():
                self._add(self._without_run_folder(repr(os.fspath(value))))
            case _ if id(value) in self._inside or len(self._inside) > MOST_NESTED:
                self._add("<")
            case _:
                self._inside.add(id(value))
                self._look_into(value)
                self._inside.discard(id(value))

    def _look_into(self, value: Any) -> None:
        match value:
            case Mapping():
                self._open(f"{{{len(value)}")
                for key, item in value.items():  # iterated itself, a TensorDict gives its rows
                    self.visit(key)
                    self.visit(item)
            case list() | tuple():
                self._open(f"[{len(value)}")
                for item in value:
                    self.visit(item)
            case set() | frozenset():
                # The order of a set does not count.
                self._add(f"({len(value)}" + "".join(sorted(map(content_digest, value))))
            case numpy.ndarray():
                self._add(f"{value.dtype.str}{value.shape}")
                self.visit(value.tolist())
            case _:
                self._add(type(value).__qualname__ + self._of_object(value))

    def _add_tensor(self, tensor: torch.Tensor) -> None:
        try:
            digest = tensor_digest(tensor).to_bytes(8, "little")
            self.hasher.update(digest)
            self.tensors.update(digest)
        except (TypeError, RuntimeError, NotImplementedError):
            self._add(_described(tensor))
            if len(self._inside) <= MOST_NESTED:
                self._inside.add(id(tensor))
                self.visit(_parts(tensor))
                self._inside.discard(id(tensor))

    def _of_object(self, value: Any) -> str:
        if id(value) not in self._known and len(self._known) < MOST_OBJECTS:
            outer, self.hasher = self.hasher, xxhash.xxh3_64()
            self._known[id(value)] = value, ""
            self.visit(value.state_dict() if isinstance(value, TOLD_BY_STATE) else dict(attributes(value)))
            self._known[id(value)] = value, self.hasher.hexdigest()
            self.hasher = outer
        return self._known[id(value)][1] if id(value) in self._known else ""

    def _without_run_folder(self, text: str) -> str:
        for folder in self._folders:
            text = text.replace(folder, OWN_FOLDER)
        return text

    def _open(self, text: str) -> None:
        self.others |= len(self._inside) > OUTER
        self.hasher.update(text.encode())

    def _add(self, text: str) -> None:
        self.others = True
        self.hasher.update(text.encode(errors="surrogatepass"))


@functools.lru_cache(maxsize=4)
def _run_folders(output: str) -> tuple[str, ...]:
    """The folder of the leg that has this output folder, as named and with links resolved. It differs between legs."""
    if not os.path.isabs(output):
        return ()
    leg = os.path.dirname(output)
    return tuple(f"{place}{os.sep}" for place in dict.fromkeys((leg, os.path.realpath(leg))) if place != os.sep)


def _described(tensor: torch.Tensor) -> str:
    """Type, layout, dtype and shape. "*" stands for a ragged dimension, whose symbol differs from process to process."""
    try:
        shape = [size if type(size) is int else "*" for size in tensor.shape]
    except RuntimeError:
        # A nested tensor with strides: its sizes are among its parts.
        shape = []
    return f"{type(tensor).__qualname__} {tensor.layout} {tensor.dtype} {shape}"


def _parts(tensor: torch.Tensor) -> Any:
    """The parts of a tensor without plain memory; empty if they are unknown."""
    try:
        with torch.no_grad():
            return _known_parts(tensor)
    except (TypeError, RuntimeError, NotImplementedError, AttributeError):
        return ()


def _known_parts(tensor: torch.Tensor) -> Any:
    own: Any = tensor
    if tensor.layout is torch.jagged:
        # It also caches the minimum and maximum length after their first use.
        return [own.values().detach(), own.offsets(), own.lengths()]
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = own.__tensor_flatten__()
        return {name: getattr(tensor, name) for name in names}
    if tensor.is_nested:
        return [each.detach() for each in tensor.unbind()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values().detach()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values().detach()]
    if tensor.is_quantized and tensor.qscheme() in (torch.per_tensor_affine, torch.per_tensor_symmetric):
        return [tensor.int_repr(), tensor.q_scale(), tensor.q_zero_point()]
    if tensor.is_quantized:
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        return [tensor.int_repr(), scales, zeros, tensor.q_per_channel_axis()]
    # A subclass may keep other tensors as plain attributes, as MaskedTensor does.
    return {name: each for name, each in vars(tensor).items() if isinstance(each, torch.Tensor)}


def contents(saved: Any) -> dict[str, str]:
    """The contents of a saved state, by path: a plain value as its text, all else as a digest. The paths are as deep as
    MOST_ENTRIES allows; everything below one path shares a digest. Left out are values that may differ between equal states
    (file paths, clocks, random generators, positions of loaders and streams) and those that differ by restart (arguments,
    attempt counts): their effects show where they are used."""
    leaves = list(_leaves(saved, ()))
    for depth in (DEEPEST, 3, 2, 1):
        found: dict[str, list[str]] = {}
        for path, text in leaves:
            found.setdefault("/".join(map(str, path[:depth])), []).append(text)
        if len(found) <= MOST_ENTRIES:
            break
    return {name: texts[0] if len(texts) == 1 else content_digest(texts) for name, texts in found.items()}


def _is_stream(value: Any) -> bool:
    """Whether this is a random generator's state, in the form of torch, numpy or Python."""
    match value:
        case torch.Tensor():
            return value.dtype == torch.uint8 and value.numel() in STATE_BYTES
        # By type first: whether a tensor of several numbers equals 3 is an error.
        case [str("MT19937"), *_] | [int(3), [*_], _] | {"bit_generator": _}:
            return True
        case _:
            return False


def _is_of_a_start(value: Any, path: tuple[Any, ...]) -> bool:
    """Whether these are command-line arguments, by type or name."""
    if isinstance(value, argparse.Namespace) and len(path) < PLAIN_DEPTH:
        return True
    return bool(path) and str(path[-1]).lower() in ARGUMENTS and next(tensors_in(value), None) is None


def _leaves(value: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], str]]:
    if isinstance(value, TOLD_BY_STATE):
        value = value.state_dict()
    match value:
        case torch.Tensor() if value.is_floating_point() and value.ndim:
            yield path, content_digest(value)
        case _ if _is_stream(value) or any(word in str(path[-1:]).lower() for word in PLACES):
            pass
        case _ if _is_of_a_start(value, path):
            pass
        case Mapping() if len(path) < DEEPEST:
            for key, item in value.items():
                yield from _leaves(item, (*path, key))
        case list() | tuple() if len(path) < DEEPEST and not all(isinstance(each, int | float) for each in value):
            for number, each in enumerate(value):
                yield from _leaves(each, (*path, number))
        case str() if os.sep in value:
            pass
        case _ if len(path) > PLAIN_DEPTH:
            pass
        case torch.Tensor() if value.ndim == 0 and value.device.type == "cpu":
            yield from _leaves(value.item(), path)
        case float() if value.is_integer() and abs(value) < 1 << 53:
            # Loading may turn counters into tensors and back.
            yield path, str(int(value))
        case None | bool() | int() | float() | str() if len(str(value)) <= SHORT:
            yield path, str(value)
        case _:
            yield path, content_digest(value)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    return (each for each in leaves(value) if isinstance(each, torch.Tensor))


def leaves(value: Any) -> Iterator[Any]:
    """The values of a state dict or a batch, at any depth of lists and mappings."""
    match value:
        case Mapping():
            for item in value.values():
                yield from leaves(item)
        case list() | tuple():
            for item in value:
                yield from leaves(item)
        case _:
            yield value


def batch_tensors(batch: Any) -> list[torch.Tensor]:
    """The tensors of a batch, also those in attributes of its objects (a graph, images with their mask), nearest first. Reads
    what they store, by their types alone: an object may load something when it is asked. Raises nothing."""
    found: list[torch.Tensor] = []
    values, met, objects = [batch], set[int](), 0
    for value in values:
        with contextlib.suppress(Exception):  # of any class
            kind = type(value)
            if kind in _PLAIN or id(value) in met:
                continue
            met.add(id(value))
            if issubclass(kind, torch.Tensor):
                found.append(value)
                continue
            if kind is types.MappingProxyType:
                values += itertools.islice(value.values(), MOST_OBJECTS - len(values))
                continue
            if container := next((each for each in _CONTAINERS if issubclass(kind, each)), None):
                inside = dict.values(value) if container is dict else container.__iter__(value)
                values += itertools.islice(inside, MOST_OBJECTS - len(values))
            if kind not in _CONTAINERS and objects < MOST_ENTRIES and not issubclass(kind, _NOT_IN_A_BATCH):
                objects += 1
                values += (part for _, part in itertools.islice(attributes(value), MOST_OBJECTS - len(values)))
    return found


def address_of(value: torch.Tensor | numpy.ndarray) -> int:
    """The address of the memory of a tensor, or of what an array is a view of; 0 for a tensor that has no memory itself."""
    while isinstance(value, numpy.ndarray):
        if not isinstance(value.base, torch.Tensor | numpy.ndarray):
            return value.__array_interface__["data"][0]
        value = value.base
    tensor = local_part(value)
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        return 0
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # a subclass around other tensors, as MaskedTensor is
        return 0
