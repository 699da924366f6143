"""One digest of all state of a training that no checkpoint holds, and a list of what could not be digested.

Stricter than `script_state`: nothing is left out silently. A value that cannot be inspected (`observe.held`), or is too large,
is named, and then no early verdict is given. Covers the variables of the script's running functions and of its modules, and all
objects of its own code that the garbage collector knows: closures, generators, instances and iterators, wherever they are kept.
Changes nothing.
"""

import datetime
import enum
import gc
import inspect
import io
import itertools
import operator
import os
import re
import socket
import sys
import threading
import time
import traceback
import types
from collections import ChainMap, deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from functools import cache
from itertools import takewhile
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from accelerate import Accelerator
from torch.utils.data import IterableDataset, Sampler

from chaosrun.observe import process_state
from chaosrun.observe.contents import address_of, tensors_in
from chaosrun.observe.fingerprint import tensor_digest
from chaosrun.observe.held import (
    CODE,
    COUNTING,
    LAZY,
    OF_PYTHON,
    Held,
    added,
    file_of,
    file_of_module,
    held,
    is_installed,
    is_of_the_job,
    is_our_generator,
    known_as,
    locals_of,
    text_of_member,
    variables,
)
from chaosrun.observe.script_state import DAY_S, is_made_by_hand, text_of
from chaosrun.observe.state import ObservedState
from chaosrun.records.grouping import grouped

MOST_OBJECTS = 50_000
MOST_BYTES = 1 << 30
"""Size of the largest tensor or array that is looked at."""
SHOWN = 4
LOSSY = frozenset({"large", "a container", "a tensor"})
"""Texts of `script_state` that different values may share."""
SAMPLERS = inspect.getfile(Sampler)
"""Its generators hold the order of the rest of the epoch."""
BETWEEN = ("chaosrun", "accelerate", "torch", "contextlib")
"""Packages whose functions may be on the stack between the training loop and this module."""
WRAPPED = {"_models": "module", "_optimizers": "optimizer", "_schedulers": "scheduler"}
"""Lists of what accelerate prepared, and the attribute of each item that holds the original."""
OF_LOADERS = ("dataset", "collate_fn", "worker_init_fn", "sampler", "batch_sampler")
HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
NAMESPACES = (
    *("builtins", "torch", "torch.nn", "torch.nn.functional", "torch.optim", "torch.utils.data", "torch.distributed", "numpy"),
    *("random", "math", "os", "sys", "time", "collections", "functools", "itertools", "accelerate", "chaosrun"),
    *("warnings", "json", "string"),
)
"""Modules of other packages into which a script may put names of its own, besides those that it imports by name."""


class OwnState(NamedTuple):
    digest: str
    unseen: tuple[str, ...]
    """What could not be digested, in words."""


class Surroundings(NamedTuple):
    """The state before the script's first line."""

    environment: Mapping[str, str]
    variables: Mapping[str, tuple[int, str]]
    """How many variables each module had, and which one it was given last."""
    values: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """The variables of NAMESPACES."""
    folder: str = "/"
    descriptors: Collection[tuple[int, int]] = ()
    """The open pipes, sockets and files, by device and inode."""
    mark: object = None
    """An object that the garbage collector tracks unless gc.freeze() has been called."""

    @classmethod
    def now(cls) -> "Surroundings":
        modules = [(name, vars(each)) for name, each in list(sys.modules.items()) if type(each) is types.ModuleType]
        counted = {name: (len(known), next(reversed(known), "")) for name, known in modules}
        values = {name: dict(known) for name, known in modules if name in NAMESPACES}
        return cls(dict(os.environ), counted, values, os.getcwd(), frozenset(process_state.descriptors().values()), [])


def own_state(state: ObservedState, before: Surroundings) -> OwnState:
    """This process's own state, between two steps. `before`: the state before the script's first line."""
    try:
        return _own_state(state, before)
    except Exception as error:  # an error here must not reach the training
        return OwnState("", (f"{type(error).__name__}: {error}",))


