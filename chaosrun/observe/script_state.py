"""A script's state outside its checkpoints: its variables (of its running functions and of the modules in or below its folder),
and the values reachable from them and from the prepared objects.

Changes nothing: only stored attributes are read, and no property or iterator is run. Values without bits to compare (a socket,
a lock, a Python module) are left out, as are the saved objects, which the caller names.
"""

import array
import contextlib
import contextvars
import ctypes
import decimal
import functools
import inspect
import itertools
import os
import random
import sys
import threading
import time
import traceback
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
import xxhash
from accelerate import Accelerator
from torch.nn.parallel import DistributedDataParallel

from chaosrun.observe.fingerprint import tensor_digest
from chaosrun.observe.held import COUNTING, MODULE_INTERNALS, OWN_FILES, attributes, file_of_module, is_of_the_job, locals_of

LARGEST_BYTES = 1 << 20
"""Size of the largest tensor or array that is looked at: larger ones are taken for data sets, not state."""
MOST_VALUES = 4000
MOST_CHILDREN = 256
MOST_OBJECTS = 20000
MOST_ITEMS = 1 << 16
OWN_ITERATION = tuple(kind.__iter__ for kind in (list, tuple, deque, set, frozenset))
"""Iteration methods that are safe to call: a class with one of its own might change something."""
SHOWN = 40
LIBRARIES = (
    *("torch", "accelerate", "chaosrun", "numpy", "ray", "logging", "threading", "torchdata", "datasets", "transformers"),
    "tqdm",
)
ITERATORS = frozenset(
    [
        *map(type, (iter([]), iter(()), iter(range(0)), reversed([]), iter(deque()), iter(set[str]()), iter(b""))),
        *map(type, (iter({}), iter({}.values()), iter({}.items()), iter("a"), iter("é"))),
        *COUNTING,
    ]
)
COMBINING = (itertools.product, itertools.permutations, itertools.combinations, itertools.combinations_with_replacement)
NUMBERS = (numpy.number, numpy.bool_, complex, decimal.Decimal)
"""Besides Python's own."""
BYTES = (array.array, bytearray)
SIMPLE = ctypes._SimpleCData
"""A single value of ctypes; one that is no number may be an address, which every process has its own of."""
DAY_S = 86400.0
PLAIN = (bool, int, float, str, bytes, type(None))


def script_state(roots: Mapping[str, object], *, known: Collection[int] = (), most: int = MOST_VALUES) -> dict[str, str]:
    """At most `most` values reachable from `roots`, by their paths, nearest first: readable where they are short, else digests.
    `known`: ids of objects to pass over, such as parameters and buffers that a checkpoint holds."""
    found: dict[str, str] = {}
    met = set(known)
    waiting = deque((name, value) for name, value in roots.items())
    while waiting and len(found) < most and len(met) < len(known) + MOST_OBJECTS:
        path, value = waiting.popleft()
        if id(value) in met:
            continue
        try:
            text = text_of(value)
            held = [] if text is not None else list(itertools.islice((*_tensors_of(value), *children(value)), MOST_CHILDREN))
        except Exception:  # an object of the script may raise any error, which must not reach the training
            met.add(id(value))
            continue
        if text is not None:
            found[path] = text
            continue
        met.add(id(value))
        waiting.extend((f"{path}/{name}", child) for name, child in held)
    return found


def script_roots(accelerator: Accelerator) -> dict[str, object]:
    """The variables of the script's running functions, its globals and its own modules; and the prepared objects."""
    roots: dict[str, object] = of_functions() | of_modules(of_the_job(list(sys.modules)))
    for what, prepared in (("model", accelerator._models), ("optimizer", accelerator._optimizers)):
        for number, value in enumerate(prepared):
            roots.setdefault(f"{what} {number}", getattr(value, "optimizer", value))
    for number, scheduler in enumerate(accelerator._schedulers):
        roots.setdefault(f"scheduler {number}", scheduler.scheduler)
    return roots


def is_own(module: str) -> bool:
    """Whether the module is the script's own, or from a package that chaosrun does not know."""
    return module.partition(".")[0] not in LIBRARIES


