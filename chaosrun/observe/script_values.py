"""The plain values of a script (numbers, texts, lists of them, random generators) at the steps at which a restart may resume:
the variables of its running functions and of its modules, the attributes of its objects, the settings of its optimizers, and
what the modules that it trains keep in no state dict. And spots of the contents of models that no optimizer steps (a teacher, a
reference, an average of the weights), and of lists of tensors in its objects. Changes nothing."""

import contextlib
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeGuard, cast

import torch
import xxhash
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch.nn.parameter import is_lazy
from torch.optim.optimizer import Optimizer

from chaosrun.observe.contents import address_of
from chaosrun.observe.fingerprint import fingerprint, local_part
from chaosrun.observe.found_state import RATES_AND_WAYS
from chaosrun.observe.held import MODULE_INTERNALS
from chaosrun.observe.module_settings import HOOKS
from chaosrun.observe.plain_values import (
    CONTAINERS,
    MAPPINGS,
    MEMORY,
    STREAMS,
    generator_of,
    is_number,
    is_of_torch,
    is_passed_over,
    plain_values,
)
from chaosrun.observe.script_state import children, of_functions, of_modules, of_the_job, text_of
from chaosrun.wording import SECRET

STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
MOST_LOOKS = 1000
"""In an attempt."""
MOST_VALUES = 400
"""Of functions, and of modules."""
NEWEST = 300
"""So many modules, those imported last, may be the job's: to look at all that a process was forked with has each page of memory
copied that holds one, while a restart waits."""
LONGEST = 24
"""Characters of a text that is told as it is."""
SLOW_S = 0.05
PAUSE = 20
"""After a look that takes longer than SLOW_S, as at a model of thousands of modules, so many times as long passes without
one."""
MOST_OBJECTS = 400
MOST_HELD = 16
"""Models that no optimizer steps, and lists of tensors: so many, of so many tensors each, so many elements of each tensor."""
MOST_TENSORS = 64
ELEMENTS = 64


