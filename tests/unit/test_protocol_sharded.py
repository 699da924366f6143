"""Sharded state, on one rank: what is saved comes back, what cannot is refused. More ranks: integration/test_sharded.py."""

import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fresh import forget_accelerate
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.data import DataLoader, TensorDataset

import chaosrun
from chaosrun.errors import InvalidCheckpointError, MisuseError, UnsafeCheckpointError
from chaosrun.observe.fingerprint import digests, part_of
from chaosrun.protocol.adoption import adopt
from chaosrun.protocol.sharded import ShardedState
from chaosrun.protocol.state import is_sharded


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.later = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.register_buffer("count", torch.zeros(2), persistent=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.norm(self.body(inputs))


class Average:
    """Of sharded weights, as scripts write it."""

    def __init__(self, model: nn.Module) -> None:
        self.values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

    def update(self, model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            self.values[name].lerp_(parameter.detach(), 0.5)

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state["values"].items():
            self.values[name].copy_(value)


class Training:
    """As a new process would make it. `later` has no gradient, and so no state of the optimizer's."""

    def __init__(self, kind: str = "adamw") -> None:
        forget_accelerate()
        torch.manual_seed(0)
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        average = Average(model)
        made = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}[kind]
        self.model, self.average, self.optimizer = model, average, made(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, gamma=0.5)
        self.schedule, self.loader = schedule, DataLoader(TensorDataset(torch.zeros(4, 3)))
        self.state = ShardedState(adopt((model, self.optimizer, self.loader, schedule)))
        self.state.register("average", average)
        self.told = 0
        self.optimizer.register_step_pre_hook(self._tell)

    def _tell(self, *_: Any) -> None:
        self.told += 1

    def learn(self) -> "Training":
        self.model(torch.randn(4, 3)).square().mean().backward()
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        self.average.update(self.model)
        self.model.get_buffer("count").add_(1)
        return self

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        self.state.save(folder)
        (folder / "rank.pt").write_bytes(self.state.rank_payload())
        return folder

    def restore(self, folder: Path) -> "Training":
        self.state.load(folder, folder / "rank.pt")
        return self


@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_everything_comes_back(tmp_path: Path, kind: str) -> None:
    before = Training(kind).learn().learn()
    told = before.told
    expected = before.state.digests()
    folder = before.save(tmp_path / "step")
    assert before.told == told, "a save makes no step, not even one that changes nothing"
    assert before.state.digests() == expected
    later = before.learn().state.digests()
    fresh = Training(kind)
    assert fresh.state.digests() != expected
    fresh.restore(folder)
    assert fresh.told == 0
    assert fresh.state.digests() == expected
    assert fresh.learn().state.digests() == later


def test_names_are_global_and_say_which_part(tmp_path: Path) -> None:
    training = Training().learn()
    found = training.state.digests()
    assert "body.weight[0:3, 0:3]" in found["model"]
    assert "0/state/body.weight/exp_avg[0:3, 0:3]" in found["optimizer"]
    assert not any("later" in name for name in found["optimizer"])
    assert training.state.facts() == {"sharding": ["(Shard(dim=0),) on None (1,)"]}
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
    halves = distribute_tensor(torch.arange(6.0).reshape(3, 2), mesh, [Replicate(), Shard(1)])
    assert part_of(halves) == "[0:3, 0:2]"
    assert part_of(distribute_tensor(torch.ones(3), mesh, [Replicate(), Replicate()])) == part_of(torch.ones(3)) == ""
    # Whole tensors are digested as any others.
    assert digests({"x": halves}) == {"x[0:3, 0:2]": digests({"x": torch.arange(6.0).reshape(3, 2)})["x"]}


def test_a_wrong_shard_shows_in_the_digests(tmp_path: Path) -> None:
    before = Training().learn()
    expected = before.state.digests()
    folder = before.save(tmp_path / "step")
    fresh = Training().restore(folder)
    moment = fresh.optimizer.state[fresh.model.body.weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    moment.to_local().view(-1).view(torch.int32)[0] ^= 1
    differing = [name for name, digest in fresh.state.digests()["optimizer"].items() if expected["optimizer"][name] != digest]
    assert differing == ["0/state/body.weight/exp_avg[0:3, 0:3]"]


class Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("executed",)


def test_nothing_of_a_checkpoint_is_executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Training().learn().save(tmp_path / "step")
    index = folder / ".metadata"
    whole = index.read_bytes()
    index.write_bytes(pickle.dumps(Code()))
    with pytest.raises(UnsafeCheckpointError, match="mkdir"):
        Training().restore(folder)
    index.write_bytes(whole[:100])
    with pytest.raises(InvalidCheckpointError, match="not an index"):
        Training().restore(folder)
    shutil.rmtree(folder)
    training = Training().learn()
    training.optimizer.param_groups[0]["own"] = Code()
    training.save(folder)
    fresh = Training()
    fresh.optimizer.param_groups[0]["own"] = 1
    with pytest.raises(UnsafeCheckpointError, match=r"optimizer\.param_groups.*own.* holds more than plain values"):
        fresh.restore(folder)
    assert not Path("executed").exists()


def test_a_full_disk_is_told_as_the_kernel_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(FileSystem, "create_stream", full)
    with pytest.raises(OSError, match="No space left"):
        Training().learn().save(tmp_path / "step")


def test_what_cannot_be_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    model, loader = nn.Linear(2, 2), DataLoader(TensorDataset(torch.zeros(4, 2)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(MisuseError, match="got 1 models, 1 optimizers and 0 loaders"):
        chaosrun.attach(model, optimizer)
    with pytest.raises(MisuseError, match="got a list beside"):
        chaosrun.attach(model, optimizer, loader, [])
    with pytest.raises(MisuseError, match="FSDP1"):
        is_sharded(FullyShardedDataParallel(nn.Linear(2, 2), device_id=torch.device("cpu")))
    assert not is_sharded(model)
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    with pytest.raises(MisuseError, match="before the process group of 2 ranks"):
        chaosrun.attach(model, optimizer, loader)


def test_ranks_with_other_models_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training()
    training.state.refuse_loose_parameters()

    def other(found: list[Any], mine: dict[str, Any]) -> None:
        found[:] = [mine, {**mine, "stage.weight": (3, 3)}]

    monkeypatch.setattr(dist, "all_gather_object", other)
    with pytest.raises(MisuseError, match=r"rank 1 has another model than rank 0, first in stage\.weight"):
        training.state.refuse_loose_parameters()
