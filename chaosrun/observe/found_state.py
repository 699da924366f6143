"""The training state of a rank, found in an unmodified script: its live optimizers, and the modules that hold the parameters
they update. Changes nothing.

Of a sharded tensor (DTensor) the local part counts. An optimizer's state is digested by value: a counter has the same digest as
a number and as a tensor of one element, since loading a checkpoint may turn the one into the other.
"""

import contextlib
import gc
import io
import itertools
import math
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import xxhash

from chaosrun.observe import hooks, ledger
from chaosrun.observe.contents import Components, content_digest
from chaosrun.observe.fingerprint import digests, fingerprint, local_part, part_of, spots
from chaosrun.observe.hooks import parameters_of
from chaosrun.observe.live_modules import (
    bare,
    digests_of_others,
    held_since,
    holders,
    names_of_swapped,
    sizes_of,
    smallest_of,
    unwrapped,
    with_gradients,
)
from chaosrun.observe.rng import digest_rng
from chaosrun.records.grouping import grouped
from chaosrun.records.left import MOST_BYTES
from chaosrun.records.tensor_files import contents, is_one
from chaosrun.records.traces import UNNAMED, StartRecord

RATES_AND_WAYS = frozenset({"lr", "foreach", "fused", "capturable", "differentiable"})
"""Settings of an optimizer that are recorded elsewhere, or do not change what it computes."""

DIGESTED = ("model", "buffers", "optimizer")
"""Components that can be found in any script."""


