"""The settings of a script's modules that no state dict holds: mode, hooks, frozen parameters, and plain attributes (a dropout
rate, a temperature, a count). Changes nothing."""

import contextlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from chaosrun.observe.held import MODULE_INTERNALS
from chaosrun.observe.script_state import PLAIN
from chaosrun.records.traces import CHANGES_OFTEN

MOST_SETTINGS = 4000
MOST_CHANGES = 64
"""Of one setting; a count of all steps would make the records long."""
LONGEST = 40
"""Characters of a text that is a setting; longer ones are left out."""
USUAL = {"training": True, "hooks": 0}
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""Where a module keeps them."""


@dataclass(slots=True)
class _Module:
    path: str
    own: dict[str, Any]
    size: int = -1
    names: tuple[str, ...] = ()

    def values(self) -> list[Any]:
        """Its mode, how many hooks it has, and its plain attributes."""
        own = self.own
        if len(own) != self.size:
            self.size = len(own)
            plain = (name for name, value in own.items() if type(value) in PLAIN and name not in MODULE_INTERNALS)
            self.names = ("training", *(name for name in plain if name[:1] != "_"), "hooks")
        get = own.get
        values = [value if type(value := get(name)) in PLAIN else None for name in self.names]
        # Asked one by one, as this is done in each step, and most modules have none.
        if get("_forward_hooks") or get("_forward_pre_hooks") or get("_backward_hooks") or get("_backward_pre_hooks"):
            values[-1] = sum(len(get(kind) or ()) for kind in HOOKS)
        else:
            values[-1] = 0
        return values


class ModuleSettings:
    """The changes of these settings, step by step, for modules that existed at the first step."""

    def __init__(self, roots: Sequence[torch.nn.Module]) -> None:
        self._modules: list[_Module] = []
        self._parameters: list[tuple[str, torch.nn.Parameter]] = []
        with contextlib.suppress(Exception):  # a module of the script may raise any error, which must not reach the training
            for number, root in enumerate(roots):
                prefix = f"{number}:" if number else ""
                self._modules += [_Module(prefix + path, vars(module)) for path, module in root.named_modules()]
                self._parameters += [(prefix + path, each) for path, each in root.named_parameters()]
        self._last: tuple[list[list[Any]], list[tuple[bool, int]]] | None = None
        self._told: dict[str, str] = {}
        self._changes: Counter[str] = Counter()

    def changed(self) -> dict[str, str]:
        """Settings that changed since the last call, by path; "" for one that is gone."""
        parameters = [(each.requires_grad, len(each._backward_hooks or ())) for _, each in self._parameters]
        now = [each.values() for each in self._modules], parameters
        if now == self._last:
            return {}
        self._last, before, self._told = now, self._told, self._settings(*now)
        found = {name: value for name, value in self._told.items() if before.get(name) != value}
        found |= dict.fromkeys(before.keys() - self._told.keys(), "")
        self._changes.update(found.keys())
        changes = self._changes
        return {
            name: value if changes[name] < MOST_CHANGES else CHANGES_OFTEN
            for name, value in found.items()
            if changes[name] <= MOST_CHANGES
        }

    def _settings(self, values: Sequence[Sequence[Any]], parameters: Sequence[tuple[bool, int]]) -> dict[str, str]:
        """Readable settings without the usual ones (modules in training mode, parameters that require gradients)."""
        told: dict[str, str] = {}
        for module, held in zip(self._modules, values, strict=True):
            for name, value in zip(module.names, held, strict=True):
                if (name not in USUAL or value != USUAL[name]) and len(text := str(value)) <= LONGEST:
                    told[f"{module.path}.{name}" if module.path else name] = text
        for (path, _), (is_trained, hooks) in zip(self._parameters, parameters, strict=True):
            told |= {} if is_trained else {f"{path}.requires_grad": "False"}
            told |= {f"{path}.hooks": str(hooks)} if hooks else {}
        return dict(list(told.items())[:MOST_SETTINGS])
