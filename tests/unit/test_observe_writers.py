"""Who is told of files that native code writes."""

import importlib
import sys
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import safetensors.numpy
import torch
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file, save_model

from chaosrun.observe.writers import NATIVE_WRITERS, wrap_imported


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in NATIVE_WRITERS:
        monkeypatch.setattr(sys.modules[module], name, getattr(sys.modules[module], name))


class Observer:
    def __init__(self) -> None:
        self.told: list[str] = []

    def tell(self, path: str) -> None:
        self.told.append(str(path))


@pytest.mark.parametrize(
    "write",
    [
        lambda path: torch.save({"a": torch.ones(2)}, path),
        lambda path: torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), path),
        lambda path: save_file({"a": torch.ones(2)}, path),
        lambda path: save_model(torch.nn.Linear(1, 1), path),
        lambda path: save_arrays({"a": numpy.ones(2)}, path),
        lambda path: importlib.reload(safetensors.numpy).save_file({"a": numpy.ones(2)}, path),
    ],
    ids=["torch.save", "torch.jit.save", "save_file", "save_model", "save_file of numpy", "a module that is imported later"],
)
def test_every_observer_is_told_once_also_where_the_script_had_imported_the_function(
    write: Callable[[str], object], tmp_path: Path
) -> None:
    first, second = Observer(), Observer()
    for observer in (first, second, first):
        wrap_imported(NATIVE_WRITERS, observer.tell)
    write(str(tmp_path / "weights"))
    assert (tmp_path / "weights").exists()
    assert first.told == second.told == [str(tmp_path / "weights")]
