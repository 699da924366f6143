"""Plain values (numbers, texts, lists of them, generators) reachable from a script's variables. Changes nothing."""

import contextlib
import functools
import random
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from itertools import islice
from queue import Queue
from typing import Any, cast

import numpy
import torch
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle

from chaosrun.observe.contents import address_of
from chaosrun.observe.held import attributes
from chaosrun.observe.script_state import BYTES, MOST_CHILDREN, NUMBERS, PLAIN, SIMPLE, children, is_own, text_of

Values = dict[str, str]
"""Texts by path."""
STREAMS = (torch.Generator, numpy.random.Generator, numpy.random.RandomState, random.Random)
CONTAINERS = (list, tuple, deque, set, frozenset)
MAPPINGS = (dict, OrderedDict, defaultdict, Counter)
MEMORY = torch.Tensor | numpy.ndarray
FEW = 16
"""A longer list may hold samples."""
LARGEST_ARRAY = 1 << 16
"""Bytes of the largest array that is recorded, as a digest."""
MACHINERY = frozenset({"_io", "asyncio", "concurrent", "logging", "matplotlib", "subprocess", "threading"})
"""Packages whose objects hold how a program runs, or what it shows, not what it trains."""


def plain_values(roots: Mapping[str, object], saved: Collection[int], most: int, shared: Collection[int]) -> Values:
    """Values within `roots`, nearest first, items of longer lists last, as they may be samples; with small tensors and arrays,
    sizes of containers, values that an object has of its class, buffers of modules that are not torch's, what optimizers keep
    besides their state. `saved`: ids of objects to skip; `most`: limit on visited values and objects; `shared`: addresses of
    tensors to skip in dictionaries."""
    found: Values = {}
    met = set(saved)
    waiting: deque[tuple[str, Any]] = deque(roots.items())
    items: deque[tuple[str, Any]] = deque()
    while (waiting or items) and len(found) + len(met) < most + len(saved):
        path, value = (waiting or items).popleft()
        kind = type(value)
        with contextlib.suppress(Exception):  # an object of the script may raise any error
            if _is_whole(value) or is_number(value):
                found[path] = text_of(value) or ""
            elif kind in CONTAINERS and len(value) > MOST_CHILDREN:
                found[path] = f"{kind.__name__} of {len(value)}"
            elif id(value) not in met and _is_looked_into(kind) and not _is_parameter_group(value):
                met.add(id(value))
                after = items if kind in CONTAINERS and len(value) > FEW else waiting
                if kind in CONTAINERS or issubclass(kind, dict):
                    found[path] = f"{kind.__name__} of {len(value)}"  # of an empty one nothing else is told
                held = islice((*children(value), *_of_class(value), *_buffers(value)), MOST_CHILDREN)
                copies = shared if issubclass(kind, dict) else ()
                after.extend((f"{path}/{name}", each) for name, each in held if not _is_left_out(value, name, each, copies))
    return found


def _of_class(value: Any) -> Iterator[tuple[str, Any]]:
    """Plain values of its class that it has not yet replaced by its own."""
    if type(value).__module__ != "builtins" and is_own(type(value).__module__) and not isinstance(value, type):
        own = dict(attributes(value))
        held = ((key, each) for key, each in vars(type(value)).items() if key not in own and not key.startswith("__"))
        yield from ((key, each) for key, each in held if type(each) in PLAIN)


def _buffers(value: Any) -> Iterator[tuple[str, Any]]:
    """Those of a module of the script's or of a library's: a memory of earlier batches may be in no state dict."""
    if isinstance(value, torch.nn.Module) and not is_of_torch(value):
        yield from vars(value)["_buffers"].items()


