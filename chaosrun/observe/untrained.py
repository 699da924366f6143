"""A script's models that no optimizer steps (a teacher, a reference, an average of the weights), and lists of tensors in its
objects: spots of their contents, by location. Changes nothing."""

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, cast

import torch
from torch.optim.optimizer import Optimizer

from chaosrun.observe.contents import address_of
from chaosrun.observe.fingerprint import fingerprint, local_part
from chaosrun.observe.unsaved_values import is_passed_over

MOST_OBJECTS = 400
MOST_HELD = 16
"""Models, and lists of tensors."""
MOST_TENSORS = 64
ELEMENTS = 64
"""Of each tensor."""


def untrained(variables: Mapping[str, object], known: Sequence[object], shared: Collection[int] = ()) -> dict[str, str]:
    """`variables`: the script's, by name; `known`: objects that are compared elsewhere: models, optimizers; `shared`: addresses
    of the tensors of models, which a state dict in a list's place shows, too."""
    trained = {id(tensor) for each in known for tensor in _trained(each)}
    found: dict[str, str] = {}
    met: set[int] = set()
    for path, tensors in _held(variables, {id(each) for each in known}, shared):
        if met.isdisjoint(map(id, tensors)) and trained.isdisjoint(map(id, tensors)) and len(found) < MOST_HELD:
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
            yield from _of_model(name, cast(torch.nn.Module, value))
            continue
        for key, child in _parts(value):
            path = f"{name}/{key}"
            if id(child) in known:
                continue
            if issubclass(type(child), torch.nn.Module):
                yield from _of_model(path, cast(torch.nn.Module, child))
            elif (tensors := _listed(child)) and all(_counts(each) and address_of(each) not in shared for each in tensors):
                yield path, tensors


def _listed(value: object) -> list[Any]:
    match value:
        case dict():
            return list(value.values())
        case list() | tuple():
            return list(value)
        case _:
            return []


def _counts(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.grad_fn is None and value.is_floating_point()


def _parts(value: Any) -> Iterator[tuple[str, object]]:
    kind = type(value)
    looked_into = kind is not dict and not is_passed_over(kind) and not issubclass(kind, torch.Tensor | Optimizer)
    own = getattr(value, "__dict__", None) if looked_into else value
    if type(own) is dict and len(own) <= MOST_OBJECTS:
        yield from ((key, child) for key, child in list(own.items()) if isinstance(key, str))


def _of_model(path: str, model: torch.nn.Module) -> Iterator[tuple[str, list[torch.Tensor]]]:
    if tensors := list[torch.Tensor](model.parameters()):
        yield path, tensors


def _spots(tensors: Sequence[torch.Tensor]) -> str:
    """The beginnings of tensors spread over all of them: an averaged or copied model changes everywhere."""
    some = tensors[:: -(-len(tensors) // MOST_TENSORS)]
    plain = [local_part(each.detach()) for each in some if each.layout is torch.strided and not each.is_quantized]
    begun = [each[(0,) * max(each.dim() - 1, 0)].reshape(-1)[:ELEMENTS] for each in plain if each.numel() and not each.is_meta]
    return fingerprint(begun).value[:12]