class ScriptValues:
    """The changes of these values. `known` returns the objects that are compared elsewhere: models, optimizers."""

    def __init__(self, known: Callable[[], list[Any]]) -> None:
        self._known = known
        self._told: dict[str, str] = {}
        self._modules: list[str] = []
        """Of the job; a later look may find many that a library has imported since."""
        self._first: set[str] = set()
        """Variables that were there when this was first asked."""
        self._looks = MOST_LOOKS
        self._due_s = 0.0

    def changed(self) -> dict[str, str]:
        """Values that changed since the last look, by path, "" for one no longer found; empty after too many looks, or slow
        ones."""
        if self._looks == 0 or time.monotonic() < self._due_s:
            return {}
        before, began_s = self._told, 0.0
        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # What other streams write is read below, and waiting for it is no slow look.
            began_s = time.thread_time()
            compared = self._known()
            optimizers = [each for each in compared if isinstance(each, Optimizer)]
            known = {id(each) for each in compared} - {id(each) for each in optimizers}
            self._modules = of_the_job([*self._modules, *islice(reversed(sys.modules), NEWEST)])
            functions, modules = of_functions(), of_modules(self._modules)
            functions |= _hidden(compared, functions)
            trained = [each for each in compared if isinstance(each, torch.nn.Module)]
            heads = {id(_bare(value)): name for name, value in reversed({**functions, **modules}.items())}
            kept = dict(islice(_kept(heads, trained), MOST_VALUES))
            hooks = dict(islice(_hooks(heads, trained, optimizers), MOST_VALUES // 2))  # the other half: what they hold
            settings = dict(islice(_settings(heads, optimizers), MOST_VALUES))
            whole = {name: text for name, value in kept.items() if (text := _with_tensors(value))}
            known |= {id(kept[name]) for name in whole} | {
                id(part) for each in trained if kept or hooks for part in each.modules()
            }
            shared = _addresses([*trained, *functions.values(), *modules.values()])
            self._first = self._first or {*functions}
            # Apart, for a later name of what was there before, as one given at a save, must not take the place of its first.
            later = {name: value for name, value in functions.items() if name not in self._first}
            roots = (kept, modules, {name: functions[name] for name in functions if name not in later}, later, hooks, settings)
            found = [plain_values(each, known, MOST_VALUES, shared).items() for each in roots]
            told = dict(_readable(name, text) for some in found for name, text in some)
            self._told = told | whole | _untrained({**functions, **modules}, compared, shared)
        except Exception:  # an object of the script may raise any error, which must not reach the training
            self._looks = 1
        self._looks -= 1
        if (took_s := time.thread_time() - began_s) > SLOW_S:
            self._due_s = time.monotonic() + PAUSE * took_s
        gone = dict.fromkeys(before.keys() - self._told.keys(), "")
        return gone | {name: text for name, text in self._told.items() if before.get(name) != text}


def _addresses(values: Iterable[Any]) -> set[int]:
    """Those of parameters and buffers of the models among these values: a state dict that the script keeps shows them as they
    are now, and one that it has loaded as they were when it was saved."""
    models = [each for each in values if issubclass(type(each), torch.nn.Module)]
    tensors = (tensor for each in models for tensor in (*each.parameters(), *each.buffers()))
    return {address_of(tensor) for tensor in tensors if not is_lazy(tensor)} - {0}


def _kept(names: Mapping[int, str], models: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    """What these models' modules keep besides parameters, buffers and settings (a hidden state, a queue, a memory of earlier
    batches, a private number), and attributes that are None yet, by location; and what the script has put on their parameters.
    `names`: of the script's variables, by the id of their value."""
    for model in models:
        head = names.get(id(model), type(model).__name__)
        for path, module in model.named_modules():
            if not is_of_torch(module):
                above = f"{head}.{path}" if path else head
                own = ((key, each) for key, each in vars(module).items() if key not in MODULE_INTERNALS)
                yield from ((f"{above}/{key}", each) for key, each in own if _is_kept(key, each))
        for path, parameter in model.named_parameters():
            yield from ((f"{head}.{path}/{key}", each) for key, each in vars(parameter).items())


def _hooks(
    names: Mapping[int, str], models: Iterable[torch.nn.Module], optimizers: Iterable[Optimizer]
) -> Iterator[tuple[str, Any]]:
    """Hooks on steps of these optimizers, and on these models' modules and parameters, by location: there may be some on every
    layer."""
    for optimizer in optimizers:
        above = names.get(id(optimizer), type(optimizer).__name__)
        hooks = enumerate(hook for kind in STEP_HOOKS for hook in (vars(optimizer).get(kind) or {}).values())
        yield from ((f"{above}/hooks/{number}", hook) for number, hook in hooks)
    for model in models:
        head = names.get(id(model), type(model).__name__)
        for path, module in model.named_modules():
            above = f"{head}.{path}" if path else head
            for kind in HOOKS:
                hooks = enumerate((vars(module).get(kind) or {}).values())
                yield from ((f"{above}/{kind[1:]}/{number}", hook) for number, hook in hooks)
        for path, parameter in model.named_parameters():
            of_gradients = (parameter._backward_hooks, getattr(parameter, "_post_accumulate_grad_hooks", None))
            hooks = enumerate(hook for kept in of_gradients for hook in (kept or {}).values())
            yield from ((f"{head}.{path}/hooks/{number}", hook) for number, hook in hooks)


def _bare(value: Any) -> Any:
    """The optimizer inside accelerate's wrapper, or the value itself."""
    return value.optimizer if issubclass(type(value), AcceleratedOptimizer) else value


def _settings(names: Mapping[int, str], optimizers: Iterable[Optimizer]) -> Iterator[tuple[str, Any]]:
    """What these optimizers' parameter groups are set to (weight decay, betas, …), by location. Learning rates are in each
    step's record."""
    for optimizer in optimizers:
        if not isinstance(optimizer, AcceleratedOptimizer):
            head = names.get(id(optimizer), type(optimizer).__name__)
            for number, group in enumerate(optimizer.param_groups):
                for name in sorted(optimizer.defaults.keys() & group.keys() - RATES_AND_WAYS):
                    yield f"{head}.param_groups[{number}]/{name}", group[name]


def _with_tensors(value: Any) -> str:
    """The text of a container with small tensors in it, however deep: a digest; empty for any other value. Of a list among the
    script's variables, which may hold samples, only the length is told."""
    texts = list(islice(_tensors(value), MOST_VALUES)) if type(value) in (*CONTAINERS, *MAPPINGS) else []
    digest = xxhash.xxh3_64_hexdigest(" ".join(texts).encode(errors="surrogatepass"))
    return f"{type(value).__name__}[{len(value)}] {digest}" if texts else ""


def _tensors(value: Any, depth: int = 3) -> Iterator[str]:
    for key, child in children(value):
        if isinstance(child, torch.Tensor) and is_number(child):
            yield f"{key} {text_of(child)}"
        elif type(child) in (*CONTAINERS, *MAPPINGS) and depth:
            yield from _tensors(child, depth - 1)


def _is_kept(name: str, value: object) -> bool:
    kind = type(value)
    is_private = name[:1] == "_"
    number = (kind in (int, float) and is_private) or (value is None and not is_private)  # others are settings
    return number or kind in (*CONTAINERS, *MAPPINGS, *STREAMS) or issubclass(kind, MEMORY)


def _hidden(compared: list[Any], functions: Mapping[str, Any]) -> dict[str, Any]:
    """Optimizers and schedulers that are under no variable, as a library holds them: what they count themselves, and what a
    schedule's functions do, is in no state dict. A variable may have the name of their class: the class itself."""
    optimizers = [each for each in compared if isinstance(each, Optimizer) and not isinstance(each, AcceleratedOptimizer)]
    schedulers = [each.scheduler for each in compared if isinstance(each, AcceleratedScheduler)]
    found: dict[str, Any] = {}
    for what, several in (("optimizer", optimizers), ("scheduler", schedulers)):
        for number, each in enumerate(several):
            name = type(each).__name__
            found[f"{what} {number}" if name in functions or name in found else name] = each
    return found


def _readable(name: str, text: str) -> tuple[str, str]:
    """The script's texts may be private: longer ones, and values named like a secret, are reported as digests."""
    quoted = "'" in text or '"' in text
    if quoted and (len(text) > LONGEST or SECRET.search(name.upper())):
        several, found, _ = text.partition(": ") if text[0] not in "'\"b" else ("", "", "")
        text = f"{several}{found}text {xxhash.xxh3_64_hexdigest(text.encode(errors='replace'))}"
    generator = generator_of(name)
    stands = "at" if name.endswith("/line") else "in"
    return (f"{generator} (generator)", f"{stands} {text}") if generator else (name, text)


def _untrained(variables: Mapping[str, object], known: Sequence[object], shared: Collection[int]) -> dict[str, str]:
    """Spots of models that no optimizer steps and of lists of tensors, by path. `variables`: the script's, by name; `known`:
    objects that are compared elsewhere; `shared`: addresses of models' tensors, which a state dict in a list's place shows."""
    trained = {id(tensor) for each in known for tensor in _trained(each)}
    found: dict[str, str] = {}
    met: set[int] = set()
    for path, tensors in _held(variables, {id(each) for each in known}, shared):
        if tensors and met.isdisjoint(map(id, tensors)) and trained.isdisjoint(map(id, tensors)) and len(found) < MOST_HELD:
            with contextlib.suppress(Exception):  # tensors without content
                found[path] = f"weights {_spots(tensors)}"
        met.update(map(id, tensors))
    return found


def _trained(known: object) -> Iterator[torch.Tensor]:
    match known:
        case torch.nn.Module():
            yield from known.parameters()
        case Optimizer():
            yield from (tensor for group in known.param_groups for tensor in group["params"])
        case _:
            pass


def _held(
    variables: Mapping[str, object], known: Collection[int], shared: Collection[int]
) -> Iterator[tuple[str, list[torch.Tensor]]]:
    """The tensors of models among the variables; in their attributes and items also lists of tensors (a function's own list may
    be a batch). Without those with `known` ids."""
    for name, value in islice(variables.items(), MOST_OBJECTS):
        if id(value) in known:
            continue
        if issubclass(type(value), torch.nn.Module):
            yield name, list(cast(torch.nn.Module, value).parameters())
            continue
        for key, child in _parts(value):
            path = f"{name}/{key}"
            if id(child) in known:
                continue
            if issubclass(type(child), torch.nn.Module):
                yield path, list(cast(torch.nn.Module, child).parameters())
            else:
                yield path, _listed(child, shared)


def _listed(value: object, shared: Collection[int]) -> list[torch.Tensor]:
    """The tensors of a list or dictionary of nothing else, none of them at a `shared` address."""
    inside = [*value.values()] if isinstance(value, dict) else [*value] if isinstance(value, list | tuple) else []
    return inside if all(_counts(each) and address_of(each) not in shared for each in inside) else []


def _counts(value: object) -> TypeGuard[torch.Tensor]:
    return isinstance(value, torch.Tensor) and value.grad_fn is None and value.is_floating_point()


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    kind = type(value)
    looked_into = kind is not dict and not is_passed_over(kind) and not issubclass(kind, torch.Tensor | Optimizer)
    own = getattr(value, "__dict__", None) if looked_into else value
    if type(own) is dict and len(own) <= MOST_OBJECTS:
        yield from ((key, child) for key, child in list(own.items()) if isinstance(key, str))


def _spots(tensors: Sequence[torch.Tensor]) -> str:
    """The beginnings of tensors spread over all of them: an averaged or copied model changes everywhere."""
    some = tensors[:: -(-len(tensors) // MOST_TENSORS)]
    plain = [local_part(each.detach()) for each in some if each.layout is torch.strided and not each.is_quantized]
    begun = [each[(0,) * max(each.dim() - 1, 0)].reshape(-1)[:ELEMENTS] for each in plain if each.numel() and not each.is_meta]
    return fingerprint(begun).value[:12]