def _own_state(state: ObservedState, before: Surroundings) -> OwnState:
    accelerator = state.accelerator
    tensors = list(_tensors(state))
    look = _Look({id(state): "state", id(accelerator): "accelerator", **{id(tensor): name for name, tensor in tensors}})
    look.memory |= {address_of(tensor): name for name, tensor in reversed(tensors)}
    roots = list(_roots(accelerator))
    for name, value in roots:
        look.at(name, value)
    for name, tensor in tensors:
        look.text(name, _about(tensor))
        for key in (*HOOKS_OF_TENSORS, *vars(tensor)):
            look.at(f"{name}/{key}", getattr(tensor, key, None))
    for name in sorted({*NAMESPACES, *(value.__name__ for _, value in roots if type(value) is types.ModuleType)}):
        for key, value in (*_since(name, before.variables), *_replaced(name, before.values.get(name, {}))):
            look.at(f"{name}.{key}", value)
    for name, value in _of_modules_made_by_hand(before.variables):
        look.at(name, value)
    every = gc.get_objects()
    look.at_hidden(every)
    for name, value in process_state.registries():
        look.at(name, value)
    waiting = process_state.waiting_bytes()
    of_the_process = process_state.of_the_process(before.environment, before.folder, waiting)
    look.text("settings", str([*process_state.settings(), *of_the_process]))
    look.unseen += [*_elsewhere(accelerator), *process_state.unread(before.descriptors, waiting)]
    if not any(map(operator.is_, every, itertools.repeat(before.mark))):
        look.unseen.append("objects hidden by gc.freeze()")
    return OwnState(look.digest(), tuple(dict.fromkeys(look.unseen))[:SHOWN])