def text_of(value: Any) -> str | None:
    """The text of a value that is compared as a whole; None if it holds others or is of an unknown type."""
    match value:
        case str() | bytes() if len(value) > LARGEST_BYTES:
            return "large"
        case None | bool() | int() | str() | bytes() | complex():
            return _short(repr(value))
        case float():
            # A clock's time is not state.
            return "a time" if abs(value - time.time()) < DAY_S else _short(repr(value))
        case decimal.Decimal():
            return _short(str(value))
        case numpy.number() | numpy.bool_():
            return _short(repr(value))
        case SIMPLE() if isinstance(value.value, bool | int | float) and not isinstance(value, ctypes.c_void_p):
            return _short(repr(value))
        case torch.Tensor():
            return _of_tensor(value)
        case numpy.ndarray() | numpy.generic() if not value.dtype.hasobject:
            kind = "records" if value.dtype.names else value.dtype
            return _digest(f"{kind}{list(value.shape)}", value.tobytes()) if value.nbytes <= LARGEST_BYTES else "large"
        case array.array() | bytearray() if type(value) in BYTES:
            small = memoryview(value).nbytes <= LARGEST_BYTES
            return _digest(f"{type(value).__name__}[{len(value)}]", bytes(value)) if small else "large"
        case torch.Generator():
            return _digest("torch.Generator", value.get_state().numpy().tobytes())
        case numpy.random.BitGenerator():
            return _digest(type(value).__name__, repr(value.state).encode())
        case numpy.random.Generator():
            return _digest("numpy Generator", repr(value.bit_generator.state).encode())
        case numpy.random.RandomState():
            return _digest("numpy RandomState", repr(value.get_state()).encode())
        case random.Random():
            return _digest("random.Random", repr(value.getstate()).encode())
        case list() | tuple() | deque() | set() | frozenset() if type(value).__iter__ not in OWN_ITERATION:
            return "a container"
        case list() | tuple() | deque() | set() | frozenset() if len(value) > MOST_ITEMS:
            return "large"
        case list() | tuple() | deque() | set() | frozenset() if all(isinstance(each, (*PLAIN, *NUMBERS)) for each in value):
            items = sorted(map(repr, value)) if isinstance(value, set | frozenset) else list(map(repr, value))
            return (
                _short(f"{type(value).__name__} of {len(items)}: {', '.join(items)}") if items else f"{type(value).__name__}()"
            )
        case _:
            return None


def _of_tensor(value: torch.Tensor) -> str:
    """Readable if it is a single number, else a digest."""
    large = value.numel() * value.element_size() > LARGEST_BYTES  # nbytes is not defined for sparse tensors
    if large or value.device.type == "meta":
        return "large"
    if value.numel() == 1 and value.layout is torch.strided:
        return f"tensor {value.item()!r}"
    try:
        here = value.cpu() if value.is_cuda else value  # one call; a digest on a GPU is several
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)} {tensor_digest(here):016x}"
    except TypeError:
        return "a tensor"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 20]}… {xxhash.xxh3_64_hexdigest(text.encode(errors='replace'))}"


def _digest(what: str, data: bytes) -> str:
    return f"{what} {xxhash.xxh3_64_hexdigest(data)}"


def _tensors_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        for tensors in ("_parameters", "_buffers"):
            yield from vars(value)[tensors].items()


def children(value: Any) -> Iterator[tuple[str, Any]]:
    match value:
        case types.ModuleType() if is_made_by_hand(value):
            yield from ((key, child) for key, child in vars(value).items() if _counts(key, child))
        case types.ModuleType() | torch.device() | torch.dtype():
            return
        case Accelerator():
            yield from _put_on(value)
        case DistributedDataParallel():
            yield "module", value.module
        case torch.nn.Module():
            yield "training", value.training
            yield from ((key, child) for key, child in vars(value).items() if key not in MODULE_INTERNALS)
            yield from vars(value)["_modules"].items()
            for hooks in ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks"):
                yield from ((f"{hooks[1:]}/{number}", hook) for number, hook in enumerate(vars(value)[hooks].values()))
        case Mapping() if (of_python := type(value).__module__ in ("builtins", "collections")) or isinstance(value, dict):
            kind: Any = next((each for each in (OrderedDict, dict) if isinstance(value, each)), type(value))
            for number, (key, child) in enumerate(kind.items(value)):  # a class may have its own items()
                yield (str(key) if isinstance(key, str | int) else str(number)), child
            yield from () if of_python else attributes(value)
        case list() | tuple() | deque() if type(value).__iter__ in OWN_ITERATION:
            yield from ((str(number), child) for number, child in enumerate(value))
        case types.GeneratorType():
            yield "line", value.gi_frame and value.gi_frame.f_lasti
            yield from locals_of(value.gi_frame).items() if value.gi_frame else ()
            if value.gi_yieldfrom is not None:
                yield "inside", value.gi_yieldfrom
        case types.CoroutineType():
            yield "at", value.cr_frame and value.cr_frame.f_lasti
            yield from locals_of(value.cr_frame).items() if value.cr_frame else ()
            yield "awaits", value.cr_await
        case types.MethodType():
            yield "self", value.__self__
        case contextvars.ContextVar():
            yield "value", _of_context(value)
        case threading.local():
            yield from vars(value).items()
        case types.FunctionType():
            yield from _of_function(value)
        case functools.partial():
            yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
        case type() if is_own(value.__module__) and value.__module__ != "builtins":
            yield from ((key, child) for key, child in vars(value).items() if not key.startswith("__") and not callable(child))
        case type():
            pass
        case _ if type(value) in ITERATORS:
            with contextlib.suppress(TypeError):
                parts = value.__reduce__()[1:]
                if type(value) in COMBINING and len(parts) == 1:
                    parts = (*parts, None)  # before the first item
                yield from ((f"at/{number}", part) for number, part in enumerate(parts) if not isinstance(part, Callable))
        case _:
            yield from _of_object(value)


