"""The training state of one rank, named and digested, read from the objects that accelerate prepared. Changes nothing."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from accelerate import Accelerator

from chaosrun.errors import MisuseError
from chaosrun.observe.contents import Components
from chaosrun.observe.fingerprint import digests, spots
from chaosrun.observe.found_state import settings_of
from chaosrun.observe.rng import digest_rng
from chaosrun.observe.script_state import is_own, script_roots, script_state
from chaosrun.records.traces import UNNAMED

HOOKS = (
    *("_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    *("_optimizer_state_dict_pre_hooks", "_optimizer_state_dict_post_hooks"),
    *("_optimizer_load_state_dict_pre_hooks", "_optimizer_load_state_dict_post_hooks"),
)
"""Where modules and optimizers keep the hooks that torch calls to make and load state dicts."""
METHODS = ("state_dict", "load_state_dict", "_save_to_state_dict", "_load_from_state_dict")


class ObservedState:
    """Models, optimizers, schedulers, random streams, and the objects that the script registered."""

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.registered: dict[str, Any] = {}
        self._bare: list[tuple[torch.nn.Module, torch.nn.Module]] = []
        """The prepared models, with and without their wrappers."""

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Every parameter once: those that optimizers update, in their order, then the frozen ones."""
        names = {id(parameter): name for name, parameter in self._named("named_parameters")}
        stepped = [p for optimizer in self.optimizers() for group in optimizer.param_groups for p in group["params"]]
        rest = [p for _, p in self._named("named_parameters")]
        unique = {id(parameter): parameter for parameter in [*stepped, *rest]}
        return [(names.get(key, f"{UNNAMED}{number}"), parameter) for number, (key, parameter) in enumerate(unique.items())]

    def parameter_names(self) -> list[str]:
        return [name for name, _ in self.parameters()]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [prepared.optimizer for prepared in self.accelerator._optimizers]

    def optimizer_digest(self) -> str:
        """Empty, as every checkpoint holds digests of it."""
        return ""

    def optimizer_digests(self) -> dict[str, str]:
        return {}

    def optimizer_settings(self) -> str:
        return settings_of(self.optimizers())

    def components(self) -> Components:
        """The live state without the random streams, by component: state dicts with names in place of parameter numbers."""
        return {
            "model": dict(self._named("named_parameters")),
            "buffers": self._buffers(),
            "optimizer": self._optimizer_states(),
            "scheduler": self._scheduler_states(),
            "registered": {name: item.state_dict() for name, item in self.all_registered().items()},
        }

    def digests(self, *, whole: bool = True, of: Components | None = None) -> dict[str, dict[str, str]]:
        """Digests of everything, by component and by name inside it; see `records.traces.EndRecord`. Not `whole`: large
        tensors count by their `spots` only, for comparison with other such digests. `of`: the components, if at hand.

        Raises MisuseError when a state dict holds a value without bits to compare.
        """
        try:
            found = (of or self.components()).items()
            components = {component: digests(values if whole else spots(values)) for component, values in found}
            return {**components, "rng": self.rng()}
        except (TypeError, ValueError) as error:
            raise MisuseError(
                f"a state_dict cannot be compared bit for bit: {error}",
                hint="state_dict() of registered objects must hold tensors, numbers, strings, None, lists and dicts",
            ) from error

    def modes(self) -> dict[str, str]:
        """Whether each module of the prepared models is in training mode, by name."""
        modules = [
            (f"{n}.{name}", module) for n, model in enumerate(self.bare_models()) for name, module in model.named_modules()
        ]
        return {name: "training" if module.training else "evaluation" for name, module in modules}

    def hooks(self) -> list[str]:
        """Names of the hooks that accelerate calls when it saves or loads."""
        hooks = [*self.accelerator._save_model_state_pre_hook.values(), *self.accelerator._load_model_state_pre_hook.values()]
        return list(dict.fromkeys(getattr(hook, "__qualname__", type(hook).__qualname__) for hook in hooks))

    def hooks_of(self, component: str) -> list[str]:
        """Names of all the script's own hooks and methods between a component and its files."""
        holders: list[Any] = self.optimizers() if component == "optimizer" else []
        if component in ("model", "buffers"):
            holders = [module for model in self.accelerator._models for module in model.modules()]
        return [*self.hooks(), *_own_hooks(holders)]

    def of_script(self) -> dict[str, str]:
        """The script's state outside the components, by path: see `observe.script_state`."""
        saved = [item for item in self.prepared() if isinstance(item, torch.nn.Module)]
        tensors = (tensor for model in saved for tensor in (*model.parameters(), *model.buffers()))
        return script_state(self.variables(), known=[id(item) for item in (self, self.accelerator, *tensors)])

    def rng(self) -> dict[str, str]:
        """Digests of the random streams."""
        return digest_rng(self.accelerator.device)

    def variables(self) -> dict[str, object]:
        """The script's variables and the prepared objects, by name."""
        return script_roots(self.accelerator)

    def bare_models(self) -> list[torch.nn.Module]:
        """The models as the script made them, without wrappers."""
        own = self.accelerator
        if [id(model) for model, _ in self._bare] != [id(model) for model in own._models]:
            # Cached: accelerate searches the disk for packages each time, and this is called several times a step.
            self._bare = [(model, own.unwrap_model(model)) for model in own._models]
        return [bare for _, bare in self._bare]

    def compared(self) -> list[Any]:
        """The prepared objects, and what they wrap. A registered one is not: its state dict may leave something out."""
        registered = {id(each) for each in self.all_registered().values()}
        return [each for each in (*self.prepared(), *self.optimizers()) if id(each) not in registered]

    def modules(self) -> list[torch.nn.Module]:
        return self.bare_models()

    def prepared(self) -> list[Any]:
        """Objects that are saved as a whole, and accelerate's wrappers around them."""
        own = self.accelerator
        registered = self.all_registered().values()
        return [own, *own._models, *self.bare_models(), *own._optimizers, *own._schedulers, *own._dataloaders, *registered]

    def all_registered(self) -> dict[str, Any]:
        """The objects that the script registered with chaosrun, and with accelerate, which saves them for rank 0 alone."""
        others = {f"accelerate/{number}": item for number, item in enumerate(self.accelerator._custom_objects)}
        return {**self.registered, **others}

    def _named(self, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        models = self.bare_models()
        for number, model in enumerate(models):
            prefix = f"{number}." if len(models) > 1 else ""
            for name, tensor in getattr(model, method)():
                yield prefix + name, tensor

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._named("named_buffers"))

    def _optimizer_states(self) -> dict[str, object]:
        """The optimizers' state dicts, with parameters by name instead of by number."""
        names = {id(parameter): name for name, parameter in self.parameters()}
        states: dict[str, object] = {}
        for number, optimizer in enumerate(self.optimizers()):
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            states[str(number)] = _by_name(optimizer.state_dict(), order)
        scaler = self.accelerator.scaler
        if scaler is not None:
            states["scaler"] = scaler.state_dict()
        return states

    def _scheduler_states(self) -> dict[str, object]:
        return {str(number): scheduler.state_dict() for number, scheduler in enumerate(self.accelerator._schedulers)}


