"""The modules that hold the parameters which optimizers update, and the names of these parameters. Changes nothing."""

import re

import torch

from chaosrun.observe.beside import alive
from chaosrun.records.tensor_files import LEAST_BYTES

WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Parts of parameters' names that a wrapper puts in: the same parameter is called the same with and without it."""

REPARAMETRIZED = re.compile(r"(?:parametrizations\.)?([^.]+?)(?:\.original|_orig)$")
"""Names under which torch's pruning, spectral norm and parametrizations keep a parameter: it is called as it was before."""


def names_of_swapped(named: list[tuple[str, torch.Tensor]], stepped: list[torch.Tensor]) -> dict[int, str]:
    """The names of the optimizers' parameters, by id, in whose places a model holds others while `functional_call` runs."""
    others = [(name, tensor.shape) for name, tensor in named if not isinstance(tensor, torch.nn.Parameter)]
    if [shape for _, shape in others] != [parameter.shape for parameter in stepped]:
        return {}
    return {id(parameter): name for parameter, (name, _) in zip(stepped, others, strict=True)}


def unwrapped(name: str) -> str:
    return REPARAMETRIZED.sub(r"\1", ".".join(part for part in name.split(".") if part not in WRAPPERS))


def sizes_of(root: torch.nn.Module) -> set[tuple[str, int]]:
    """A model's parameters by name, with sizes in bytes, without those too small to be found in files."""
    return {(unwrapped(name), each.nbytes) for name, each in root.named_parameters() if each.nbytes >= LEAST_BYTES}


def smallest_of(root: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    """A model's smallest matrix by name, else its smallest parameter; empty without any."""
    return sorted(root.named_parameters(), key=lambda each: (each[1].ndim < 2, each[1].numel()))[:1]


def bare(module: torch.nn.Module) -> torch.nn.Module:
    """The module inside wrappers that only hold another module."""
    while True:
        inner = dict(module.named_children()).get("_orig_mod")  # of torch.jit's modules, _modules is no dict
        if inner is None and isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            inner = module.module
        if inner is None:
            return module
        module = inner


def holders(parameters: list[torch.nn.Parameter]) -> list[torch.nn.Module]:
    """The topmost live modules that hold any of these, ordered by the first one each holds."""
    order = {id(parameter): number for number, parameter in reversed(list(enumerate(parameters)))}
    modules = alive()
    inner = {id(child) for module in modules for child in module._modules.values()}
    first = {id(m): min((order[id(p)] for p in m.parameters() if id(p) in order), default=None) for m in modules}
    top = [module for module in modules if id(module) not in inner and first[id(module)] is not None]
    found, met = list[torch.nn.Module](), set[int]()
    for module in map(bare, sorted(top, key=lambda each: (first[id(each)] or 0, -len([*each.parameters()])))):
        held = {id(tensor) for tensor in (*module.parameters(), *module.buffers())}
        found += [] if held <= met else [module]  # a part of another, such as model[:3], comes and goes
        met |= held
    return found
