"""Finds state that no checkpoint holds: optimizers that step without being prepared; and the script's modules, tensors and
numpy arrays that a training changes, that live when its loop is left, and that are not saved.

Only rank 0 searches, before the first batch and at the end, and changes nothing. It calls neither other ranks nor the script's
code, and skips values that cannot be read without them. Values made anew in each step are not state: variables that the
script's loop sets before it reads them, and parts of modules and saved objects that did not exist, in this shape, before the
first batch.
"""

import contextlib
import math
import sys
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy
import torch
import xxhash
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import Dataset, Sampler

from chaosrun.observe.contents import Components, address_of, leaves
from chaosrun.observe.fingerprint import local_part
from chaosrun.observe.loop_variables import loop_variables
from chaosrun.observe.plain_values import generator_of, is_passed_over
from chaosrun.observe.script_state import MOST_CHILDREN, MOST_VALUES, PLAIN, children
from chaosrun.observe.state import ObservedState

SAMPLED = 1 << 16
"""So many elements of a tensor are compared to see whether it has changed."""
NOT_REGISTERED = ""
DISPATCH = "__torch_dispatch__"
Memory = torch.Tensor | numpy.ndarray
Digests = dict[Any, tuple[tuple[int, ...], str]]
"""Shape and bytes, by name."""


@dataclass(frozen=True, slots=True)
class _Group:
    """A module, a container of tensors, or a single tensor."""

    path: str
    kind: type
    memory: dict[str, Memory]
    """Its tensors and arrays that are on this rank and can be read, by name."""
    owner: str | None
    """Name of the registered object that holds it; NOT_REGISTERED: another module or optimizer; None: a script's variable."""


class Outside:
    """The unsaved state of one training."""

    def __init__(self, state: ObservedState) -> None:
        self._state = state
        self._stepped: dict[int, Optimizer] = {}
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.update({id(optimizer): optimizer}))
        self._loop = loop_variables(sys._getframe())
        self._names: dict[int, str] = {}
        self._left: list[_Group] = []
        self._before = {group.path: _digests(group.memory.items()) for group in self._reachable()}

    def left(self) -> None:
        """Keep the variables of the script's loop, which is being left, as they are lost when the function returns. Reads
        nothing from a device: after an error that might wait forever for other ranks."""
        with contextlib.suppress(Exception):
            self._left = self._reachable()

    def found(self, components: Components) -> list[str]:
        """Changed but unsaved state, in words. `components`: the saved state; all ranks must compute it together, as a
        state_dict of the script may gather from them."""
        self._hook.remove()
        groups = self._left or self._reachable()
        registered = components["registered"]
        live = {address_of(each) for group in groups for each in group.memory.values()}
        saved = {address_of(each) for each in _memory_in(components)}
        copies = _digests(enumerate(each for each in _memory_in(registered) if address_of(each) not in live)).values()
        changed: list[str] = []
        for group in groups:
            own = {name: each for name, each in group.memory.items() if address_of(each) not in saved}
            saved |= {address_of(each) for each in own.values()}
            now, before = _digests(own.items()), self._before.get(group.path, {})
            state = registered.get(group.owner or NOT_REGISTERED)
            # A state_dict may return copies, or the same values in another form.
            handed_out = all(digest in copies for digest in now.values()) or (
                bool(state) and sum(map(_size_of, own.values())) <= _size_of(state, live)
            )
            was_there = all(name in before and before[name][0] == shape for name, (shape, _) in now.items())
            # A registered object with an empty state_dict saves nothing.
            counts = was_there or group.owner is None or state == {}
            if counts and not handed_out and any(before.get(name) != digest for name, digest in now.items()):
                generator = generator_of(group.path)
                changed.append(f"{generator or group.path} ({'generator' if generator else _described(group.kind, len(own))})")
        return list(dict.fromkeys([*self._loose_optimizers(), *changed]))

    def _reachable(self) -> list[_Group]:
        """Groups that may be state."""
        variables = self._state.variables()
        self._names = {id(value): name for name, value in variables.items()}
        owners = {id(item): NOT_REGISTERED for item in [*self._state.prepared(), *self._state.optimizers()]}
        owners |= {id(item): name for name, item in self._state.all_registered().items()}
        return [group for group in _groups(variables, owners) if self._is_state(group)]

    def _is_state(self, group: _Group) -> bool:
        """Whether it outlives a step. If the loop was not found in the source, this is known for modules only."""
        if self._loop is None:
            return issubclass(group.kind, torch.nn.Module)
        return group.path.partition("/")[0] not in self._loop

    def _loose_optimizers(self) -> Iterator[str]:
        prepared = self._state.optimizers()
        saved = {id(item) for item in [*prepared, *self._state.prepared()]}
        # An optimizer that wraps another, such as a lookahead, steps and saves it.
        saved |= {id(value) for optimizer in prepared for value in vars(optimizer).values()}
        for key, optimizer in self._stepped.items():
            if key not in saved:
                parameters = sum(len(group["params"]) for group in optimizer.param_groups)
                kind = f"{type(optimizer).__name__} over {parameters} parameters, which is not prepared"
                yield f"{self._names[key]} ({kind})" if key in self._names else f"an optimizer ({kind})"


