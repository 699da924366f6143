"""Sharded state: models whose parameters are DTensors (FSDP2, HSDP, tensor parallelism). Each rank saves its own shards, in the
format of torch.distributed.checkpoint (DCP): `dcp.load` and `dcp_to_torch_save` can read the checkpoints.

The rank files hold what DCP keeps once for all ranks although each has its own (buffers, random streams), and everything that
is not a tensor of a model or an optimizer. Nothing is gathered: a rank writes, reads and digests its own part.
"""

import io
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map

from chaosrun.checkpoint.audit import list_members
from chaosrun.errors import InvalidCheckpointError, MisuseError, UnsafeCheckpointError
from chaosrun.observe.hooks import without_hooks
from chaosrun.protocol.state import StateDict, TrainingState

WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")
"""Parts of parameters' names that DCP leaves out."""
METADATA = frozenset(
    {
        *(("torch.distributed.checkpoint.metadata", name) for name in ("Metadata", "StorageMeta", "MetadataIndex")),
        *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *(("torch.distributed.checkpoint.metadata", name) for name in ("TensorProperties", "ChunkStorageMetadata")),
        ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.distributed.checkpoint.planner", "SavePlan"),
        *(("torch", name) for name in ("Size", "device")),
        *(("torch", name) for name in vars(torch) if isinstance(vars(torch)[name], torch.dtype | torch.layout)),
        *(("torch.serialization", "_get_layout"), ("collections", "OrderedDict"), ("pathlib", "PosixPath")),
    }
)
"""All that DCP's index of a checkpoint, a pickle, may name."""


