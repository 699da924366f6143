"""State that no checkpoint holds: optimizers that step without being prepared, and modules and tensors of the script's own that
a training changes, that live at its end, and that nobody saves.

Looks twice, when the first batch is about to come and when the loop is left, and changes nothing. What each step makes anew (a
batch, a loss) is no state: of the script's variables, those that its loop sets before it reads them; of what modules and saved
objects keep, what was not there, in this shape, before the first batch. Numpy's arrays count as tensors.
"""

import ast
import sys
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
import xxhash
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.data import DataLoader, Dataset, Sampler

from chaosrun.observe.contents import address_of
from chaosrun.observe.fingerprint import local_part
from chaosrun.observe.script_state import MOST_CHILDREN, MOST_VALUES, PLAIN, children, is_own
from chaosrun.observe.state import ObservedState

LOOPS = ("batches", "windows")
SAMPLED = 1 << 16
"""So many elements of a tensor tell whether it has changed."""
Tensors = dict[int, str]
"""Of one value: digests by the address of their memory."""
Memory = torch.Tensor | numpy.ndarray


class Outside:
    """Of one training."""

    def __init__(self, state: ObservedState) -> None:
        self._state = state
        self._stepped: dict[int, Optimizer] = {}
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.update({id(optimizer): optimizer}))
        self._loop = _loops_variables(sys._getframe())
        self._before = self._held()
        self._found: list[str] | None = None

    def found(self) -> list[str]:
        """What was changed and is saved by nobody, in words: as the first call sees it."""
        if self._found is None:
            self._hook.remove()
            held = self._held()
            changed = [name for name, (_, tensors) in held.items() if self._is_state(name) and self._differs(name, tensors)]
            self._found = [*self._loose_optimizers(), *(f"{name} ({_told(*held[name])})" for name in changed)]
        return self._found

    def _is_state(self, name: str) -> bool:
        """Where the loop was not found, only what is a module is known to be none of a step's own."""
        if self._loop is None:
            return issubclass(self._kinds.get(name, object), torch.nn.Module)
        return name.partition("/")[0] not in self._loop

    def _differs(self, name: str, tensors: Tensors) -> bool:
        _, before = self._before.get(name, ("", {}))
        if name in self._inside and _shapes(before) != _shapes(tensors):
            return False
        return sorted(before.values()) != sorted(tensors.values())

    def _loose_optimizers(self) -> Iterator[str]:
        prepared = self._state.optimizers()
        saved = {id(item) for item in [*prepared, *self._state.prepared()]}
        # One optimizer that is made of another, such as a lookahead, steps and saves it.
        saved |= {id(value) for optimizer in prepared for value in vars(optimizer).values()}
        names = {id(value): name for name, value in self._state.variables().items()}
        for key, optimizer in self._stepped.items():
            if key not in saved:
                parameters = sum(len(group["params"]) for group in optimizer.param_groups)
                kind = f"{type(optimizer).__name__} over {parameters} parameters, which is not prepared"
                yield f"{names[key]} ({kind})" if key in names else f"an optimizer ({kind})"

    def _held(self) -> dict[str, tuple[str, Tensors]]:
        """By path, kind and digests of the tensors in it that nobody saves."""
        components = self._state.components()
        registered = components["registered"]
        groups = list(_groups(self._state.variables(), self._kept_by(registered)))
        live = {_address(each) for group in groups for each in group.memory}
        saved = {_address(each) for each in _memory_in(components)}
        # A state_dict may hand out copies, or the same in another form.
        copies = {_digest(each) for each in _memory_in(registered) if _address(each) not in live and _counts(each)}
        room = _size_of(registered, live)
        self._kinds: dict[str, type] = {}
        self._inside: set[str] = set()
        """Paths of what modules, and objects that are saved, keep."""
        found: dict[str, tuple[str, Tensors]] = {}
        for path, value, memory, inside in groups:
            own = {_address(each): _digest(each) for each in memory if _counts(each) and _address(each) not in saved}
            if not own or copies.issuperset(own.values()) or (inside and _size_of(memory, saved) <= room):
                continue
            found[path], self._kinds[path] = (type(value).__name__, own), type(value)
            self._inside |= {path} if inside else set()
            saved |= own.keys()
        return found

    def _kept_by(self, registered: Mapping[str, Any]) -> dict[int, bool]:
        """Of prepared objects: whether only what was there before the first batch counts of what they keep; not of one that
        was registered and hands out nothing. Loaders are left alone."""
        empty = {id(self._state.registered[name]) for name in self._state.registered if not registered[name]}
        kept = {id(item): id(item) not in empty for item in self._state.prepared() if not isinstance(item, DataLoader)}
        return {**kept, **{id(item): True for item in self._state.optimizers()}}