def _described(kind: type, number: int) -> str:
    if issubclass(kind, Memory):
        return kind.__name__
    return f"{kind.__name__}, {number} tensor{'s' if number > 1 else ''}"


def _groups(roots: Mapping[str, object], owners: Mapping[int, str]) -> Iterator[_Group]:
    """Groups of all reachable state, nearest first; each tensor once, and only prepared optimizers. `owners`: by id."""
    met: set[int] = set()
    waiting: deque[tuple[str, Any, str | None]] = deque((path, value, None) for path, value in roots.items())
    looked_at = 0
    while waiting and looked_at < MOST_VALUES:
        path, value, owner = waiting.popleft()
        kind = type(value)
        if id(value) in met or (issubclass(kind, Optimizer) and id(value) not in owners):
            continue
        owner = owners.get(id(value), owner)
        try:
            memory, held = ({}, []) if is_passed_over(kind) else _parts(value)
        except Exception:  # an object of the script may raise any error, which must not reach the training
            memory, held = {}, []
        readable = {
            name: here for name, each in memory.items() if id(each) not in met and (here := _readable(each)) is not None
        }
        if readable:
            yield _Group(path, kind, readable, owner)
        looked_at += 1
        met |= {id(value), *map(id, memory.values())}
        below = NOT_REGISTERED if owner is None and issubclass(kind, torch.nn.Module) else owner
        waiting.extend((f"{path}/{name}", child, below) for name, child in held)


def _parts(value: Any) -> tuple[dict[str, Memory], list[tuple[str, Any]]]:
    """The tensors of a value that form one group, and all its contents."""
    if isinstance(value, Memory):
        return {"": value}, []
    held = [(name, child) for name, child in islice(children(value), MOST_CHILDREN) if type(child) not in PLAIN]
    if isinstance(value, Dataset | Sampler):
        # Arrays here are an order of samples, or loaded data.
        held = [(name, child) for name, child in held if not issubclass(type(child), numpy.ndarray)]
    if isinstance(value, torch.nn.Module):
        return {**dict(value.named_parameters()), **dict(value.named_buffers())}, held
    together = isinstance(value, Mapping | list | tuple | deque)
    return {name: child for name, child in held if together and issubclass(type(child), Memory)}, held


def _readable(value: Memory) -> Memory | None:
    """This rank's part of a tensor (of a DTensor its local part). None if it is in an autograd graph, like a loss, is mapped
    from a file, has no memory (FSDP2 frees it and keeps the tensor), or is of a class with its own tensor operations."""
    if isinstance(value, numpy.ndarray):
        lies_in_file = isinstance(value, numpy.memmap) or isinstance(value.base, numpy.memmap)
        return value if value.dtype.kind in "biufc" and value.size and not lies_in_file else None
    with contextlib.suppress(Exception), torch._C.DisableTorchFunctionSubclass():
        here = local_part(value)
        own_idea = getattr(type(here), DISPATCH) is not getattr(torch.Tensor, DISPATCH) or is_passed_over(type(value))
        if own_idea or value.grad_fn is not None:
            return None
        if here.layout is torch.strided and here.device.type != "meta" and here.numel() and here.untyped_storage().nbytes():
            return here.detach()
    return None


def _memory_in(value: Any) -> Iterator[Memory]:
    return (here for each in leaves(value) if isinstance(each, Memory) and (here := _readable(each)) is not None)


def _size_of(value: Any, left_out: Collection[int] = ()) -> int:
    """How many numbers and letters a state has, without the memory at the addresses `left_out`."""
    plain = [each for each in leaves(value) if not isinstance(each, Memory)]
    letters = sum(len(each) if isinstance(each, str | bytes) else 1 for each in plain)
    return letters + sum(math.prod(each.shape) for each in _memory_in(value) if address_of(each) not in left_out)


def _digests(memory: Iterable[tuple[Any, Memory]]) -> Digests:
    found: Digests = {}
    for name, value in memory:
        with contextlib.suppress(Exception):  # raised by a quantised tensor, for instance
            flat = value.reshape(-1)
            sample = flat[:: max(1, len(flat) // SAMPLED)]
            if isinstance(sample, torch.Tensor):
                # A copy: a tensor that shares memory with numpy cannot free it any more.
                sample = sample.to("cpu", copy=True).contiguous().view(torch.uint8).numpy()
            found[name] = tuple(value.shape), xxhash.xxh3_64_hexdigest(sample.tobytes())
    return found
