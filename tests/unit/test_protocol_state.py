"""What is restored, and that restoring runs nobody's code."""

import contextlib
import enum
import pickle
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from chaosrun.errors import InvalidCheckpointError, MisuseError
from chaosrun.protocol.state import TrainingState


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


@pytest.fixture
def state() -> TrainingState:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    return TrainingState(accelerator)


def save(state: TrainingState, folder: Path) -> Path:
    state._accelerator.save_state(str(folder), safe_serialization=True)
    rank_file = folder / "chaosrun-rank-0.pt"
    rank_file.write_bytes(state.rank_payload())
    return rank_file


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return (Path.touch, (self._path,))


class Counter:
    """A registered object with a value in its state."""

    def __init__(self, value: Any = 3) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


class Colour(enum.IntEnum):
    """Has bits to compare, and a class to load."""

    RED = 1


PICKLED = ["chaosrun-rank-0.pt", "custom_checkpoint_0.pkl", "optimizer.bin", "random_states_0.pkl", "scheduler.bin"]


def test_these_are_all_the_files_that_could_hold_code(state: TrainingState, tmp_path: Path) -> None:
    state._accelerator.register_for_checkpointing(Counter())
    save(state, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*PICKLED, "model.safetensors"])


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("how", ["torch.save", "old torch.save", "pickle"])
def test_no_file_of_a_checkpoint_runs_code(state: TrainingState, tmp_path: Path, name: str, how: str) -> None:
    folder, sprung = tmp_path / "checkpoint", tmp_path / "sprung"
    state._accelerator.register_for_checkpointing(Counter())
    rank_file = save(state, folder)
    assert (folder / name).is_file()
    trap = {"state": Trap(sprung), "step": 0}
    if how == "pickle":
        (folder / name).write_bytes(pickle.dumps(trap))
    else:
        torch.save(trap, folder / name, _use_new_zipfile_serialization=how == "torch.save")
    # The trap works: loading it the old way springs it.
    if how == "pickle":
        pickle.loads((folder / name).read_bytes())
    else:
        torch.load(folder / name, weights_only=False)
    assert sprung.exists()
    sprung.unlink()
    before = state.digests()
    with pytest.raises(InvalidCheckpointError, match=re.escape(str(folder / name))) as refused:
        state.load(folder, rank_file)
    assert refused.value.hint is not None and "checkpoint.classes" in refused.value.hint
    assert not sprung.exists()
    assert state.digests() == before


@pytest.mark.parametrize("name", PICKLED)
def test_nor_does_it_run_where_the_look_beforehand_sees_nothing(
    state: TrainingState, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, sprung = tmp_path / "checkpoint", tmp_path / "sprung"
    state._accelerator.register_for_checkpointing(Counter())
    rank_file = save(state, folder)
    torch.save({"state": Trap(sprung), "step": 0}, folder / name)
    monkeypatch.setattr("chaosrun.protocol.state.refuse_code", lambda directory: None)
    with contextlib.suppress(InvalidCheckpointError, pickle.UnpicklingError):
        state.load(folder, rank_file)
    assert not sprung.exists()


def test_what_was_registered_with_accelerate_comes_back_from_the_ranks_own_file(state: TrainingState, tmp_path: Path) -> None:
    counter = Counter()
    state._accelerator.register_for_checkpointing(counter)
    rank_file = save(state, tmp_path)
    counter.value = 5
    state.load(tmp_path, rank_file)
    assert counter.value == 3
    assert state._accelerator._custom_objects == [counter]


def test_state_of_a_class_is_refused_when_it_is_saved(state: TrainingState) -> None:
    state.register("colour", Counter(Colour.RED))
    assert state.digests()["registered"]["colour/value"] == "int:1"
    with pytest.raises(MisuseError, match=r"holds .*Colour, which no restore would load"):
        state.rank_payload()


def test_unless_the_user_names_the_class(state: TrainingState, tmp_path: Path) -> None:
    colour, name = Counter(Colour.RED), f"{Colour.__module__}.Colour"
    named = TrainingState(state._accelerator, classes=(name,))
    named.register("colour", colour)
    rank_file = save(named, tmp_path)
    colour.value = None
    named.load(tmp_path, rank_file)
    assert colour.value is Colour.RED
    other = TrainingState(state._accelerator)
    other.register("colour", Counter())
    with pytest.raises(InvalidCheckpointError, match="Colour"):
        other.load(tmp_path, rank_file)


@pytest.mark.parametrize("name", ["os.system", "nowhere.Class", "enum.NoSuch", "builtins.eval"])
def test_only_classes_can_be_named(state: TrainingState, name: str) -> None:
    with pytest.raises(MisuseError, match=re.escape(name)):
        TrainingState(state._accelerator, classes=(name,)).rank_payload()


def test_a_missing_rng_file_of_accelerate_changes_nothing(state: TrainingState, tmp_path: Path) -> None:
    rank_file = save(state, tmp_path)
    (tmp_path / "random_states_0.pkl").unlink()
    before = state.digests()
    torch.rand(3)
    assert state.digests() != before
    state.load(tmp_path, rank_file)
    assert state.digests() == before