def _by_name(state: Any, order: Sequence[str]) -> Any:
    """An optimizer's state dict with its parameters by name. Entries without a parameter, and state dicts in another form than
    torch's, stay unchanged."""
    if not (isinstance(state, Mapping) and isinstance(state.get("state"), Mapping) and "param_groups" in state):
        return state
    numbered = dict(enumerate(order))
    groups = [{key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]]
    entries = {numbered.get(key, key): entries for key, entries in state["state"].items()}
    return {**state, "state": entries, "param_groups": groups}


def _own_hooks(holders: Iterable[object]) -> list[str]:
    """Names of the script's own hooks on making and loading the state dicts of these modules or optimizers, and of a module's
    own methods for that; for an optimizer's methods see `TrainingState.own_loading`."""
    found: list[Any] = []
    for holder in holders:
        found += [hook for kind in HOOKS for hook in vars(holder).get(kind, {}).values()]
        found += [getattr(type(holder), name) for name in METHODS] if isinstance(holder, torch.nn.Module) else []
    return list(dict.fromkeys(name for each in found if (name := _own_name(each))))


def _own_name(hook: Any) -> str:
    """Its name in the source; for a callable object, that of its class; empty for a library's."""
    while isinstance(hook, functools.partial) or type(hook).__name__ == "_WrappedHook":  # torch's wrapper around a load hook
        hook = hook.func if isinstance(hook, functools.partial) else hook.hook
    if not is_own(getattr(hook, "__module__", None) or ""):
        return ""
    return getattr(hook, "__qualname__", type(hook).__qualname__).replace("<locals>.", "")
