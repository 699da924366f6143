"""The modules that are alive: those that hold the parameters which optimizers update, the names of these parameters, and what a
script keeps next to them (averages of the weights, a teacher). Changes nothing."""

import gc
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from chaosrun.observe.contents import address_of
from chaosrun.observe.fingerprint import fingerprint
from chaosrun.observe.script_state import is_own
from chaosrun.records.tensor_files import LEAST_BYTES
from chaosrun.records.traces import ALIVE

AVERAGES = ("ema", "averag", "avg", "shadow", "polyak")
"""Parts of the names of attributes in which a script keeps an average of its weights as tensors of its own."""
MOST_ALIKE = 8
"""Modules, or lists of tensors, of one name are digested only if there are at most this many."""
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of parameters' names that a wrapper puts in: the same parameter is called the same with and without it."""
REPARAMETRIZED = re.compile(r"(?:parametrizations\.)?([^.]+?)(?:\.original|_orig)$")
"""Names under which torch's pruning, spectral norm and parametrizations keep a parameter: it is called as it was before."""


def digests_of_others(trained: Sequence[torch.nn.Parameter], updated: Collection[int]) -> dict[str, str]:
    """Digests of other live modules with parameters, or with buffers of the shapes of those that are `updated` (ids), by class;
    and of tensors of these shapes in attributes named as averages. Several of one name are all included, in order."""
    own, addresses = {id(each) for each in trained}, {address_of(each) for each in trained}
    shapes = Counter(tuple(each.shape) for each in trained if id(each) in updated)
    found: dict[str, list[list[torch.Tensor]]] = {}
    modules, objects = _live()
    for module in _topmost(modules):
        held, buffers = list(module.parameters()), list(module.buffers())
        if own.isdisjoint(map(id, held)) and (held or _covers(buffers, shapes)):
            found.setdefault(type(module).__qualname__, []).append([*held, *buffers])
    for name, value in _averages(objects):
        with suppress(Exception):  # an object of the script may raise any error, which must not reach its save
            tensors = _tensors(value)
            if _covers(tensors, shapes) and addresses.isdisjoint(map(address_of, tensors)):
                found.setdefault(name, []).append(tensors)
    few = {name: alike for name, alike in found.items() if len(alike) <= MOST_ALIKE}
    return {f"{ALIVE}{name}": " ".join(sorted({fingerprint(each).value for each in few[name]})) for name in few}


def _live() -> tuple[list[torch.nn.Module], list[Any]]:
    """All modules, and all objects of classes that are neither Python's own nor of a library that chaosrun knows."""
    every = gc.get_objects()
    # There may be half a million objects, of a thousand types, which a metaclass of the script may refuse to hash. Not by id():
    # that is an audit event, for which Python calls `observe.audit`.
    address = object.__hash__
    kinds = {address(kind): kind for kind in map(type, every)}
    wanted = {name for name, kind in kinds.items() if issubclass(kind, torch.nn.Module) or _is_own(kind)}
    objects = [value for value in every if address(type(value)) in wanted]
    modules = [value for value in objects if issubclass(type(value), torch.nn.Module) and "_modules" in vars(value)]
    return modules, [value for value in objects if _is_own(type(value))]