def is_of_torch(module: torch.nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn.")


def generator_of(path: str) -> str:
    """The generator that contains this; empty if none does."""
    head, found, _ = path.removesuffix("/line").partition("/inside")
    return head if found or path.endswith("/line") else ""


def is_number(value: object) -> bool:
    """Whether it is a number, or a small array of them, in the memory of the CPU or of a GPU."""
    if type(value) in BYTES:
        return memoryview(cast("bytearray", value)).nbytes <= LARGEST_ARRAY
    if type(value) is numpy.ndarray:
        return value.nbytes <= LARGEST_ARRAY and not value.dtype.hasobject
    if type(value) is not torch.Tensor or not (value.is_cpu or value.is_cuda) or value.layout is not torch.strided:
        return False
    return value.nbytes <= LARGEST_ARRAY and value.grad_fn is None


def _is_left_out(value: Any, name: str, child: Any, shared: Collection[int]) -> bool:
    """Whether this child is a tensor of several numbers in a container, which may hold samples, or texts beside one (ids of the
    samples): of these only the count is told; the mode of a module; how much of a queue is done; what torch keeps with an
    optimizer: its defaults and hooks, a warning's count, a cache; what a loader's iterator counts and holds for one pass, all
    but its dataset and sampler; or a tensor at one of the `shared` addresses."""
    if shared and issubclass(type(child), torch.Tensor) and address_of(child) in shared:
        return True
    if type(value) in CONTAINERS:
        beside = islice(value, MOST_CHILDREN) if _is_of_texts(child) else ()
        return _is_of_several(child) or any(type(each) is numpy.ndarray or _is_of_several(each) for each in beside)
    if isinstance(value, Optimizer):
        of_torch = name in ("defaults", "_opt_called") or name.startswith("_optimizer_")
        return of_torch or (name[:1] == "_" and type(value).__module__.startswith("torch."))
    if isinstance(value, _BaseDataLoaderIter):
        return name not in ("_dataset", "_index_sampler") or type(child) in CONTAINERS
    return isinstance(value, {"training": torch.nn.Module, "unfinished_tasks": Queue}.get(name, ()))


def _is_of_several(value: object) -> bool:
    return type(value) is torch.Tensor and value.layout is torch.strided and value.numel() > 1


def _is_of_texts(value: Any) -> bool:
    return type(value) is str or (type(value) in CONTAINERS and all(type(each) is str for each in islice(value, MOST_CHILDREN)))


def _is_looked_into(kind: type) -> bool:
    """Whether to traverse it: an optimizer and a class always, whatever its metaclass."""
    return issubclass(kind, Optimizer | type) or not (issubclass(kind, MEMORY) or is_passed_over(kind))


def _is_parameter_group(value: Any) -> bool:
    """Whether it is an optimizer's parameter group; loading a state replaces the groups that an optimizer was made with and
    leaves the old ones unchanged."""
    parameters = value.get("params") if type(value) is dict else None
    return type(parameters) is list and len(parameters) > 0 and isinstance(parameters[0], torch.nn.Parameter)


@functools.lru_cache(maxsize=1 << 12)
def is_passed_over(kind: type) -> bool:
    """Whether it is a class; a loader; a hook's handle; a pool, a thread, a file; internal to torch.distributed, such as
    FSDP2's memory for whole parameters (its algorithms count steps); or an object that runs code when its class or an
    attribute is read, such as a proxy for a lazily loaded value."""
    runs_code = any(
        "__class__" in vars(base) or isinstance(vars(base).get("__getattribute__"), types.FunctionType)
        for base in kind.__mro__[:-1]
    )
    counts = kind.__module__.startswith("torch.distributed.algorithms.") or issubclass(
        kind, MEMORY | torch.nn.Module | Optimizer
    )
    of_torch = kind.__module__.startswith("torch.distributed.") and not counts
    runs = kind.__module__.partition(".")[0] in MACHINERY
    return runs or runs_code or of_torch or issubclass(kind, type | DataLoader | RemovableHandle)


def _is_whole(value: Any) -> bool:
    """Whether it is compared as one value."""
    kind = type(value)
    if kind in CONTAINERS:
        return 0 < len(value) <= MOST_CHILDREN and all(_is_plain(type(each)) for each in value)
    return _is_plain(kind) or kind in STREAMS or issubclass(kind, numpy.random.BitGenerator | SIMPLE)


def _is_plain(kind: type) -> bool:
    return kind in PLAIN or issubclass(kind, NUMBERS)