class _Look:
    """A walk through values and their contents. Each is visited once; if met again, only its name is added."""

    def __init__(self, known: MutableMapping[int, str]) -> None:
        self._met = known
        """Names of the objects met so far, by id."""
        self._kept: list[Any] = []
        """Objects made while looking, kept alive so that no other object gets their ids."""
        self._texts: list[str] = []
        self.memory: dict[int, str] = {}
        """Names of the first tensor or array met in each memory, by address."""
        self._bytes = self._objects = 0
        self._reached = 0, 0
        """Of `_reach`: bytes and objects that it has looked at."""
        self.unseen: list[str] = []

    def text(self, path: str, text: str) -> None:
        self._texts.append(f"{path}={text}")

    def digest(self) -> str:
        return xxhash.xxh3_64_hexdigest("\n".join(sorted(self._texts)).encode(errors="replace"))

    def at(self, root: str, value: Any) -> None:
        waiting = deque([(root, value)])
        while waiting:
            path, value = waiting.popleft()
            if (met := self._met.get(id(value))) is not None:
                self.text(path, f"is {met}")
                continue
            self._objects += 1
            if self._objects > MOST_OBJECTS:
                return self.unseen.append(f"more than {MOST_OBJECTS} objects")
            try:
                text = self._text(value)
                inside = held(value) if text is None else []
                told = f"{known_as(value)} of {len(inside)}" if text is None else f"{text}{self._shares(value, path)}"
            except Exception as error:  # an object of the script may raise any error: then it cannot be inspected
                self.unseen.append(f"{path} ({type(value).__name__}: {type(error).__name__})")
                continue
            self.text(path, told)
            if text is None or isinstance(value, torch.Tensor | numpy.ndarray | list | set | deque):
                self._met[id(value)] = path
                self._kept.append(value)
            waiting.extend((f"{path}/{name}", child) for name, child in inside)

    def at_hidden(self, every: Sequence[Any]) -> None:
        """Visit those of `every` object that are not reachable from a root: kept by a library, or on the stack of a running
        function."""
        before = self._texts
        told: list[str] = []
        # By name, and of one name first what holds others of them, as the garbage collector's order varies.
        for name, alike in sorted(grouped(_of_the_script(every), _name).items()):
            hidden = [value for value in alike if id(value) not in self._met]
            for value in hidden if len(hidden) == 1 or self.unseen else sorted(hidden, key=self._reach, reverse=True):
                if id(value) not in self._met:
                    self._texts = []
                    self.at(name, value)
                    told.append(self.digest())
        self._texts = [*before, f"hidden={sorted(told)}"]

    def _reach(self, value: Any) -> int:
        """How many objects not met so far it leads to. All calls together look at as many as one look may."""
        look = _Look(ChainMap({}, self._met))
        look._bytes, look._objects = self._reached
        look.at("", value)
        self._reached = look._bytes, look._objects
        return len(look._texts)

    def _text(self, value: Any) -> str | None:
        """The text of a value that is compared as a whole, else None. Raises ValueError if the text would be incomplete."""
        match value:
            case _ if type(value) is LAZY:
                return None
            case io.TextIOWrapper() if value in (sys.stdin, sys.stdout, sys.stderr):
                return "a standard stream"
            case io.IOBase() | socket.socket():
                raise ValueError("an open file, pipe or connection")
            case enum.Enum():
                return text_of_member(value)
            case torch.Tensor():
                self._weigh(value.numel() * value.element_size())
                text = f"{tensor_digest(value):016x} {_about(value)}"
            case numpy.ndarray() if not value.dtype.hasobject:
                self._weigh(value.nbytes)
                plain = value.view("i8") if value.dtype.kind in "mM" else value  # dates have no buffer
                layout = f"{value.dtype}{value.shape}{value.strides}{value.flags.writeable}"
                text = f"{layout} {xxhash.xxh3_64_hexdigest(numpy.ascontiguousarray(plain).data)}"
            case numpy.random.Generator() | numpy.random.BitGenerator():
                draws: Any = getattr(value, "bit_generator", value)
                seeds = getattr(draws, "seed_seq", None)
                text = f"{text_of(value)} {getattr(seeds, 'n_children_spawned', 0)}"
            case PurePath() | range() | slice() | re.Pattern() | numpy.dtype():
                text = repr(value)
            case deque():
                text = text_of(value)
                text = text and f"{text} of at most {value.maxlen}"
            case datetime.datetime() if abs(value.timestamp() - time.time()) < DAY_S:
                text = "a time"
            case _:
                text = text_of(value)
        if text is not None and getattr(value, "__dict__", {}).keys() - {"gauss_next"}:  # part of the state of `random`
            raise ValueError("attributes of its own")
        if text in LOSSY:
            raise ValueError(text)
        # A loop over a set depends on its order.
        return repr(list(value)) if isinstance(value, set | frozenset) and text is not None else text

    def _shares(self, value: Any, path: str) -> str:
        """With which tensor or array seen before it shares its memory: to change one changes the other."""
        if not isinstance(value, torch.Tensor | numpy.ndarray):
            return ""
        address = address_of(value)
        first = self.memory.setdefault(address, path) if address else path
        return "" if first == path else f" in {first}"

    def _weigh(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MOST_BYTES:
            raise ValueError("too large")


def _about(tensor: torch.Tensor) -> str:
    """A tensor's properties besides its content: class, requires_grad, strides, whether it has a graph, gradient."""
    gradient = tensor.grad if tensor.is_leaf else None
    kind = f"{type(tensor).__name__} {tensor.is_leaf} {tensor.is_inference()}"
    return f"{kind} {tensor.requires_grad} {tensor.stride()} {'-' if gradient is None else f'{tensor_digest(gradient):016x}'}"


def _since(name: str, before: Mapping[str, tuple[int, str]]) -> Held:
    """The variables of a module of another package that are new: those of the script's own are looked at anyway, and one that
    was imported since is as its own code has made it. Raises LookupError where others are gone: then it cannot tell."""
    module = sys.modules.get(name)
    held = vars(module) if type(module) is types.ModuleType and (name in before or name in NAMESPACES) else {}
    if held and not is_of_the_job(held.get("__file__")):
        count, last = before.get(name, (0, ""))
        new = list(takewhile(lambda key: key != last, reversed(held)))
        if len(held) - len(new) != count:
            raise LookupError(f"{name}: variables that it had are gone")
        yield from ((key, held[key]) for key in sorted(new) if not isinstance(held[key], types.ModuleType))


def _replaced(name: str, before: Mapping[str, Any]) -> Held:
    """The variables of a module of another package that have another value than before the script's first line."""
    now = vars(sys.modules[name]) if before else {}
    for key, value in before.items():
        if key in now and now[key] is not value and not process_state.is_ours(now[key]):
            yield key, now[key]


def _of_modules_made_by_hand(before: Collection[str]) -> Held:
    """Variables of those that no import has loaded, made since the script began. Classes, such as Cython's, are no state."""
    for name, module in sorted(sys.modules.items()):
        if name not in before and is_made_by_hand(module):
            yield from ((f"{name}:{key}", value) for key, value in variables(module) if not isinstance(value, type))


def _roots(own: Accelerator) -> Iterator[tuple[str, Any]]:
    """By name: the prepared objects, and the variables of the script's running functions and modules."""
    yield from ((f"accelerator.{key}", value) for key, value in added(own))
    for kind, inner in WRAPPED.items():
        for number, wrapper in enumerate(getattr(own, kind)):
            yield from ((f"{kind} {number}", each) for each in (getattr(wrapper, inner, None), wrapper))
    for number, wrapper in enumerate(own._dataloaders):
        inner = getattr(wrapper, "base_dataloader", wrapper)
        yield from ((f"loader {number}/{key}", getattr(inner, key, None)) for key in OF_LOADERS)
        yield f"loader {number}", wrapper
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe(1)) if is_of_the_job(frame.f_code.co_filename)]
    for depth, frame in enumerate(frames, 1):
        known = ((key, value) for key, value in (locals_of(frame) or frame.f_locals).items() if key not in OF_PYTHON)
        yield from ((f"{depth}:{frame.f_code.co_qualname}.{key}", value) for key, value in known)
    for name, module in sorted(sys.modules.items()):
        if is_of_the_job(file_of_module(module)):
            yield from ((f"{name}:{key}", value) for key, value in variables(module))