class FoundState:
    """Usable from the first forward pass on."""

    def __init__(self, outermost: torch.nn.Module | None, first: StartRecord | None = None) -> None:
        """`first`: the start record of the attempt that this one is compared with."""
        self._roots = [] if outermost is None else [bare(outermost)]
        self._first = first
        self.in_part = False
        """Whether the optimizers updated only some of the parameters when `parameters` was first called."""
        self._as_before = False
        """Whether `parameters` are in the first attempt's order even if the optimizers update all of them."""
        self._named: list[tuple[str, torch.nn.Parameter]] | None = None
        self._since: dict[int, tuple[str, str]] = {}
        """Of each of the modules, by id, what `held_since` says: asked once, as there may be thousands of parameters."""
        self._updated: set[int] = set()
        """The parameters, by id, that optimizers updated then."""
        self._kept: list[torch.optim.Optimizer] = []
        self._known = weakref.WeakSet(hooks.optimizers())
        """Optimizers that were there when the training began, or have stepped since."""
        self._replaced = weakref.WeakSet[torch.optim.Optimizer]()
        """Optimizers of an earlier phase of the training, and those of which a library has made a copy to train with. The
        script may keep them, but a restart need not build them: nothing that is recorded includes their state, rates or
        settings."""

    @property
    def device(self) -> torch.device:
        return next((parameter.device for _, parameter in self.parameters()), torch.device("cpu"))

    def keep(self, optimizer: torch.optim.Optimizer, beside: Collection[int] = ()) -> None:
        """Keep an optimizer that steps alive, so that its state can be read when the training ends even if the script has
        dropped it, until another optimizer steps the same parameters. If that one was built after the training began, it
        replaces those that have not stepped with it (`beside`: ids of the step's optimizers so far), until they step again."""
        self._replaced.discard(optimizer)
        earlier = itertools.takewhile(lambda each: each is not optimizer, hooks.optimizers())
        self._replaced.update(each for each in earlier if _is_made_anew(optimizer, each))
        if any(kept is optimizer for kept in self._kept):
            return
        shared = [kept for kept in self._kept if _share(kept, optimizer)]
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._replaced.update(each for each in shared if id(each) not in beside)
        self._kept = [*(kept for kept in self._kept if kept not in shared), optimizer]
        free_dropped_optimizers()

    def take_shared_for_replaced(self) -> bool:
        """Count an optimizer as replaced if a later one shares parameters with it, as if the later one had been built in the
        middle of the training. Returns whether any is replaced."""
        live = hooks.optimizers()
        self._replaced.update(each for n, each in enumerate(live) if any(_share(each, later) for later in live[n + 1 :]))
        return bool(self._replaced)

    def count_all(self) -> None:
        """Count no optimizer as replaced."""
        self._replaced.clear()

    def added(self, optimizer: torch.optim.Optimizer) -> list[torch.nn.Parameter]:
        """Parameters that it updates but no module had when the training began: they are not among `parameters`."""
        known = {id(parameter) for _, parameter in self.parameters()}
        return [parameter for parameter in parameters_of(optimizer) if id(parameter) not in known]

    def is_outdated(self) -> bool:
        """Whether optimizers now update other parameters than when `parameters` was first called."""
        return self._updated != {id(parameter) for optimizer in self.optimizers() for parameter in parameters_of(optimizer)}

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """The live ones, without those that others have replaced; where each has one parameter, in the order of these."""
        live = [each for each in hooks.optimizers() if each not in self._replaced]
        if len(live) < 2 or any(len(parameters_of(each)) != 1 for each in live):
            return live
        places = {id(parameter): number for number, (_, parameter) in enumerate(self._named or ())}
        return sorted(live, key=lambda each: places.get(id(parameters_of(each)[0]), -1))

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Every parameter, once, of the modules that optimizers update; in the optimizers' order if they update all of them."""
        if self._named is None:
            stepped = with_gradients([p for optimizer in self.optimizers() for p in parameters_of(optimizer)])
            self._since.clear()
            known, self._updated = {id(p) for root in self._roots for p in root.parameters()}, {id(p) for p in stepped}
            if any(id(p) not in known for p in stepped):
                self._roots = holders(stepped) or self._roots
            held = [*self._of_roots("named_parameters")]
            names = {id(p): name for name, p in held} | names_of_swapped(held, [p for p in stepped if id(p) not in known])
            rest = [p for _, p in held if isinstance(p, torch.nn.Parameter)]
            # If some are frozen, the next stage's optimizers may have them in another order.
            self.in_part = len(self._updated) < len({id(p) for p in rest})
            unique = {id(p): p for p in ([*rest, *stepped] if self.in_part else [*stepped, *rest])}
            named = [(names.get(key, f"{UNNAMED}{n}"), p) for n, (key, p) in enumerate(unique.items())]
            self._named = self._as_at_first(named)
        return self._named

    def order_as_at_first(self, wanted: bool) -> bool:
        """Put the parameters in the first attempt's order, whatever the optimizers' own; or back. Returns whether that changes
        their order."""
        self._as_before, before, self._named = wanted, self.parameters(), None
        return [name for name, _ in before] != [name for name, _ in self.parameters()]

    def _as_at_first(self, named: list[tuple[str, torch.nn.Parameter]]) -> list[tuple[str, torch.nn.Parameter]]:
        """In the first attempt's order: a layer that was frozen or unfrozen in the middle of the training keeps its place."""
        tensors = self._first.tensors if self._first and (self._as_before or self._is_in_part) else ()
        by_tensor = {name + part_of(parameter): (name, parameter) for name, parameter in named}
        return [by_tensor[each] for each in tensors] if {*tensors} == {*by_tensor} else named

    @property
    def _is_in_part(self) -> bool:
        return self.in_part or (self._first is not None and self._first.in_part)

    def modules(self) -> list[torch.nn.Module]:
        """The outermost modules that hold `parameters`."""
        return self._roots

    def optimizer_digest(self) -> str:
        """A digest of all optimizers' state, 16 hex digits. An optimizer without state, or that never steps, adds nothing."""
        return _digest_of(self.optimizers())

    def optimizer_digests(self) -> dict[str, str]:
        """A digest of each optimizer's state, by its name, but for those whose inner optimizer has it."""
        named = named_optimizers(self.optimizers())
        return {name: _digest_of([optimizer]) for name, optimizer in named.items() if not _is_shell(optimizer)}

    def scheduled(self) -> bool:
        """Whether a torch scheduler sets the learning rates of an optimizer, directly or through a wrapper with the same
        groups."""
        known = self.optimizers()
        if any(hasattr(optimizer.step, "_wrapped_by_lr_sched") for optimizer in known):
            return True
        groups = {id(group) for optimizer in known for group in optimizer.param_groups}
        schedulers = (each for each in gc.get_objects() if issubclass(type(each), torch.optim.lr_scheduler.LRScheduler))
        set_by_them = (getattr(vars(each).get("optimizer"), "param_groups", ()) for each in schedulers)
        return any(id(group) in groups for each in set_by_them for group in each)

    def optimizer_settings(self) -> str:
        """`settings_of`, with the order in which the optimizers hold `parameters`, if they update all of them."""
        places = {id(parameter): number for number, (_, parameter) in enumerate(self.parameters())}
        held = [places.get(id(each)) for optimizer in self.optimizers() for each in parameters_of(optimizer)]
        return settings_of(self.optimizers(), () if self._is_in_part else held)

    def components(self) -> dict[str, dict[str, object]]:
        """As `ObservedState.components`, but without schedulers and registered objects, which cannot be found."""
        names = {id(parameter): name for name, parameter in self.parameters()}
        kept: dict[str, object] = {}
        for number, optimizer in enumerate(self.optimizers()):
            own = [names.get(id(parameter), f"{UNNAMED}{index}") for index, parameter in enumerate(parameters_of(optimizer))]
            for (index, *path), value in _state_of(optimizer):
                kept["/".join(map(str, (number, own[index], *path)))] = value
        buffers = self._named_buffers()
        return {"model": dict(self.parameters()), "buffers": buffers, "optimizer": kept, "scheduler": {}, "registered": {}}

    def buffers(self) -> dict[str, str]:
        """Digests of the model's buffers, by name."""
        return digests(self._named_buffers())

    def digests(self, *, of: Components | None = None) -> dict[str, dict[str, str]]:
        """As `ObservedState.digests`."""
        components = of or self.components()
        return {**{component: digests(components[component]) for component in DIGESTED}, "rng": digest_rng(self.device)}

    def digests_of_others(self) -> dict[str, str]:
        """As `live_modules.digests_of_others`."""
        trained = [parameter for _, parameter in self.parameters()]
        return digests_of_others(trained, self._updated)

    def trained_in(self, held: Mapping[str, str]) -> tuple[str, ...]:
        """The folders of a save that hold the current models, recognised by the smallest matrix: a teacher or an average has
        the same names but other values."""
        found: set[str] = set()
        for root in self._roots:
            for name, told in smallest_of(root.named_parameters()):
                digest = content_digest(told.detach())
                found |= {path.rpartition("/")[0] for path, value in held.items() if value == digest and path.endswith(name)}
        return tuple(sorted(found))

    def is_held_in(self, path: Path, aside: bool = False) -> bool:
        """Whether a file of any kind (see `records.tensor_files`) holds a current model, recognised by its smallest matrix; for
        a file written by another thread, whether it holds all of a model's parameters, by name and size. Raises OSError."""
        with path.open("rb") as file:
            looks_so = is_one(file.read(8), path.suffix)
        if not looks_so or path.stat().st_size > MOST_BYTES:
            return False
        held = contents(path).entries
        if aside:
            named = {(unwrapped(name.rpartition("/")[2]).removeprefix("module."), size) for name, (size, _) in held.items()}
            return any(own and own <= named for own in map(sizes_of, self._roots))
        digests = {digest for _, digest in held.values()}
        models = [root.named_parameters() for root in self._roots] or [self.parameters()]  # of no module
        return any(digests & _digests_in_files(smallest) for each in models for _, smallest in smallest_of(each))

    def hooks(self) -> list[str]:
        return []

    def compared(self) -> list[Any]:
        return [*self._roots, *hooks.optimizers()]

    def of_script(self) -> dict[str, str]:
        """Empty: here it cannot be distinguished from the state that the script trains."""
        return {}

    def loader_workers(self) -> list[tuple[int, int]]:
        return ledger.loader_workers()

    def _named_buffers(self) -> dict[str, object]:
        return dict(self._of_roots("named_buffers"))

    def _of_roots(self, method: str) -> Iterator[tuple[str, Any]]:
        first = self._first.tensors if self._first else ()
        for number, root in enumerate(self._roots):
            prefix = f"{number}." if len(self._roots) > 1 else ""
            if id(root) not in self._since:
                before = [name.removeprefix(prefix) for name in first if name.startswith(prefix)]
                now = [unwrapped(name) + part_of(each) for name, each in root.named_parameters()]
                self._since[id(root)] = held_since(before, now)
            less, more = self._since[id(root)]
            for name, tensor in getattr(root, method)():
                own = unwrapped(name)
                # A buffer of the outer module's own may be called as one of the model.
                yield prefix + more + (own[len(less) :] if own.startswith(less) else f"..{own}"), tensor


