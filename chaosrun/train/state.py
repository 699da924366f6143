"""The training state of one rank, seen through the objects that accelerate prepared: what is saved, restored and digested.

Knows nothing of files' names beyond the rank file it is given, nothing of steps and attempts.
"""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch
from accelerate import Accelerator

from chaosrun.errors import MisuseError, RestoreMismatchError
from chaosrun.train.fingerprint import digests
from chaosrun.train.rng import capture_rng, digest_rng, restore_rng

__all__ = ["TrainingState"]

NUMPY_VALUES: list[Any] = [
    numpy.ndarray,
    numpy.dtype,
    numpy._core.multiarray.scalar,  # pyright: ignore[reportAttributeAccessIssue]
    numpy._core.multiarray._reconstruct,  # pyright: ignore[reportAttributeAccessIssue]
    *(type(numpy.dtype(code)) for code in "?bBhHiIlLqQefdFD"),
]
"""What numpy numbers and arrays in a state dict are pickled with: plain values, so loading them runs no code of anybody's."""


class TrainingState:
    """Models, optimizers, schedulers, random streams, and whatever the script registered."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self.registered: dict[str, Any] = {}

    def register(self, name: str, item: Any) -> None:
        if name in self.registered:
            raise MisuseError(f"run.register({name!r}) was called twice", hint="give every registered object its own name")
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
            raise MisuseError(
                f"run.register({name!r}) got a {type(item).__name__}, which has no state_dict() and load_state_dict()",
                hint="register an object that can hand its state out and take it back",
            )
        self.registered[name] = item

    def parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        """Every parameter once: those the optimizers step, in their order, then the frozen ones."""
        names = {id(parameter): name for name, parameter in self._named("named_parameters")}
        stepped = [p for optimizer in self.optimizers() for group in optimizer.param_groups for p in group["params"]]
        rest = [p for _, p in self._named("named_parameters")]
        unique = {id(parameter): parameter for parameter in [*stepped, *rest]}
        return [(names.get(key, f"unnamed-{number}"), parameter) for number, (key, parameter) in enumerate(unique.items())]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [prepared.optimizer for prepared in self._accelerator._optimizers]

    def learning_rates(self) -> list[float]:
        return [float(group["lr"]) for optimizer in self.optimizers() for group in optimizer.param_groups]

    def components(self) -> dict[str, dict[str, Any]]:
        """The live state but for the random streams, by component: state dicts with parameters called by name."""
        return {
            "model": dict(self._named("named_parameters")),
            "buffers": self._buffers(),
            "optimizer": self._optimizer_states(),
            "scheduler": self._scheduler_states(),
            "registered": {name: item.state_dict() for name, item in self._all_registered().items()},
        }

    def digests(self) -> dict[str, dict[str, str]]:
        """Digests of everything, by component and by name inside it; see the `end` line in records.trace.

        Raises MisuseError when a state dict holds something that has no bits to compare.
        """
        try:
            return self._digests()
        except (TypeError, ValueError) as error:
            raise MisuseError(
                f"a state_dict cannot be compared bit for bit: {error}",
                hint="state_dict() of registered objects must hold tensors, numbers, strings, None, lists and dicts",
            ) from error

    def _digests(self) -> dict[str, dict[str, str]]:
        components = {component: digests(values) for component, values in self.components().items()}
        return {**components, "rng": digest_rng(self._accelerator.device)}

    def rank_payload(self) -> bytes:
        """What accelerate does not save, or not for every rank, as the bytes of a `torch.save` file."""
        buffer = io.BytesIO()
        torch.save(
            {
                "v": 1,
                "micro_step": self._accelerator.step,
                "rng": capture_rng(self._accelerator.device),
                "buffers": {name: tensor.detach() for name, tensor in self._buffers().items()},
                "registered": {name: item.state_dict() for name, item in self._all_registered().items()},
            },
            buffer,
        )
        return buffer.getvalue()

    def load(self, directory: Path, rank_file: Path) -> None:
        """Restore everything: accelerate's own state first, then what it leaves out, the random streams last.

        Executes no code from the files (`weights_only`). Raises RestoreMismatchError when the rank file lacks a part.
        """
        with torch.serialization.safe_globals(NUMPY_VALUES):
            # By way of the CPU: accelerate's default would bring AdamW's step counters, which live there, back on the GPU.
            self._accelerator.load_state(str(directory), map_location="cpu", load_kwargs={"weights_only": True})
            saved = torch.load(rank_file, map_location=self._own_device, weights_only=True)
        missing = {"micro_step", "rng", "buffers", "registered"} - saved.keys()
        if missing:
            raise RestoreMismatchError(
                f"{rank_file}: {', '.join(sorted(missing))} missing", hint="the file is not one of this version's"
            )
        self._accelerator.step = saved["micro_step"]
        with torch.no_grad():
            for name, buffer in self._buffers().items():
                if name not in saved["buffers"]:
                    raise RestoreMismatchError(
                        f"{rank_file}: buffer {name!r} missing", hint="the model has changed since the save"
                    )
                buffer.copy_(saved["buffers"][name])
        registered = self._all_registered()
        if saved["registered"].keys() != registered.keys():
            raise RestoreMismatchError(
                f"{rank_file} holds registered state {sorted(saved['registered'])}, the script registered {sorted(registered)}",
                hint="register the same objects in every attempt, before the first batch",
            )
        for name, item in registered.items():
            item.load_state_dict(saved["registered"][name])
        restore_rng(saved["rng"], self._accelerator.device)

    def _all_registered(self) -> dict[str, Any]:
        """What the script registered here, and with accelerate, which saves it for rank 0 alone."""
        others = {f"accelerate/{number}": item for number, item in enumerate(self._accelerator._custom_objects)}
        return {**self.registered, **others}

    def _own_device(self, storage: Any, location: str) -> Any:
        """What lay on a GPU when it was saved goes to this rank's GPU, the rest stays on the CPU."""
        if location == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, str(self._accelerator.device))

    def _named(self, method: str) -> Iterator[tuple[str, torch.Tensor]]:
        models = self._accelerator._models
        for number, model in enumerate(models):
            prefix = f"{number}." if len(models) > 1 else ""
            for name, tensor in getattr(self._accelerator.unwrap_model(model), method)():
                yield prefix + name, tensor

    def _buffers(self) -> dict[str, torch.Tensor]:
        return dict(self._named("named_buffers"))

    def _optimizer_states(self) -> dict[str, Any]:
        """State dicts with parameters called by name instead of by number."""
        names = {id(parameter): name for name, parameter in self.parameters()}
        states: dict[str, Any] = {}
        for number, optimizer in enumerate(self.optimizers()):
            order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
            state = optimizer.state_dict()
            states[str(number)] = {
                "state": {order[index]: entries for index, entries in state["state"].items()},
                "param_groups": [
                    {key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]
                ],
            }
        scaler = self._accelerator.scaler
        if scaler is not None:
            states["scaler"] = scaler.state_dict()
        return states

    def _scheduler_states(self) -> dict[str, Any]:
        return {str(number): scheduler.state_dict() for number, scheduler in enumerate(self._accelerator._schedulers)}
