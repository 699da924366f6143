"""State that no checkpoint holds: optimizers that step without being prepared, and modules and tensors of the script's own that
a training changes, that live at its end, and that nobody saves.

Looks twice, when the first batch is about to come and when the training ends, and changes nothing. What each step makes anew (a
batch, a loss) is no state: of the script's variables, those that its loop sets before it reads them.
"""

import ast
import sys
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from chaosrun.observe.contents import address_of, tensors_in
from chaosrun.observe.fingerprint import local_part
from chaosrun.observe.script_state import MOST_CHILDREN, MOST_VALUES, children, is_own
from chaosrun.observe.state import ObservedState

LOOPS = ("batches", "windows")
SAMPLED = 1 << 16
"""So many elements of a tensor tell whether it has changed."""
Tensors = dict[int, str]
"""Of one value: digests by the address of their memory."""


class Outside:
    """Of one training."""

    def __init__(self, state: ObservedState) -> None:
        self._state = state
        self._stepped: dict[int, Optimizer] = {}
        self._hook = register_optimizer_step_post_hook(lambda optimizer, *_: self._stepped.update({id(optimizer): optimizer}))
        self._loop = _loops_variables(sys._getframe())
        self._before = self._held()

    def found(self) -> list[str]:
        """What was changed and is saved by nobody, in words."""
        self._hook.remove()
        held = self._held()
        changed = [name for name, (_, tensors) in held.items() if self._is_state(name) and self._differs(name, tensors)]
        return [*self._loose_optimizers(), *(f"{name} ({_told(*held[name])})" for name in changed)]

    def _is_state(self, name: str) -> bool:
        """Where the loop was not found, only what is a module is known to be none of a step's own."""
        if self._loop is None:
            return issubclass(self._kinds.get(name, object), torch.nn.Module)
        return name.partition("/")[0] not in self._loop

    def _differs(self, name: str, tensors: Tensors) -> bool:
        _, before = self._before.get(name, ("", {}))
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
        known = {id(item) for item in [self, self._state, *self._state.prepared()]}
        saved = {address_of(tensor) for tensor in tensors_in(self._state.components())}
        self._kinds: dict[str, type] = {}
        found: dict[str, tuple[str, Tensors]] = {}
        for path, value, tensors in _groups(self._state.variables(), known):
            own = {
                address_of(tensor): _digest(tensor) for tensor in tensors if _counts(tensor) and address_of(tensor) not in saved
            }
            if own:
                found[path], self._kinds[path] = (type(value).__name__, own), type(value)
                saved |= own.keys()
        return found


def _told(kind: str, tensors: Tensors) -> str:
    return kind if kind == "Tensor" else f"{kind}, {len(tensors)} tensor{'s' if len(tensors) > 1 else ''}"


def _groups(roots: Mapping[str, object], known: set[int]) -> Iterator[tuple[str, Any, Sequence[torch.Tensor]]]:
    """Modules, containers of tensors and single tensors that can be reached, nearest first."""
    met = set(known)
    waiting = deque(roots.items())
    looked_at = 0
    while waiting and looked_at < MOST_VALUES:
        path, value = waiting.popleft()
        if id(value) in met or isinstance(value, Optimizer | type):
            continue
        met.add(id(value))
        looked_at += 1
        if isinstance(value, torch.Tensor):
            yield path, value, [value]
        elif isinstance(value, torch.nn.Module):
            yield path, value, [*value.parameters(), *value.buffers()]
        else:
            inside = list(islice(children(value), MOST_CHILDREN))
            tensors = [child for _, child in inside if isinstance(child, torch.Tensor)]
            if tensors and isinstance(value, Mapping | list | tuple | deque):
                yield path, value, tensors
                met |= {id(tensor) for tensor in tensors}
            waiting.extend((f"{path}/{name}", child) for name, child in inside)


def _counts(tensor: torch.Tensor) -> bool:
    """Not what hangs in a graph, as a loss does, and not what has no bytes."""
    return tensor.grad_fn is None and tensor.layout is torch.strided and tensor.device.type != "meta" and tensor.numel() > 0


def _digest(tensor: torch.Tensor) -> str:
    flat = local_part(tensor).detach().reshape(-1)
    sample = flat[:: max(1, len(flat) // SAMPLED)].cpu().contiguous()
    return f"{tuple(tensor.shape)} {xxhash.xxh3_64_hexdigest(sample.view(torch.uint8).numpy().tobytes())}"


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
