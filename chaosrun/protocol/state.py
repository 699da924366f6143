"""The training state of one rank, as it is saved and restored.

It must not know names of files beyond the rank file that it is given, nor steps or attempts.
"""

import copy
import io
import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from torch.distributed.fsdp import FullyShardedDataParallel

from chaosrun.errors import MisuseError, RestoreMismatchError
from chaosrun.observe.contents import address_of, tensors_in
from chaosrun.observe.fingerprint import local_part
from chaosrun.observe.hooks import parameters_of
from chaosrun.observe.rng import capture_rng, restore_rng
from chaosrun.observe.script_state import is_own
from chaosrun.observe.state import ObservedState
from chaosrun.protocol.loader_workers import worker_processes
from chaosrun.protocol.plain_values import load_values, plain_values, refuse_code, unpicklable

StateDict = dict[str, Any]
"""What state_dict() of torch's objects returns."""

LARGE_BYTES = 1 << 20
"""From this size on, zeros take up memory only once they are used."""


def is_sharded(model: torch.nn.Module) -> bool:
    """Whether any parameter is a DTensor. Raises MisuseError for FSDP1, whose flat parameters have no names."""
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        raise MisuseError(
            "chaosrun.attach() got a model under FullyShardedDataParallel (FSDP1), whose flat parameters it cannot restore",
            hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2; accelerate: fsdp_version=2), or let the script save "
            "and resume by itself",
        )
    return any(local_part(parameter) is not parameter for parameter in model.parameters())


