"""What is restored, and that restoring runs nobody's code."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState

from chaosrun.train.rng import digest_rng
from chaosrun.train.state import TrainingState


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


@pytest.mark.parametrize("name", ["chaosrun-rank-0.pt", "optimizer.bin", "scheduler.bin", "random_states_0.pkl"])
def test_no_file_of_a_checkpoint_runs_code(state: TrainingState, tmp_path: Path, name: str) -> None:
    folder, sprung = tmp_path / "checkpoint", tmp_path / "sprung"
    rank_file = save(state, folder)
    assert (folder / name).is_file()
    torch.save({"state": Trap(sprung), "step": 0}, folder / name)
    # The trap works: loading it the old way springs it.
    torch.load(folder / name, weights_only=False)
    assert sprung.exists()
    sprung.unlink()
    if name == "random_states_0.pkl":
        # accelerate goes on without it; the streams come from the rank's own file.
        before = digest_rng(torch.device("cpu"))
        torch.rand(3)
        state.load(folder, rank_file)
        assert digest_rng(torch.device("cpu")) == before
    else:
        with pytest.raises(pickle.UnpicklingError):
            state.load(folder, rank_file)
    assert not sprung.exists()


def test_a_missing_rng_file_of_accelerate_changes_nothing(state: TrainingState, tmp_path: Path) -> None:
    rank_file = save(state, tmp_path)
    (tmp_path / "random_states_0.pkl").unlink()
    before = state.digests()
    torch.rand(3)
    assert state.digests() != before
    state.load(tmp_path, rank_file)
    assert state.digests() == before