class ShardedState(TrainingState):
    """The observed, saved and restored state of a training with DTensors."""

    own_components = ("model", "optimizer", "scheduler", *TrainingState.own_components)

    def refuse_loose_parameters(self) -> None:
        """As the base class; also raises MisuseError where ranks hold different parameters, as DCP identifies them by name. A
        collective."""
        super().refuse_loose_parameters()
        mine = {name: tuple(parameter.shape) for name, parameter in self._named("named_parameters")}
        ranks: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(ranks, mine)
        for rank, other in enumerate(ranks):
            if other != ranks[0]:
                name = next(name for name in [*ranks[0], *other] if ranks[0].get(name) != other.get(name))
                raise MisuseError(
                    f"rank {rank} has another model than rank 0, first in {name}: ({ranks[0].get(name)} on rank 0, "
                    f"{other.get(name)} on rank {rank})",
                    hint="pipeline stages are not supported by chaosrun.attach: let the script save and resume by itself",
                )

    def refuse_extra_state(self) -> None:
        """Refuses nothing: DCP also saves extra state that is not a tensor."""

    def facts(self) -> dict[str, object]:
        """Meshes and placements, once each."""
        parameters = [parameter for _, parameter in self._named("named_parameters") if isinstance(parameter, DTensor)]
        found = {f"{p.placements} on {p.device_mesh.mesh_dim_names} {tuple(p.device_mesh.shape)}" for p in parameters}
        return {"sharding": sorted(found)}

    def save(self, directory: Path) -> None:
        state = {"model": get_model_state_dict(self._root()), "optimizer": self._by_name()}
        with _as_raised():
            # The store flushes the files to disk.
            dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, sync_files=False))

    def only_while_it_waits(self) -> str:
        return "the state is sharded"

    def own_files(self, directory: Path, rank: int) -> list[str]:
        return [name for name in list_members(directory) if name.startswith(f"__{rank}_")]

    def _load_prepared(self, directory: Path) -> None:
        reader, model, optimizers = _Reader(directory), self._root(), self.optimizers()
        hooks: list[Any] = [(each._optimizer_step_pre_hooks, each._optimizer_step_post_hooks) for each in optimizers]
        with without_hooks(each for pair in hooks for each in pair):
            # Makes the future optimizer states, by a step that changes nothing.
            live: Any = get_optimizer_state_dict(model, optimizers)
        known = reader.read_metadata().state_dict_metadata
        # A parameter that had no gradient yet had no state.
        kept = {
            name: {key: value for key, value in entries.items() if f"optimizer.state.{name}.{key}" in known}
            for name, entries in live["state"].items()
        }
        live["state"] = {name: entries for name, entries in kept.items() if entries}
        state = {"model": get_model_state_dict(model), "optimizer": live}
        with _as_raised():
            dcp.load(state, storage_reader=reader, planner=_Planner())
        set_model_state_dict(model, state["model"])
        groups = iter(state["optimizer"]["param_groups"])
        for each in optimizers:
            _load_optimizer(each, [next(groups) for _ in each.param_groups], state["optimizer"]["state"])

    def _rest(self) -> StateDict:
        scaler = self.accelerator.scaler
        return {"scheduler": self._scheduler_states(), "scaler": None if scaler is None else scaler.state_dict()}

    def _load_rest(self, saved: StateDict) -> None:
        for number, scheduler in enumerate(self.accelerator._schedulers):
            scheduler.load_state_dict(saved["scheduler"][str(number)])
        if self.accelerator.scaler is not None and saved["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(saved["scaler"])

    def _local(self, state: Any) -> Any:
        return tree_map(lambda value: value.to_local() if isinstance(value, DTensor) else value, state)

    def _as_live(self, saved: Any, item: Any) -> Any:
        return _distributed(saved, item.state_dict())

    def _root(self) -> torch.nn.Module:
        models = self.bare_models()
        return models[0] if len(models) == 1 else torch.nn.ModuleList(models)

    def _by_name(self) -> StateDict:
        """All optimizers' state from `get_optimizer_state_dict`, which may make a step for that."""
        names = {id(parameter): _bare(name) for name, parameter in self._named("named_parameters")}
        state: StateDict = {}
        groups: list[StateDict] = []
        for optimizer in self.optimizers():
            state |= {names[id(p)]: dict(entries) for p, entries in optimizer.state.items() if entries}
            groups += [{**group, "params": [names[id(p)] for p in group["params"]]} for group in optimizer.param_groups]
        return {"state": state, "param_groups": groups}


def _distributed(state: Any, like: Any) -> Any:
    """A state of this rank's parts with DTensors again where `like`, a live one, has them."""
    match like:
        case DTensor() if isinstance(state, torch.Tensor):
            about = {"shape": like.shape, "stride": like.stride(), "run_check": False}
            return DTensor.from_local(state, like.device_mesh, like.placements, **about)
        case Mapping() if isinstance(state, dict):
            return {key: _distributed(value, like.get(key)) for key, value in state.items()}
        case list() | tuple() if isinstance(state, list | tuple) and len(state) == len(like):
            return type(state)(map(_distributed, state, like))
        case _:
            return state


def _bare(name: str) -> str:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _load_optimizer(optimizer: Optimizer, groups: Sequence[StateDict], state: StateDict) -> None:
    """`groups` and `state` as DCP has them: by names, where torch's own state_dict has numbers."""
    numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
    numbered = [{**group, "params": [numbers[name] for name in group["params"]]} for group in groups]
    optimizer.load_state_dict(
        {"state": {numbers[name]: dict(state[name]) for name in numbers if name in state}, "param_groups": numbered}
    )


@contextmanager
def _as_raised() -> Iterator[None]:
    """DCP raises a BaseException on all ranks that holds every rank's error: raise that of the lowest rank."""
    try:
        yield
    except CheckpointException as error:
        cause = error.failures[min(error.failures)][0]
        raise cause from error


class _Planner(DefaultLoadPlanner):
    """Loads plain values alone."""

    def load_bytes(self, read_item: Any, value: io.BytesIO) -> None:
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UnsafeCheckpointError(f"{read_item.dest_index.fqn} holds more than plain values ({error})") from error
        again = io.BytesIO()
        torch.save(loaded, again)
        again.seek(0)
        super().load_bytes(read_item, again)


class _Reader(dcp.FileSystemReader):
    """Reads an index only if it names nothing but DCP's own index types."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        path = Path(self.path) / ".metadata"
        try:
            _Named(io.BytesIO(path.read_bytes())).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, ValueError) as error:
            raise InvalidCheckpointError(f"{path}: not an index of torch.distributed.checkpoint ({error})") from error
        return super().read_metadata(*args, **kwargs)


class _Named(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in METADATA:
            raise UnsafeCheckpointError(f"the index of the checkpoint names {module}.{name}: nothing of it was loaded")
        return super().find_class(module, name)
