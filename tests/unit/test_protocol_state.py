"""What is restored, and that restoring runs nobody's code."""

import contextlib
import enum
import pickle
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from accelerate import Accelerator

from chaosrun.errors import InvalidCheckpointError, MisuseError, RestoreMismatchError
from chaosrun.protocol.state import TrainingState, _zeros


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
    state.accelerator.save_state(str(folder), safe_serialization=True)
    rank_file = folder / "chaosrun-rank-0.pt"
    rank_file.write_bytes(state.rank_payload())
    return rank_file


def test_zeros_that_zero_grad_left_are_there_after_a_restore(state: TrainingState, tmp_path: Path) -> None:
    """An optimizer steps a parameter with a gradient of zeros, and passes over one without a gradient."""
    (model,) = state.bare_models()
    rank_file = save(state, tmp_path)
    kept = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    state.load(tmp_path, rank_file)
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert kept == found.keys() and not any(gradient.any() for gradient in found.values())
    model.zero_grad()
    state.load(tmp_path, save(state, tmp_path))
    assert [parameter.grad for parameter in model.parameters()] == [None] * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_large_zeros_take_up_memory_only_once_they_are_used(dtype: torch.dtype) -> None:
    values = torch.empty(8, 1024, 32, 32, dtype=dtype).to(memory_format=torch.channels_last)
    parameter = torch.nn.Parameter(values)
    before = psutil.Process().memory_info().rss
    gradient = _zeros(parameter)
    size = gradient.numel() * gradient.element_size()
    assert psutil.Process().memory_info().rss - before < size / 2
    assert (gradient.shape, gradient.dtype, gradient.stride()) == (values.shape, dtype, values.stride())
    parameter.grad = gradient
    (parameter * 2).sum().backward()
    assert (gradient == 2).all() and gradient.data_ptr() % 64 == 0


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
    state.accelerator.register_for_checkpointing(Counter())
    save(state, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*PICKLED, "model.safetensors"])


@pytest.mark.parametrize("name", PICKLED)
@pytest.mark.parametrize("how", ["torch.save", "old torch.save", "pickle"])
def test_no_file_of_a_checkpoint_runs_code(state: TrainingState, tmp_path: Path, name: str, how: str) -> None:
    folder, sprung = tmp_path / "checkpoint", tmp_path / "sprung"
    state.accelerator.register_for_checkpointing(Counter())
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
    state.accelerator.register_for_checkpointing(Counter())
    rank_file = save(state, folder)
    torch.save({"state": Trap(sprung), "step": 0}, folder / name)
    monkeypatch.setattr("chaosrun.protocol.state.refuse_code", lambda directory: None)
    with contextlib.suppress(InvalidCheckpointError, pickle.UnpicklingError):
        state.load(folder, rank_file)
    assert not sprung.exists()


def test_what_was_registered_with_accelerate_comes_back_from_the_ranks_own_file(state: TrainingState, tmp_path: Path) -> None:
    counter = Counter()
    state.accelerator.register_for_checkpointing(counter)
    rank_file = save(state, tmp_path)
    counter.value = 5
    state.load(tmp_path, rank_file)
    assert counter.value == 3
    assert state.accelerator._custom_objects == [counter]


def test_state_of_a_class_is_refused_when_it_is_saved(state: TrainingState) -> None:
    state.register("colour", Counter(Colour.RED))
    assert state.digests()["registered"]["colour/value"] == "int:1"
    with pytest.raises(MisuseError, match=r"holds .*Colour, which no restore would load"):
        state.rank_payload()


def test_unless_the_user_names_the_class(state: TrainingState, tmp_path: Path) -> None:
    colour, name = Counter(Colour.RED), f"{Colour.__module__}.Colour"
    named = TrainingState(state.accelerator, classes=(name,))
    named.register("colour", colour)
    rank_file = save(named, tmp_path)
    colour.value = None
    named.load(tmp_path, rank_file)
    assert colour.value is Colour.RED
    other = TrainingState(state.accelerator)
    other.register("colour", Counter())
    with pytest.raises(InvalidCheckpointError, match="Colour"):
        other.load(tmp_path, rank_file)


@pytest.mark.parametrize("name", ["os.system", "nowhere.Class", "enum.NoSuch", "builtins.eval"])
def test_only_classes_can_be_named(state: TrainingState, name: str) -> None:
    with pytest.raises(MisuseError, match=re.escape(name)):
        TrainingState(state.accelerator, classes=(name,)).rank_payload()


