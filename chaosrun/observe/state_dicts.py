"""A script's own hooks and methods that torch calls to make and load state dicts. Changes nothing."""

import functools
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from chaosrun.observe.script_state import is_own

MODULE_HOOKS = ("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
OPTIMIZER_HOOKS = tuple(f"_optimizer_{when}" for when in ("state_dict_pre_hooks", "state_dict_post_hooks"))
OPTIMIZER_HOOKS += tuple(f"_optimizer_load_{when}" for when in ("state_dict_pre_hooks", "state_dict_post_hooks"))
METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")


def of_models(models: Iterable[torch.nn.Module]) -> list[str]:
    """Their names, for all modules of these models."""
    return _once(_of_modules(module for model in models for module in model.modules()))


def of_optimizers(optimizers: Iterable[torch.optim.Optimizer]) -> list[str]:
    """Names of hooks; see `TrainingState.own_loading` for methods."""
    return _once(_hooks(optimizers, OPTIMIZER_HOOKS))


def _of_modules(modules: Iterable[torch.nn.Module]) -> Iterator[str]:
    for module in modules:
        yield from _hooks([module], MODULE_HOOKS)
        methods = (getattr(type(module), name) for name in METHODS)
        yield from (name for method in methods if (name := _own_name(method)))


def _hooks(holders: Iterable[object], kinds: Iterable[str]) -> Iterator[str]:
    for holder in holders:
        hooks = (hook for kind in kinds for hook in vars(holder).get(kind, {}).values())
        yield from (name for hook in hooks if (name := _own_name(hook)))


def _own_name(hook: Any) -> str:
    """Empty for a library's."""
    while isinstance(hook, functools.partial) or type(hook).__name__ == "_WrappedHook":  # torch's wrapper around a load hook
        hook = hook.func if isinstance(hook, functools.partial) else hook.hook
    if not is_own(getattr(hook, "__module__", None) or ""):
        return ""
    return name_of(hook)


def name_of(hook: Any) -> str:
    """Its name in the source; for a callable object, that of its class."""
    return getattr(hook, "__qualname__", type(hook).__qualname__).replace("<locals>.", "")


def _once(names: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(names))
