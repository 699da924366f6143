"""Whether a training keeps state of its own beside what a checkpoint holds: one digest of all of it, and what has none.

Stricter than `script_state`, whose eyes it has: here nothing may be left out in silence. What cannot be looked into, or is too
much to look at, is named, and an early verdict is refused for it. Looked at are the variables of the script's functions that
are being run, of its modules, and of everything of its making that the garbage collector knows: closures, generators, instances
and iterators, wherever they are kept. Changes nothing.
"""

import enum
import functools
import gc
import inspect
import io
import itertools
import logging
import os
import re
import socket
import sys
import sysconfig
import threading
import types
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from torch.utils.data import IterableDataset, Sampler

from chaosrun.observe.fingerprint import tensor_digest
from chaosrun.observe.script_state import children, text_of
from chaosrun.observe.state import ObservedState

MOST_OBJECTS = 50_000
MOST_BYTES = 1 << 30
"""Of tensors and arrays that are looked at."""
SHOWN = 4
LOSSY = frozenset({"large", "a container", "a tensor"})
"""Texts of `script_state` that two values may have in common."""
PACKAGE = f"{Path(__file__).parent.parent}/"
INSTALLED = (*(f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")), PACKAGE, "<frozen")
OURS = ("chaosrun", "accelerate", "logging", "ray")
"""Packages whose objects are looked at by others (`observe.state`), or change nothing of a training."""
STATELESS = (
    *(types.ModuleType, types.BuiltinFunctionType, types.WrapperDescriptorType, types.MethodDescriptorType, types.CodeType),
    *(types.MethodWrapperType, types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
    *(types.GenericAlias, types.UnionType, types.EllipsisType, types.NotImplementedType, property, staticmethod, classmethod),
    *(torch.device, torch.dtype, torch.layout, torch.memory_format),
    *(logging.Logger, type(threading.Lock()), type(threading.RLock()), weakref.ref, object),
)
"""What keeps nothing, or what its text tells; `object` itself and no subclass of it."""
SAMPLERS = inspect.getfile(Sampler)
"""Its generators hold the order of the rest of the epoch."""
PLAIN = (torch.Tensor, numpy.ndarray, list, tuple, set, frozenset, deque, str, bytes, int, float)
"""What is compared as a whole: not where it has attributes, too."""
COUNTING = (enumerate, zip, map, itertools.count, itertools.cycle, itertools.islice, itertools.chain)
"""Iterators that a loop may go by, kept on the stack of the function that runs."""
HOOKS_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
NAMESPACES = ("builtins", "torch", "numpy", "random", "math", "os", "sys", "accelerate")
"""Modules of others into which a script may put names of its own."""
OF_AN_ATTEMPT = ("CHAOSRUN_", "MASTER_", "TORCHELASTIC_", "TORCH_DISTRIBUTED_DEBUG", "PYTEST_CURRENT_TEST")
"""Beginnings of environment variables that differ from attempt to attempt."""


class OwnState(NamedTuple):
    digest: str
    unseen: tuple[str, ...]
    """What has no digest, in words."""


class Surroundings(NamedTuple):
    """What a script finds when it begins."""

    environment: Mapping[str, str]
    names: frozenset[tuple[str, str]]

    @classmethod
    def now(cls) -> "Surroundings":
        modules = [(name, sys.modules[name]) for name in NAMESPACES if name in sys.modules]
        return cls(dict(os.environ), frozenset((name, key) for name, module in modules for key in vars(module)))


def own_state(state: ObservedState, before: Surroundings) -> OwnState:
    """Of this process, between two steps. `before`: as it was before the script's first line."""
    try:
        return _own_state(state, before)
    except Exception as error:  # the training must not hear of what cannot be looked at
        return OwnState("", (f"{type(error).__name__}: {error}",))


def _own_state(state: ObservedState, before: Surroundings) -> OwnState:
    accelerator = state.accelerator
    look = _Look(known={id(state), id(accelerator), *_saved(state)})
    for name, value in _roots(state).items():
        look.at(name, value)
    for name, key in Surroundings.now().names - before.names:
        value = vars(sys.modules[name]).get(key)
        if not isinstance(value, types.ModuleType):
            look.at(f"{name}.{key}", value)
    look.at_hidden()
    look.text("torch", _settings())
    changed = {key: value for key, value in os.environ.items() if before.environment.get(key) != value}
    look.text("environment", str(sorted((k, v) for k, v in changed.items() if not k.startswith(OF_AN_ATTEMPT))))
    for name, parameter in state.parameters():
        look.text(f"gradient of {name}", "None" if parameter.grad is None else f"{tensor_digest(parameter.grad):016x}")
    look.unseen += _elsewhere(accelerator)
    return OwnState(look.digest(), tuple(dict.fromkeys(look.unseen))[:SHOWN])


class _Look:
    """At values and what they hold, each once."""

    def __init__(self, known: set[int]) -> None:
        self._met = known
        self._kept: list[Any] = []
        """What was made while looking, so that no other object gets its id."""
        self._texts: list[str] = []
        self._bytes = self._objects = 0
        self.unseen: list[str] = []

    def text(self, path: str, text: str) -> None:
        self._texts.append(f"{path}={text}")

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest("\n".join(sorted(self._texts)).encode(errors="replace"))

    def at(self, root: str, value: Any) -> None:
        waiting = deque([(root, value)])
        while waiting:
            path, value = waiting.popleft()
            if id(value) in self._met:
                continue
            self._objects += 1
            if self._objects > MOST_OBJECTS:
                return self.unseen.append(f"more than {MOST_OBJECTS} objects")
            try:
                text = self._text(value)
                if text is not None:
                    self.text(path, text)
                    continue
                held = list(_held(value))
            except Exception as error:  # whatever an object of the script raises when it is looked at: it cannot be looked at
                self.unseen.append(f"{path} ({type(value).__name__}: {type(error).__name__})")
                continue
            self._met.add(id(value))
            self._kept.append(value)
            if not held and not _keeps_nothing(value):
                self.unseen.append(f"{path} ({type(value).__module__}.{type(value).__qualname__})")
            self.text(path, f"{type(value).__qualname__} of {len(held)}")
            waiting.extend((f"{path}/{name}", child) for name, child in held)

    def at_hidden(self) -> None:
        """What nothing led to: kept by a library, or on the stack of a running function."""
        before = self._texts
        told: list[str] = []
        for value in list(_of_the_script()):
            if id(value) in self._met:
                continue
            self._texts = []
            self.at(_name(value), value)
            told.append(self.digest())
        self._texts = [*before, f"hidden={sorted(told)}"]

    def _text(self, value: Any) -> str | None:
        if isinstance(value, enum.Enum):
            return f"{type(value).__qualname__}.{value.name}"
        if isinstance(value, io.IOBase | socket.socket) and value not in (sys.stdin, sys.stdout, sys.stderr):
            raise ValueError("an open file, pipe or connection")
        if isinstance(value, PLAIN) and getattr(value, "__dict__", None):
            raise ValueError("attributes of its own")
        if isinstance(value, torch.Tensor) and value.numel() > 1:
            self._weigh(value.numel() * value.element_size())
            return f"{tensor_digest(value):016x}"
        if isinstance(value, numpy.ndarray) and not value.dtype.hasobject:
            self._weigh(value.nbytes)
            return f"{value.dtype}{value.shape} {xxhash.xxh3_64_hexdigest(numpy.ascontiguousarray(value).tobytes())}"
        if isinstance(value, PurePath | range | slice | re.Pattern | numpy.dtype):
            return repr(value)
        text = text_of(value)
        if text in LOSSY:
            raise ValueError(text)
        return text

    def _weigh(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MOST_BYTES:
            raise ValueError("too large")


def _roots(state: ObservedState) -> Mapping[str, Any]:
    """By name: what the script's functions that are being run and its modules hold, what it prepared, and hooks."""
    accelerator = state.accelerator
    roots: dict[str, Any] = {f"model {number}": model for number, model in enumerate(accelerator._models)}
    roots |= {f"scheduler {number}": each.scheduler for number, each in enumerate(accelerator._schedulers)}
    roots |= {f"optimizer {number}": optimizer for number, optimizer in enumerate(state.optimizers())}
    frame = sys._getframe()
    depth = 0
    while frame is not None:
        if is_of_the_job(frame.f_code.co_filename):
            depth += 1
            roots |= {f"{depth}:{frame.f_code.co_qualname}.{key}": value for key, value in frame.f_locals.items()}
        frame = frame.f_back
    for name, module in list(sys.modules.items()):
        if module is not None and is_of_the_job(getattr(module, "__file__", None)):
            roots |= {f"{name}:{key}": value for key, value in vars(module).items() if not key.startswith("__")}
    for number, optimizer in enumerate(state.optimizers()):
        roots |= {f"optimizer {number}/{key}": getattr(optimizer, key, None) for key in HOOKS_OF_OPTIMIZERS}
    for name, tensor in state.parameters():
        roots |= {f"{name}/{key}": getattr(tensor, key, None) for key in (*HOOKS_OF_TENSORS, *vars(tensor))}
    return roots


def _held(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.MethodType):
        yield "function", value.__func__
    if isinstance(value, types.FunctionType) and not is_of_the_job(value.__code__.co_filename):
        return
    if isinstance(value, type) and not is_of_the_job(_file_of(value)):
        return
    if _of_ours(type(value)) or _is_our_generator(value):
        return
    if isinstance(value, dict) and type(value).__module__ not in ("builtins", "collections"):
        yield from ((f"item {number}", item) for number, item in enumerate(value.items()))
    if isinstance(value, Mapping):
        yield from ((f"key {number}", key) for number, key in enumerate(value) if not isinstance(key, str | int))
    yield from children(value)


def _keeps_nothing(value: Any) -> bool:
    """An object that holds nothing that can be looked at, and needs not."""
    if type(value) in STATELESS or _of_ours(type(value)) or isinstance(value, types.ModuleType | logging.Logger):
        return True
    if isinstance(value, type | types.FunctionType | types.MethodType | types.GeneratorType | torch.nn.Module):
        return True
    if isinstance(value, Mapping | list | tuple | deque | torch.optim.Optimizer | functools.partial):
        return True
    # An instance of a class in Python that has no attributes, and none in slots.
    return hasattr(value, "__dict__") and type(value).__flags__ & (1 << 9) != 0 and type(value).__base__ is object


def _is_our_generator(value: Any) -> bool:
    """The protocol's way through the loader: where it stands is the position."""
    return type(value) is types.GeneratorType and value.gi_code.co_filename.startswith(PACKAGE)


def _of_ours(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in OURS


def _of_the_script() -> Iterator[Any]:
    """What the job's own code made, of all that the garbage collector knows; and iterators, which may be kept where nothing is
    seen of them. Asks nothing of an object but its type: tens of thousands are looked at."""
    kinds: dict[type, bool] = {}
    for value in gc.get_objects():
        kind = type(value)
        own = kinds.get(kind)
        if own is None:
            own = kinds[kind] = kind in COUNTING or is_of_the_job(_file_of(kind)) or issubclass(kind, type)
        if own and issubclass(kind, type):
            own = is_of_the_job(_file_of(value))
        elif kind is types.FunctionType:
            cells = value.__closure__ or value.__defaults__ or value.__kwdefaults__ or value.__dict__
            own = bool(cells) and is_of_the_job(value.__code__.co_filename)
        elif kind is types.GeneratorType:
            own = is_of_the_job(value.gi_code.co_filename) or value.gi_code.co_filename == SAMPLERS
        elif kind is enumerate:
            own = not _is_our_generator(value.__reduce__()[1][0])  # of what it counts, the loop's variable tells
        if own:
            yield value


@functools.lru_cache(maxsize=1 << 14)
def _file_of(kind: type) -> str | None:
    """Where a class is written: where its functions are, as a module may have taken another one's name."""
    if kind.__module__ in ("builtins", "itertools", "types", "functools", "collections"):
        return None
    files = (value.__code__.co_filename for value in vars(kind).values() if isinstance(value, types.FunctionType))
    module = sys.modules.get(kind.__module__)
    return next((file for file in files if not file.startswith("<")), getattr(module, "__file__", None))


@functools.lru_cache(maxsize=1 << 14)
def is_of_the_job(file: str | None) -> bool:
    """Neither installed, nor Python's, nor chaosrun's own."""
    return file is not None and not file.startswith("<") and not os.path.realpath(file).startswith(INSTALLED)


def _name(value: Any) -> str:
    return getattr(value, "__qualname__", None) or type(value).__qualname__


def _saved(state: ObservedState) -> set[int]:
    """Tensors whose digests are in every checkpoint."""
    modules = [item for item in state.prepared() if isinstance(item, torch.nn.Module)]
    return {id(tensor) for module in modules for tensor in (*module.parameters(), *module.buffers())}


def _settings() -> str:
    return str(
        [
            *(torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_num_threads()),
            *(torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), numpy.geterr()),
            *(torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic, torch.is_inference_mode_enabled()),
        ]
    )


def _elsewhere(accelerator: Any) -> Iterator[str]:
    """State in other threads and processes, and in iterators of streams."""
    for loader in accelerator._dataloaders:
        inner = getattr(loader, "base_dataloader", loader)
        if getattr(inner, "num_workers", None) != 0:
            yield "copies of the dataset in the loader's worker processes"
        if isinstance(getattr(inner, "dataset", None), IterableDataset | None):
            yield "the iterator of a streamed dataset"
    own = threading.get_ident()
    for ident, frame in sys._current_frames().items():
        while frame is not None and ident != own:
            if is_of_the_job(frame.f_code.co_filename):
                yield f"a thread of the script's own ({frame.f_code.co_qualname})"
                break
            frame = frame.f_back
