"""Renames are told with both names; files that hold the weights are told, whatever wrote them."""

import importlib
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import numpy
import pytest
import torch

from chaosrun.observe import hooks
from chaosrun.observe.found_state import FoundState
from chaosrun.observe.saves import MOST_LOOKS, SaveWatch
from chaosrun.observe.writers import WRITERS, wrap_writers
from chaosrun.records.traces import SaveRecord


@pytest.mark.parametrize("inside", [True, False])
def test_a_rename_tells_what_it_was_called_before(tmp_path: Path, inside: bool) -> None:
    found: list[SaveRecord] = []
    watch = SaveWatch([str(tmp_path)], lambda: 5, lambda step: None, found.append)
    before = tmp_path / "ckpt/tmp" if inside else Path("/elsewhere/tmp")
    watch._hear("os.rename", (before, tmp_path / "ckpt/step-5.pt", -1, -1))
    assert [(save.how, save.path, save.before) for save in found] == [
        ("rename", "ckpt/step-5.pt", "ckpt/tmp" if inside else "")
    ]


def in_a_buffer(state: dict[str, Any], path: Path) -> None:
    held = io.BytesIO()
    torch.save(state, held)
    path.write_bytes(held.getvalue())


def arrays(state: dict[str, Any], path: Path) -> None:
    with path.open("wb") as file:
        numpy.savez(file, **{name: value.numpy() for name, value in state.items()})


WRITTEN: dict[str, Callable[[dict[str, Any], Path], Any]] = {
    "buffer": in_a_buffer,
    "pickle": lambda state, path: path.write_bytes(pickle.dumps({name: value.numpy() for name, value in state.items()})),
    "arrays": arrays,
}


@pytest.mark.parametrize("way", WRITTEN)
def test_a_file_that_holds_the_weights_is_told_when_the_step_is_over(tmp_path: Path, way: str) -> None:
    found: list[SaveRecord] = []
    watch = SaveWatch([str(tmp_path)], lambda: 5, lambda step: None, found.append)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
    for name, factor in (("5", 1.0), ("others", 2.0)):
        watch._hear("open", (tmp_path / f"{name}.tmp", "w", 0o1101))
        WRITTEN[way]({name: value * factor for name, value in model.state_dict().items()}, tmp_path / f"{name}.tmp")
        watch._hear("os.rename", (tmp_path / f"{name}.tmp", tmp_path / f"{name}.pt", -1, -1))
        (tmp_path / f"{name}.tmp").rename(tmp_path / f"{name}.pt")
    found.clear()
    for _ in range(2):
        watch.look(FoundState(model).is_held_in)
    assert [(save.how, save.path, save.step, save.done) for save in found] == [("file", "5.pt", 5, True)]


@pytest.mark.parametrize("lives", [True, False])
@pytest.mark.parametrize(
    ("wrapped", "told"), [(lambda name: f"module.{name}", True), (str, True), (lambda name: f"ema_{name}", False)]
)
def test_what_another_thread_wrote_is_told_by_names_and_sizes(
    tmp_path: Path, lives: bool, wrapped: Callable[[str], str], told: bool
) -> None:
    found: list[SaveRecord] = []
    watch = SaveWatch([str(tmp_path)], lambda: 5, lambda step: None, found.append)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 4))
    state, path, over = {wrapped(name): value * 2 for name, value in model.state_dict().items()}, tmp_path / "5.pkl", Event()
    begun = Event()

    def write() -> None:
        watch._hear("open", (path, "w", 0o1101))
        path.write_bytes(pickle.dumps({"model": state, "step": 5}))
        begun.set()
        over.wait(60)

    writer = Thread(target=write)
    writer.start()
    begun.wait(60)
    if not lives:
        over.set()
        writer.join()
    found.clear()
    looks = 0
    while watch._opened:
        watch.look(FoundState(model).is_held_in)
        looks += 1
    over.set()
    writer.join()
    assert looks == (2 if lives else 1)
    assert [(save.how, save.path, save.done, save.aside) for save in found] == [("file", "5.pkl", True, True)] * told


def test_a_save_of_another_thread_hides_none_of_this_one(tmp_path: Path) -> None:
    found: list[SaveRecord] = []
    watch = SaveWatch([str(tmp_path)], lambda: 5, lambda step: None, found.append)
    inside, over = Event(), Event()

    def write() -> None:
        inside.set()
        over.wait(60)

    writer = Thread(target=lambda: watch._write(tmp_path / "large.pt", "torch.save", {}, write))
    writer.start()
    inside.wait(60)
    watch._write(tmp_path / "small.pt", "torch.save", {}, lambda: watch._hear("open", (tmp_path / "small.pt", "w", 0o1101)))
    watch._hear("os.rename", (tmp_path / "a", tmp_path / "b", -1, -1))
    over.set()
    writer.join()
    told = [(save.path, save.how, save.done) for save in found]
    assert told[0] == ("large.pt", "torch.save", False) and told[-1] == ("large.pt", "torch.save", True)
    assert told[1:-1] == [("small.pt", "torch.save", False), ("small.pt", "torch.save", True), ("b", "rename", True)]


def test_it_is_not_looked_into_each_file_of_a_name_for_ever(tmp_path: Path) -> None:
    watch = SaveWatch([str(tmp_path)], lambda: 5, lambda step: None, lambda record: None)
    looked: list[Path] = []
    for number in range(2 * MOST_LOOKS):
        (tmp_path / f"log-{number}").write_bytes(b"nothing")
        watch._hear("open", (tmp_path / f"log-{number}", "w", 0o1101))
        watch.look(lambda path, aside: bool(looked.append(path)))
    assert len(looked) == MOST_LOOKS


@pytest.mark.parametrize("as_file", [True, False])
def test_an_open_file_is_known_by_its_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool) -> None:
    for module, name, _, _ in WRITERS:
        there = importlib.import_module(module)
        monkeypatch.setattr(there, name, getattr(there, name))  # put back after the test
    told: list[tuple[Any, str]] = []
    wrap_writers(lambda target, how, given, write: (told.append((target, how)), write()))
    path = tmp_path / "state.pt"
    with path.open("wb") as file:
        torch.save({}, file if as_file else path)
        pickle.dump({}, file)
        torch.save({}, held := io.BytesIO())
    path = str(path) if as_file else path
    assert told[0] == (path, "torch.save") and (held, "torch.save") in told and (str(path), "pickle") in told


@pytest.mark.parametrize(
    "value", [torch.tensor(3.0), torch.ones(4, 8, dtype=torch.bfloat16), torch.ones(4, 8).to(torch.float8_e5m2)]
)
def test_any_parameter_can_be_looked_for(tmp_path: Path, value: torch.Tensor) -> None:
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(value, requires_grad=False)
    in_a_buffer({"weight": value}, tmp_path / "state.pt")
    assert FoundState(model).is_held_in(tmp_path / "state.pt") == (value.ndim > 0)


def test_parameters_of_no_module_can_be_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.nn.Parameter(torch.randn(4, 8))
    monkeypatch.setattr(hooks, "optimizers", lambda: [torch.optim.SGD([weight], lr=0.1)])
    numpy.savez(tmp_path / "state.npz", step=1, w1=weight.detach().numpy())
    numpy.savez(tmp_path / "other.npz", step=1, w1=weight.detach().numpy() + 1)
    state = FoundState(None)
    assert [state.is_held_in(tmp_path / name) for name in ("state.npz", "other.npz")] == [True, False]