class TrainingState(ObservedState):
    """The observed, saved and restored state."""

    own_components: Sequence[str] = ("rng", "buffers", "registered")
    """Components of the state that differ by rank."""

    def __init__(self, accelerator: Accelerator, classes: Sequence[str] = ()) -> None:
        """`classes`: names of the user's own classes that may be in checkpoints; see `protocol.plain_values`."""
        super().__init__(accelerator)
        self._classes = classes

    def register(self, name: str, item: Any) -> None:
        if name in self.registered:
            raise MisuseError(f"run.register({name!r}) was called twice", hint="give every registered object its own name")
        if not (callable(getattr(item, "state_dict", None)) and callable(getattr(item, "load_state_dict", None))):
            raise MisuseError(
                f"run.register({name!r}) got a {type(item).__name__}, which has no state_dict() and load_state_dict()",
                hint="register an object that can hand its state out and take it back",
            )
        self.registered[name] = item

    def refuse_loose_parameters(self) -> None:
        """Raise MisuseError for a parameter that an optimizer steps but no checkpoint would hold: it is in no prepared model
        and no registered object."""
        saved = {id(parameter) for _, parameter in self._named("named_parameters")}
        tensors = [value for item in self.all_registered().values() for value in tensors_in(item.state_dict())]
        memory = {address_of(tensor) for tensor in tensors}
        for number, optimizer in enumerate(self.optimizers()):
            for group, values in enumerate(optimizer.param_groups):
                for index, parameter in enumerate(values["params"]):
                    if id(parameter) not in saved and address_of(parameter) not in memory:
                        raise MisuseError(
                            f"optimizer {number} steps a parameter that belongs to no prepared model (group {group}, parameter "
                            f"{index}, shape {tuple(parameter.shape)}): no checkpoint would hold it",
                            hint="make it part of a model that accelerator.prepare() gets, or chaosrun.attach() without "
                            "accelerate; or run.register() an object whose state_dict holds it",
                        )

    def refuse_parted_optimizers(self) -> None:
        """Raise MisuseError for an optimizer such as torch's ZeroRedundancyOptimizer, where no rank can give the state of its
        part alone."""
        for number, optimizer in enumerate(self.optimizers()):
            if hasattr(optimizer, "consolidate_state_dict"):
                raise MisuseError(
                    f"optimizer {number} ({type(optimizer).__name__}) splits its state among the ranks, and gives it only "
                    "when all of it has been sent to one of them",
                    hint="attach with the optimizer that it wraps, or fully_shard() the model; or have the script save and "
                    "resume by itself, and drill it as it is, without chaosrun.attach()",
                )

    def refuse_extra_state(self) -> None:
        """Raise MisuseError for a module whose `get_extra_state` returns anything but a tensor: accelerate's files hold only
        tensors."""
        for model in self.bare_models():
            for name, module in model.named_modules():
                if type(module).get_extra_state is torch.nn.Module.get_extra_state:
                    continue
                if not isinstance(module.get_extra_state(), torch.Tensor):
                    raise MisuseError(
                        f"get_extra_state() of {name or 'the model'} ({type(module).__name__}) gives no tensor, and files of "
                        "weights hold tensors alone",
                        hint="return a tensor, such as torch.frombuffer(bytearray(pickle.dumps(it)), dtype=torch.uint8); or "
                        "have run.register save an object that keeps it",
                    )

    def facts(self) -> dict[str, object]:
        """Facts of the job that a checkpoint must agree with to be restored."""
        return {}

    def loader_workers(self) -> list[tuple[int, int]]:
        """Pid and start time (clock ticks since boot) of each worker of the training loader; some may have ended."""
        return worker_processes()

    def rank_payload(self) -> bytes:
        """The state that accelerate does not save, or not for every rank, as the bytes of a `torch.save` file.

        Raises MisuseError when a restore would refuse it.
        """
        return payload_of(self._local(self._rank_values()), self._classes)

    def parts(self, *, shared: bool, digested: bool) -> dict[str, object]:
        """Everything that a save writes, and everything that is digested; with `shared` and `digested` also the state that
        ranks share. Nothing is copied: the tensors are the live ones."""
        own, saved = self.accelerator, self.components()
        weights = [own.get_state_dict(model, unwrap=False) for model in own._models] if shared else []
        stateful = (loader if getattr(loader, "use_stateful_dataloader", False) else None for loader in own._dataloaders)
        return {
            "weights": weights,
            "states": [[item.state_dict() for item in items] if shared else [] for items in (own._optimizers, own._schedulers)],
            "loaders": [loader.state_dict() if loader else None for loader in stateful] if shared else [],
            "scaler": own.scaler.state_dict() if own.scaler is not None and shared else None,
            "custom": [item.state_dict() for item in own._custom_objects] if digested else [],
            "each_node": own.project_configuration.save_on_each_node,
            "process": dict(PartialState._shared_state),
            "cuda_streams": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
            "values": self._rank_values(saved["registered"]),
            "components": saved if digested else {name: saved[name] for name in ("buffers", "registered")},
        }

    def size(self) -> int:
        """Bytes of the saved tensors, roughly: without the objects that the script registered."""
        kept = [value for optimizer in self.optimizers() for value in tensors_in(list(optimizer.state.values()))]
        tensors = [*(parameter for _, parameter in self._named("named_parameters")), *self._buffers().values(), *kept]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    def only_while_it_waits(self) -> str:
        """Why the training has to wait for a save of this state; "" where a copy of it can be saved."""
        if self.hooks():
            return f"the script has hooks on saving and loading ({', '.join(self.hooks())})"
        if self._classes:
            return "checkpoint.classes names classes of the script's own"
        return ""

    def _rank_values(self, registered: Mapping[str, object] | None = None) -> dict[str, object]:
        if registered is None:
            registered = {name: item.state_dict() for name, item in self.all_registered().items()}
        return {
            "v": 1,
            "micro_step": self.accelerator.step,
            "rng": capture_rng(self.accelerator.device),
            "buffers": {name: tensor.detach() for name, tensor in self._buffers().items()},
            "registered": registered,
            "gradients": [
                name for name, p in self._named("named_parameters") if p.grad is not None and p.grad.layout == torch.strided
            ],
            **self._rest(),
        }

    def save(self, directory: Path) -> None:
        """Write the state that ranks save together. A collective."""
        self.accelerator.save_state(str(directory), safe_serialization=True)

    def own_files(self, directory: Path, rank: int) -> list[str]:
        """Names of the files that `save` has written on this rank alone."""
        return [f"random_states_{rank}.pkl"]

    def load(self, directory: Path, rank_file: Path) -> None:
        """Restore everything: accelerate's state first, then the rest, the random streams last.

        Executes no code from the files. Raises InvalidCheckpointError naming a file that needs it, before anything is loaded;
        RestoreMismatchError when the rank file lacks a part.
        """
        with plain_values(self._classes):
            refuse_code(directory)
            self._load_prepared(directory)
            saved = load_values(rank_file, map_location=self._own_device)
        missing = {"micro_step", "rng", "buffers", "registered", *self._rest()} - saved.keys()
        if missing:
            raise RestoreMismatchError(
                f"{rank_file}: {', '.join(sorted(missing))} missing", hint="the file is not one of this version's"
            )
        self._load_rank_values(saved)

    def load_copied(self, own: Any, shared: Any) -> None:
        """Restore everything as `load` does, from the results of `parts` for the rank's own and the shared state; neither is
        modified."""
        accelerator = self.accelerator
        for model, weights in zip(accelerator._models, shared["weights"], strict=True):
            model.load_state_dict(weights)
        optimizers, schedulers = shared["states"]
        stateful = [(loader, state) for loader, state in zip(accelerator._dataloaders, shared["loaders"], strict=True) if state]
        for item, state in (
            *zip(accelerator._optimizers, optimizers, strict=True),
            *zip(accelerator._schedulers, schedulers, strict=True),
            *stateful,
            *([(accelerator.scaler, shared["scaler"])] if accelerator.scaler is not None else []),
        ):
            # The objects keep the tensors they are given, and would train in the copy.
            item.load_state_dict(copy.deepcopy(state))
        self._load_rank_values(copy.deepcopy(own["values"]))

    def _load_rank_values(self, saved: StateDict) -> None:
        """Load the rank's own values, the random streams last."""
        self.accelerator.step = saved["micro_step"]
        self._load_buffers(saved["buffers"])
        self._load_rest(saved)
        # What zero_grad(set_to_none=False) leaves: an optimizer passes over a parameter without a gradient.
        had_gradients = {*saved.get("gradients", ())}
        for name, parameter in self._named("named_parameters"):
            if name in had_gradients:
                parameter.grad = _zeros(parameter)
        registered = self.all_registered()
        if saved["registered"].keys() != registered.keys():
            raise RestoreMismatchError(
                f"registered state {sorted(saved['registered'])} was saved, the script registered {sorted(registered)}",
                hint="register the same objects in every attempt, before the first batch",
            )
        for name, item in registered.items():
            item.load_state_dict(self._as_live(saved["registered"][name], item))
        restore_rng(saved["rng"], self.accelerator.device)

    def _load_buffers(self, saved: Mapping[str, torch.Tensor]) -> None:
        """Raises RestoreMismatchError naming a buffer that the model lacks, or that was not saved."""
        live = self._buffers()
        for name, buffer in live.items():
            if name not in saved:
                raise RestoreMismatchError(f"buffer {name!r} was not saved", hint="the model has changed since the save")
            own = self._local(buffer)
            if own.shape == saved[name].shape:
                with torch.no_grad():
                    own.copy_(saved[name])
        for name, value in saved.items():
            if name not in live or self._local(live[name]).shape != value.shape:
                self._put_buffer(name, value)

    def _put_buffer(self, name: str, value: torch.Tensor) -> None:
        """Restore a buffer that the first forward pass creates or enlarges, as it was when saved."""
        models = self.bare_models()
        number, path = name.split(".", 1) if len(models) > 1 else ("0", name)
        *owner, own = path.split(".")
        try:
            module = models[int(number)].get_submodule(".".join(owner))
            if own in module._buffers:
                setattr(module, own, value)
            else:
                module.register_buffer(own, value, persistent=False)
        except (AttributeError, KeyError) as error:
            raise RestoreMismatchError(
                f"buffer {name!r} was saved and has no place in the model: {error}",
                hint="build the same modules before the loop in every attempt",
            ) from error

    def _load_prepared(self, directory: Path) -> None:
        """Load the files of `save`."""
        # Through the CPU: accelerate's default would restore AdamW's step counters, which are on the CPU, to the GPU.
        # accelerate loads registered objects by a full unpickling, which runs any code, and gives rank 0's to all ranks: let it
        # count these objects and load none. Each rank's own state of them is in its rank file.
        with replaced(self.accelerator, {"_custom_objects": _Counted(self.accelerator._custom_objects)}):
            self.accelerator.load_state(str(directory), map_location="cpu", load_kwargs={"weights_only": True})

    def own_loading(self) -> dict[str, str]:
        """Classes of the optimizers whose load_state_dict is the script's own, by number."""
        loads = {str(number): type(optimizer) for number, optimizer in enumerate(self.optimizers())}
        return {number: kind.__qualname__ for number, kind in loads.items() if is_own(kind.load_state_dict.__module__)}

    def cast_on_load(self, directory: Path, paths: Sequence[str]) -> tuple[torch.dtype, torch.dtype] | None:
        """For optimizer tensors that differ from a checkpoint's files, by their paths in `components`: the first one's dtype in
        the file and here, if every one of them is the saved tensor cast to its parameter's dtype; else None."""
        parameters, files = dict(self.parameters()), dict[str, Any]()
        types: list[tuple[torch.dtype, torch.dtype]] = []
        try:
            for path in paths:
                number, _, rest = path.partition("/state/")
                name, _, key = rest.partition("/")
                optimizer, parameter = self.optimizers()[int(number)], parameters[name]
                if number not in files:
                    file = directory / ("optimizer.bin" if number == "0" else f"optimizer_{number}.bin")
                    with plain_values(self._classes):
                        files[number] = load_values(file, map_location="cpu")
                order = list(map(id, parameters_of(optimizer)))
                saved = files[number]["state"][order.index(id(parameter))][key]
                live = optimizer.state.get(parameter, {})[key].cpu()
                if saved.dtype == live.dtype or live.dtype != parameter.dtype or not torch.equal(saved.to(live.dtype), live):
                    return None
                types.append((saved.dtype, live.dtype))
        except Exception:  # another kind of state or checkpoint (sharded, for instance), which differs for other reasons
            return None
        return types[0]

    def _rest(self) -> StateDict:
        """The state that `save` does not write and the rank files hold."""
        return {}

    def _load_rest(self, saved: StateDict) -> None:
        """Load the result of `_rest` from a rank file."""

    def _local(self, state: Any) -> Any:
        """The state in the form used in rank files."""
        return state

    def _as_live(self, saved: Any, item: Any) -> Any:
        """A registered object's state, in the form that it loads."""
        return saved

    def _own_device(self, storage: Any, location: str) -> Any:
        """Map tensors saved from a GPU to this rank's GPU; the rest stays on the CPU."""
        if location == "cpu":
            return storage
        return torch.serialization.default_restore_location(storage, str(self.accelerator.device))