def _of_the_script(every: Sequence[Any]) -> Iterator[Any]:
    """The garbage collector's objects that were made by the job's own code; and iterators, which may be unreachable from the
    roots. Reads only the type of most objects, since there are hundreds of thousands."""
    kinds = list(map(type, every))
    mostly = {kind for kind in set(kinds) if kind in COUNTING or is_of_the_job(file_of(kind))}
    wanted = {kind for kind in set(kinds) if kind in mostly or kind in CODE or issubclass(kind, type)}
    of_the_job = cache(is_of_the_job)  # a dictionary of its own is asked faster, and here of each function of each library
    for value in itertools.compress(every, map(wanted.__contains__, kinds)):
        kind = type(value)
        if kind is types.FunctionType:
            own = of_the_job(value.__code__.co_filename)
        elif kind in CODE:
            file = getattr(value, CODE[kind]).co_filename
            own = is_of_the_job(file) or (kind is types.GeneratorType and file == SAMPLERS)
            own = own and not (kind is types.CoroutineType and value.cr_running)
        elif kind is enumerate:
            own = not is_our_generator(value.__reduce__()[1][0])  # the count is in the loop's variable
        else:
            own = kind in mostly or is_of_the_job(file_of(value))
        if own:
            yield value


def _name(value: Any) -> str:
    return f"{getattr(value, '__qualname__', type(value).__qualname__)} ({type(value).__name__})"


def _tensors(state: ObservedState) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors whose digests are in every checkpoint."""
    held = state.components()
    saved = {address_of(tensor) for kind in ("model", "buffers", "registered") for tensor in tensors_in(held[kind])} - {0}
    for number, module in enumerate(item for item in state.prepared() if isinstance(item, torch.nn.Module)):
        named = (*module.named_parameters(), *module.named_buffers())
        yield from ((f"{number}.{name}", tensor) for name, tensor in named if address_of(tensor) in saved)


def _elsewhere(accelerator: Any) -> Iterator[str]:
    """Names of state in other threads and processes, in iterators of streams, and in packages that are not inspected."""
    frame = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in BETWEEN:
        frame = frame.f_back
    if frame is not None and is_installed(os.path.realpath(frame.f_code.co_filename)):
        yield f"the training loop is in an installed package ({frame.f_globals.get('__name__')})"
    for loader in accelerator._dataloaders:
        inner = getattr(loader, "base_dataloader", loader)
        if getattr(inner, "num_workers", None) != 0:
            yield "copies of the dataset in the loader's worker processes"
        if isinstance(getattr(inner, "dataset", None), IterableDataset | None):
            yield "the iterator of a streamed dataset"
    compiled = getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COMPILE_COUNTER", {})
    if any(count > 1 for count in compiled.values()):
        yield "code that torch.compile has compiled more than once"  # for which inputs, and in which order, decides what runs
    for ident, top in sys._current_frames().items():
        codes = (frame.f_code for frame, _ in traceback.walk_stack(top) if ident != threading.get_ident())
        if code := next((each for each in codes if is_of_the_job(each.co_filename)), None):
            yield f"a thread of the script's own ({code.co_qualname})"