def _topmost(modules: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Those that are in no other."""
    inner = {id(child) for module in modules for child in module._modules.values()}
    return [module for module in modules if id(module) not in inner]


def _is_own(kind: type) -> bool:
    of = str(kind.__module__)
    has_attributes = bool(kind.__dictoffset__) and not issubclass(kind, type)
    return has_attributes and of.partition(".")[0] not in sys.stdlib_module_names and is_own(of)


def _covers(tensors: Sequence[torch.Tensor], shapes: Counter[tuple[int, ...]]) -> bool:
    """Whether there is one for each of the weights."""
    return bool(shapes) and len(tensors) >= sum(shapes.values()) and Counter(tuple(each.shape) for each in tensors) >= shapes


def _averages(objects: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Attributes of the script's objects that are named as averages. Plain variables are left out, as they may be unused."""
    for value in objects:
        with suppress(Exception):  # as above: a class may have a property of this name
            held = object.__getattribute__(value, "__dict__")
            named = [(name, child) for name, child in list(held.items()) if _is_average(str(name))]
            yield from ((f"{type(value).__qualname__}.{name}", child) for name, child in named)


@lru_cache(maxsize=1 << 14)
def _is_average(name: str) -> bool:
    return any(word in name.lower() for word in AVERAGES)


def _tensors(value: Any) -> list[torch.Tensor]:
    """The tensors of a list or dictionary that holds nothing else, in the order of names."""
    kind = type(value)
    if issubclass(kind, dict):
        value = [value[name] for name in sorted(value, key=str)]
    elif kind not in (list, tuple):
        return []
    return [each.detach() for each in value] if all(issubclass(type(each), torch.Tensor) for each in value) else []


def names_of_swapped(named: list[tuple[str, torch.Tensor]], stepped: list[torch.Tensor]) -> dict[int, str]:
    """The names of the optimizers' parameters, by id, in whose places a model holds others while `functional_call` runs."""
    others = [(name, tensor.shape) for name, tensor in named if not isinstance(tensor, torch.nn.Parameter)]
    if [shape for _, shape in others] != [parameter.shape for parameter in stepped]:
        return {}
    return {id(parameter): name for parameter, (name, _) in zip(stepped, others, strict=True)}


def unwrapped(name: str) -> str:
    return REPARAMETRIZED.sub(r"\1", ".".join(part for part in name.split(".") if part not in WRAPPERS))


def held_since(before: Collection[str], now: Collection[str]) -> tuple[str, str]:
    """What to take from the front of all names, and what to put there, to call parameters as before, if a module of the script
    holds the whole model now, or no longer does. Both empty if that is not the only difference."""
    if not before or not now or {*before} == {*now}:
        return "", ""
    one, other = min(before), min(now)  # the same tensor, as all names of one side only begin with more
    more, less = one.removesuffix(other), other.removesuffix(one)
    if less.endswith(".") and {*now} == {less + name for name in before}:
        return less, ""
    return ("", more) if more.endswith(".") and {*before} == {more + name for name in now} else ("", "")


def sizes_of(root: torch.nn.Module) -> set[tuple[str, int]]:
    """A model's parameters by name, with sizes in bytes, without those too small to be found in files."""
    return {(unwrapped(name), each.nbytes) for name, each in root.named_parameters() if each.nbytes >= LEAST_BYTES}


def smallest_of(named: Iterable[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
    """The smallest matrix of these, else the smallest parameter; empty without any."""
    return sorted(named, key=lambda each: (each[1].ndim < 2, each[1].numel()))[:1]


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers that only hold another module."""
    while True:
        inner = dict(module.named_children()).get("_orig_mod")  # of torch.jit's modules, _modules is no dict
        if inner is None and isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def with_gradients(stepped: list[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    """Of a single one, whose optimizer may be the first of many (Pyro builds one for each parameter, in any order): all
    parameters with gradients, of the outermost modules in the order of their classes' names."""
    if len(stepped) != 1:
        return stepped
    modules, _ = _live()
    top = sorted(_topmost(modules), key=lambda each: type(each).__qualname__)
    found = [parameter for module in top for parameter in module.parameters() if parameter.grad is not None]
    return found if any(each is stepped[0] for each in found) else stepped


def holders(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Module]:
    """The topmost live modules that hold any of these, ordered by the first one each holds."""
    order = {id(parameter): number for number, parameter in reversed(list(enumerate(parameters)))}
    modules, _ = _live()
    first = {id(m): min((order[id(p)] for p in m.parameters() if id(p) in order), default=None) for m in _topmost(modules)}
    top = [module for module in modules if first.get(id(module)) is not None]
    found, met = list[torch.nn.Module](), set[int]()
    for module in map(bare, sorted(top, key=lambda each: (first[id(each)] or 0, -len([*each.parameters()])))):
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        found += [] if held <= met else [module]  # a part of another, such as model[:3], comes and goes
        met |= held
    return found