@contextmanager
def replaced(accelerator: Accelerator, attributes: Mapping[str, object]) -> Iterator[None]:
    """Give it these attributes in the block."""
    before = {name: getattr(accelerator, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(accelerator, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(accelerator, name, value)


def _zeros(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros like the parameter; on a CPU, large ones take up memory only once used, as most scripts drop them at once."""
    size = parameter.numel() * parameter.element_size()
    if type(parameter) is not torch.nn.Parameter or parameter.device.type != "cpu" or size < LARGE_BYTES:
        return torch.zeros_like(parameter)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    strides = torch.empty_like(parameter, device="meta").stride()
    return torch.frombuffer(memory, dtype=parameter.dtype).as_strided(parameter.shape, strides)


def payload_of(values: object, classes: Sequence[str]) -> bytes:
    """The bytes of a rank's own file. Raises MisuseError when a restore would refuse it."""
    buffer = io.BytesIO()
    torch.save(values, buffer)
    payload = buffer.getvalue()
    with plain_values(classes):
        if refused := unpicklable(payload):
            raise MisuseError(
                f"state_dict() of a registered object holds {', '.join(refused)}, which no restore would load",
                hint="return plain values, or name these classes in checkpoint.classes",
            )
    return payload


class _Counted(list[Any]):
    """A list that has a length and yields nothing."""

    def __iter__(self) -> Iterator[Any]:
        return iter(())