class _Group(NamedTuple):
    path: str
    value: Any
    memory: Sequence[Memory]
    inside: bool


def _told(kind: str, tensors: Tensors) -> str:
    what = "array" if kind == "ndarray" else "tensor"
    return kind if kind in ("Tensor", "ndarray") else f"{kind}, {len(tensors)} {what}{'s' if len(tensors) > 1 else ''}"


def _groups(roots: Mapping[str, object], prepared: Mapping[int, bool]) -> Iterator[_Group]:
    """Modules, containers of tensors and single tensors that can be reached, nearest first. Of optimizers, the prepared."""
    met: set[int] = set()
    waiting = deque((path, value, False) for path, value in roots.items())
    looked_at = 0
    while waiting and looked_at < MOST_VALUES:
        path, value, inside = waiting.popleft()
        passed_over = isinstance(value, Outside | ObservedState | DataLoader | type)
        if id(value) in met or passed_over or (isinstance(value, Optimizer) and id(value) not in prepared):
            continue
        met.add(id(value))
        looked_at += 1
        if isinstance(value, Memory):
            yield _Group(path, value, [value], inside)
            continue
        if isinstance(value, torch.nn.Module):
            yield _Group(path, value, [*value.parameters(), *value.buffers()], inside)
        below = prepared.get(id(value), inside or isinstance(value, torch.nn.Module))
        kept = [child for child in islice(children(value), MOST_CHILDREN) if not isinstance(child[1], PLAIN)]
        if isinstance(value, Dataset | Sampler):
            # An order, or what was read.
            kept = [child for child in kept if not isinstance(child[1], numpy.ndarray)]
        memory = [child for _, child in kept if isinstance(child, Memory)]
        if memory and isinstance(value, Mapping | list | tuple | deque):
            yield _Group(path, value, memory, inside)
            met |= {id(each) for each in memory}
        waiting.extend((f"{path}/{name}", child, below) for name, child in kept)


def _memory_in(value: Any) -> Iterator[Memory]:
    match value:
        case torch.Tensor() | numpy.ndarray():
            yield value
        case Mapping():
            yield from (each for item in value.values() for each in _memory_in(item))
        case list() | tuple():
            yield from (each for item in value for each in _memory_in(item))


def _size_of(value: Any, left_out: Collection[int]) -> int:
    """Numbers in a state, and letters; without the memory at these addresses."""
    match value:
        case torch.Tensor() | numpy.ndarray():
            return 0 if _address(value) in left_out else value.numel() if isinstance(value, torch.Tensor) else value.size
        case Mapping():
            return sum(_size_of(item, left_out) for item in value.values())
        case list() | tuple():
            return sum(_size_of(item, left_out) for item in value)
        case str() | bytes():
            return len(value)
        case _:
            return 1


def _address(value: Memory) -> int:
    while isinstance(value, numpy.ndarray) and isinstance(value.base, Memory):
        value = value.base
    return address_of(value) if isinstance(value, torch.Tensor) else value.__array_interface__["data"][0]