def _digests_in_files(tensor: torch.Tensor) -> set[str]:
    """The digests that `records.tensor_files` gives to its bytes and to a numpy array of them."""
    values = local_part(tensor.detach()).cpu().contiguous()
    array = io.BytesIO()
    with contextlib.suppress(TypeError):  # numpy has no such numbers (bfloat16, float8)
        numpy.save(array, values.numpy())
    whole = values.reshape(-1).view(torch.uint8).numpy().tobytes()  # a single number has no bytes to view
    return {xxhash.xxh3_64_hexdigest(each) for each in (whole, array.getvalue())}


def stepped_digest() -> str:
    """A quick digest (see `spots`) of the live optimizers' parameters and state: it changes when something is loaded."""
    seen = {
        str(number): [parameters_of(each), {str(path): value for path, value in _state_of(each)}]
        for number, each in enumerate(hooks.optimizers())
    }
    return xxhash.xxh3_64_hexdigest(repr(digests(spots(seen))).encode())


def _share(one: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether two optimizers update a parameter in common."""
    return not {id(parameter) for parameter in parameters_of(one)}.isdisjoint(map(id, parameters_of(other)))


def named_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, torch.optim.Optimizer]:
    """Empty unless there are several. Named by class; those of the same class are numbered in their order."""
    if len(optimizers) < 2:
        return {}
    found = grouped(optimizers, lambda optimizer: type(optimizer).__qualname__)
    return {
        kind if len(alike) == 1 else f"{kind} {number} of {len(alike)}": optimizer
        for kind, alike in found.items()
        for number, optimizer in enumerate(alike, 1)
    }


def names_of_optimizers(optimizers: Sequence[torch.optim.Optimizer]) -> dict[int, str]:
    """By id; empty unless there are several."""
    return {id(optimizer): name for name, optimizer in named_optimizers(optimizers).items()}


def rates_of(optimizers: Iterable[torch.optim.Optimizer]) -> list[float]:
    """The learning rate of each parameter group; nan for a group without one, or with None (the optimizer finds its own).
    Records hold rates as text and as bits, in which nan equals nan."""
    rates = [group.get("lr") for optimizer in optimizers for group in optimizer.param_groups]
    return [math.nan if rate is None else float(rate) for rate in rates]


def settings_of(optimizers: Iterable[torch.optim.Optimizer], order: Sequence[int | None] = ()) -> str:
    """A digest of weight decay, betas, momentum and the like, of each parameter group, and of an order other than 0, 1, 2 …"""
    told: list[Any] = [
        [(name, _number(group.get(name))) for name in sorted(optimizer.defaults) if name not in RATES_AND_WAYS]
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
    told += [] if [*order] == [*range(len(order))] else order
    return xxhash.xxh3_64_hexdigest(repr(told).encode())


def _is_made_anew(stepped: torch.optim.Optimizer, other: torch.optim.Optimizer) -> bool:
    """Whether the one that has stepped was made in the place of the other, which has neither stepped nor been loaded: alike,
    and with the same parameters, as by a library that makes the given optimizer anew unless it resumes."""
    if other.state or not stepped.state or type(stepped) is not type(other):
        return False
    alike = {**stepped.defaults, "lr": 0} == {**other.defaults, "lr": 0}
    return alike and [*map(id, parameters_of(stepped))] == [*map(id, parameters_of(other))]


def free_dropped_optimizers(model: torch.nn.Module | None = None) -> None:
    """Free optimizers that the script may have dropped, which a reference cycle (with a scheduler, in a trainer) keeps alive
    until some garbage collection: one whose parameters another has taken over, or that updates others than this model's."""
    live = hooks.optimizers()
    stepped = [id(parameter) for optimizer in live for parameter in parameters_of(optimizer)]
    beside = len(live) > 1 and model is not None and not {id(parameter) for parameter in model.parameters()}.issuperset(stepped)
    del live
    if beside or len(set(stepped)) < len(stepped):
        gc.collect()


def _digest_of(optimizers: Iterable[torch.optim.Optimizer]) -> str:
    tensors: list[torch.Tensor] = []
    plain: list[Any] = []
    for number, optimizer in enumerate(optimizers):
        for path, value in _state_of(optimizer):
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                plain.append((number, path))
            else:
                plain.append((number, path, value))
    return xxhash.xxh3_64_hexdigest(f"{fingerprint(tensors).value} {plain}".encode())


def _is_shell(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an inner optimizer updates this rank's share; nothing reads what loading leaves in this outer one."""
    return any(kind.__qualname__ == "ZeroRedundancyOptimizer" for kind in type(optimizer).__mro__)


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """An optimizer's state, by the parameter's number and the keys below: a tensor, or a plain value."""
    if _is_shell(optimizer):
        return
    for index, parameter in enumerate(parameters_of(optimizer)):
        if kept := optimizer.state.get(parameter):
            yield from _values_of(kept, (index,))


def _number(value: Any) -> Any:
    """A setting as a plain value."""
    if isinstance(value, list | tuple):
        return [_number(each) for each in value]
    return float(value) if isinstance(value, int | float | torch.Tensor) else type(value).__name__


def _values_of(kept: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    match kept:
        case torch.Tensor() if kept.ndim or not kept.is_cpu or kept.is_complex():
            yield path, kept
        case bool() | str():
            yield path, kept
        case torch.Tensor() | int() | float():
            yield path, float(kept)
        case None:
            pass
        case Mapping():
            for key in sorted(kept, key=str):
                yield from _values_of(kept[key], (*path, key))
        case list() | tuple():
            for number, item in enumerate(kept):
                yield from _values_of(item, (*path, number))
        case _:
            yield path, type(kept).__qualname__