def test_a_missing_rng_file_of_accelerate_changes_nothing(state: TrainingState, tmp_path: Path) -> None:
    rank_file = save(state, tmp_path)
    (tmp_path / "random_states_0.pkl").unlink()
    before = state.digests()
    torch.rand(3)
    assert state.digests() != before
    state.load(tmp_path, rank_file)
    assert state.digests() == before


class Lazy(torch.nn.Linear):
    """Makes a table, and lets another grow, in its first forward pass."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("grown", torch.zeros(1), persistent=False)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "made"):
            self.register_buffer("made", torch.ones(3), persistent=False)
            self.grown = torch.ones(4)
        return super().forward(input)


def lazy(*, other: bool = False) -> TrainingState:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(torch.nn.Linear(2, 2) if other else Lazy())
    accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return TrainingState(accelerator)


def test_buffers_of_the_first_forward_pass_come_back(tmp_path: Path) -> None:
    saved = lazy()
    saved.bare_models()[0](torch.ones(1, 2))
    rank_file = save(saved, tmp_path)
    restored = lazy()
    restored.load(tmp_path, rank_file)
    assert restored.digests()["buffers"] == saved.digests()["buffers"]
    assert [*saved.digests()["buffers"]] == ["0.grown", "0.made"]
    assert [*restored.bare_models()[0].state_dict()] == ["0.weight", "0.bias"]


def test_a_buffer_that_has_no_place_is_named(tmp_path: Path) -> None:
    saved = lazy()
    saved.bare_models()[0][0].sub = Lazy()  # pyright: ignore[reportIndexIssue]
    values = saved._rank_values()
    with pytest.raises(RestoreMismatchError, match=r"buffer '0.sub.grown' was saved and has no place in the model"):
        lazy()._load_rank_values(values)
    buffer = lazy()
    buffer.bare_models()[0][0].made = 3  # pyright: ignore[reportIndexIssue]
    with pytest.raises(RestoreMismatchError, match=r"buffer '0\.made'"):
        buffer._load_buffers({"0.grown": torch.zeros(1), "0.made": torch.ones(3)})


class OwnForm(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {"base": super().state_dict(), "count": 3}

    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict["base"])


def test_optimizer_state_of_any_form_is_digested() -> None:
    accelerator = Accelerator(cpu=True)
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    named = torch.optim.SGD(models[0].parameters(), momentum=0.9)
    accelerator.prepare(*models, named, OwnForm(models[1].parameters()))
    models[0](torch.ones(1, 2)).sum().backward()
    named.step()
    named.state["clip"]["mean"] = torch.ones(())  # pyright: ignore[reportArgumentType]
    digests = TrainingState(accelerator).digests()["optimizer"]
    assert {"0/state/0.weight/momentum_buffer", "0/state/clip/mean", "1/count", "1/base/param_groups/0/lr"} <= digests.keys()


class Parted(torch.optim.SGD):
    """As torch's ZeroRedundancyOptimizer, which needs a process group."""

    def consolidate_state_dict(self, to: int = 0) -> None:
        raise AssertionError("nobody asks for it")


def test_an_optimizer_that_parts_its_state_among_the_ranks_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Linear(2, 2)
    accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    TrainingState(accelerator).refuse_parted_optimizers()
    accelerator.prepare(Parted(model.parameters(), lr=0.1))
    with pytest.raises(MisuseError, match=r"optimizer 1 \(Parted\) splits its state among the ranks"):
        TrainingState(accelerator).refuse_parted_optimizers()


class Extra(torch.nn.Linear):
    def __init__(self, state: Any) -> None:
        super().__init__(2, 2)
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state


def test_an_extra_state_that_is_no_tensor_is_refused() -> None:
    accelerator = Accelerator(cpu=True)
    model = torch.nn.Sequential(Extra(torch.ones(2)))
    accelerator.prepare(model)
    TrainingState(accelerator).refuse_extra_state()
    model.add_module("body", Extra({"calls": 1}))
    with pytest.raises(MisuseError, match=r"get_extra_state\(\) of body \(Extra\) gives no tensor"):
        TrainingState(accelerator).refuse_extra_state()