def _counts(value: Memory) -> bool:
    """Not what hangs in a graph, as a loss does, what has no bytes, and what lies in a file."""
    if isinstance(value, numpy.ndarray):
        return value.dtype.kind in "biufc" and value.size > 0 and not isinstance(value, numpy.memmap)
    return value.grad_fn is None and value.layout is torch.strided and value.device.type != "meta" and value.numel() > 0


def _digest(value: Memory) -> str:
    flat = value.reshape(-1) if isinstance(value, numpy.ndarray) else local_part(value).detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // SAMPLED)]
    if isinstance(sample, torch.Tensor):
        sample = sample.cpu().contiguous().view(torch.uint8).numpy()
    return f"{tuple(value.shape)} {xxhash.xxh3_64_hexdigest(sample.tobytes())}"


def _shapes(tensors: Tensors) -> list[str]:
    return sorted(digest.rpartition(" ")[0] for digest in tensors.values())


# What a step makes anew


@dataclass(frozen=True, slots=True)
class _Use:
    name: str
    stores: bool
    branch: tuple[int, ...]
    """The conditional statements around it."""


def _loops_variables(frame: Any) -> set[str] | None:
    """Names that the script's training loop makes anew in each step; None when there is no such loop in its source."""
    while frame is not None:
        if is_own(frame.f_globals.get("__name__", "")):
            try:
                names = made_anew(ast.parse(Path(frame.f_code.co_filename).read_bytes()))
            except (OSError, SyntaxError, ValueError):
                names = None  # no file of Python's
            if names is not None:
                return names
        frame = frame.f_back
    return None


def made_anew(tree: ast.Module) -> set[str] | None:
    loops = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.For) and any(getattr(part, "attr", None) in LOOPS for part in ast.walk(node.iter))
    ]
    if not loops:
        return None
    names: set[str] = set()
    for loop in loops:
        uses = [*_uses(loop.target, ()), *(use for statement in loop.body for use in _uses(statement, ()))]
        inside = {id(node) for node in ast.walk(loop)}
        outside = {
            node.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and id(node) not in inside
        }
        first: dict[str, _Use] = {}
        for use in uses:
            first.setdefault(use.name, use)
        for name, use in first.items():
            reads = [other for other in uses if other.name == name and not other.stores]
            covered = all(other.branch[: len(use.branch)] == use.branch for other in reads)
            # What is set now and then, and read nowhere beside that, is kept for something.
            kept = use.branch and (name in outside or not reads)
            if use.stores and covered and not kept:
                names.add(name)
    return names


def _uses(node: ast.AST, branch: tuple[int, ...]) -> Iterator[_Use]:
    """Uses of variables in the order in which they are evaluated."""
    match node:
        case ast.Name():
            yield _Use(node.id, isinstance(node.ctx, ast.Store), branch)
        case ast.Assign():
            yield from _uses(node.value, branch)
            for target in node.targets:
                yield from _uses(target, branch)
        case ast.AugAssign():
            if isinstance(node.target, ast.Name):
                yield _Use(node.target.id, False, branch)
            yield from _uses(node.value, branch)
            yield from _uses(node.target, branch)
        case ast.AnnAssign():
            for part in (node.value, node.target):
                if part is not None:
                    yield from _uses(part, branch)
        case ast.If() | ast.While():
            yield from _uses(node.test, branch)
            for number, part in enumerate((node.body, node.orelse)):
                for statement in part:
                    yield from _uses(statement, (*branch, id(node) + number))
        case ast.For():
            yield from _uses(node.iter, branch)
            for part in (node.target, *node.body, *node.orelse):
                yield from _uses(part, (*branch, id(node)))
        case ast.ListComp() | ast.SetComp() | ast.GeneratorExp() | ast.DictComp():
            results = (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,)
            yield from (use for part in (*node.generators, *results) for use in _uses(part, branch))
        case ast.comprehension():
            yield from (use for part in (node.iter, node.target, *node.ifs) for use in _uses(part, branch))
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _uses(child, branch)