def _of_context(value: contextvars.ContextVar[Any]) -> Any:
    with contextlib.suppress(LookupError):  # a variable that has no value yet, nor a default
        return value.get()


def _of_function(value: types.FunctionType) -> Iterator[tuple[str, Any]]:
    if not is_own(value.__module__ or "") or value.__code__.co_filename.startswith(OWN_FILES):
        return  # by its file as well: functools.wraps gives our hook the module of the wrapped function
    names = value.__code__.co_freevars
    for name, cell in zip(names, value.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):  # a variable that has no value yet
            yield name, cell.cell_contents
    yield from (("defaults", value.__defaults__), ("keyword defaults", value.__kwdefaults__))
    yield from vars(value).items()


def _put_on(value: Any) -> Iterator[tuple[str, Any]]:
    """What a script has put on an object of accelerate's: public attributes that no method of its class speaks of."""
    names = _names_in_methods(type(value))
    return ((key, child) for key, child in getattr(value, "__dict__", {}).items() if key[:1] != "_" and key not in names)


@functools.cache
def _names_in_methods(kind: type) -> frozenset[str]:
    methods = (each for base in kind.__mro__ for each in vars(base).values() if isinstance(each, types.FunctionType))
    return frozenset(name for each in methods for name in each.__code__.co_names)


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    info = inspect.getattr_static(kind, "cache_info", None)
    # Of functools (a method of the script might have effects), around a function that is not a library's.
    if isinstance(info, types.MethodDescriptorType) and is_own(value.__module__ or ""):
        yield "cache", info(value).currsize  # how often it was asked begins anew in every process
    top = kind.__module__.partition(".")[0]
    if top in ("ray", "logging", "threading", "chaosrun", "accelerate", "_thread", "builtins"):
        yield from _put_on(value) if top == "accelerate" else ()
        return
    parts = attributes(value)
    if top == "tqdm":  # a progress bar: its times and counts are for people
        parts = (part for part in parts if part[0] == "iterable")
    elif top == "torch":  # a loader's iterator draws its seed for each pass
        parts = (part for part in parts if part[0] != "_base_seed")
    yield from parts
    if is_own(kind.__module__):
        yield "class", kind


def of_functions() -> dict[str, Any]:
    """The variables of the script itself and of its running functions; for equal names the innermost one."""
    found = _of_module("", sys.modules["__main__"])
    # From the caller on: a function that lists its own frame is freed, with all it has found, only by the garbage collector.
    for frame, _ in reversed([*traceback.walk_stack(sys._getframe(1))]):
        if is_of_the_job(frame.f_code.co_filename):
            found |= {_named(key, value): value for key, value in locals_of(frame).items() if _counts(key, value)}
    return found


def of_modules(names: Iterable[str]) -> dict[str, Any]:
    """The variables of these modules of the job, each called `module.variable`."""
    return {key: value for name in names for key, value in _of_module(f"{name}.", sys.modules[name]).items()}


def of_the_job(names: Iterable[str]) -> list[str]:
    """Those of these modules that are in the job's folder, without the script itself."""
    folders = tuple(os.path.join(os.path.abspath(folder), "") for folder in (os.curdir, *sys.path[:1]))
    found: dict[str, None] = {}
    for name in names:
        module = sys.modules.get(name)
        file = (file_of_module(module) if isinstance(module, types.ModuleType) else None) or ""
        if name not in ("__main__", "__mp_main__") and file.startswith(folders) and is_of_the_job(file):
            found[name] = None
    return [*found]


def _named(key: str, value: object) -> str:
    """Name variables; each `self` of methods that call each other is named after its class."""
    return f"{type(value).__name__}.self" if key == "self" else key


def _of_module(prefix: str, module: types.ModuleType) -> dict[str, Any]:
    return {prefix + key: value for key, value in vars(module).items() if _counts(key, value)}


def _counts(name: str, value: object) -> bool:
    """Whether a variable counts: not modules, nor functions without mutable state, of which there may be hundreds."""
    if name.startswith("__"):
        return False
    if type(value) is types.FunctionType:
        defaults = (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        return bool(value.__closure__ or vars(value)) or not all(type(each) in PLAIN for each in defaults)
    return not issubclass(type(value), types.ModuleType) or is_made_by_hand(value)


def is_made_by_hand(value: object) -> bool:
    """Whether it is a module that no import has loaded, nor a library made (nanobind and pybind11 do so below what they are
    compiled to): one that the script uses as a name space."""
    if type(value) is not types.ModuleType:
        return False
    loaded = vars(value).get("__spec__") is not None or vars(value).get("__file__") is not None
    above = itertools.accumulate(value.__name__.split(".")[:-1], "{}.{}".format)
    files = (file_of_module(sys.modules.get(each)) for each in above)
    of_library = any(file is not None and not is_of_the_job(file) for file in files)
    return not (loaded or of_library) and is_own(value.__name__) and value is not sys.modules["__main__"]
