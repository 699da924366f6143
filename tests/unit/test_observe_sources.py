"""What a cached reference depends on of a script: itself and the imported files beside or below it, links followed."""

import hashlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun.observe import own
from chaosrun.observe.held import held, known_as
from chaosrun.observe.script_state import of_the_job
from chaosrun.observe.sources import imported_files, record_sources
from chaosrun.records.inputs import read_inputs

NOTHING_PREPARED: Any = types.SimpleNamespace(_models=(), _optimizers=(), _schedulers=(), _dataloaders=())
Imported = Callable[[str, Path], None]


@pytest.fixture
def imported(monkeypatch: pytest.MonkeyPatch) -> Imported:
    """Has a module of that name come from that file."""

    def come(name: str, path: Path) -> None:
        module = types.ModuleType(name)
        module.__file__ = str(path)
        monkeypatch.setitem(sys.modules, name, module)

    return come


def written(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {path.name}\n")
    return path


def test_what_lies_beside_or_below_counts_by_its_contents(tmp_path: Path, imported: Imported) -> None:
    script, beside, below = (written(tmp_path / "job" / name) for name in ("train.py", "model.py", "data/text.py"))
    elsewhere, nearly = written(tmp_path / "other" / "model.py"), written(tmp_path / "jobs" / "model.py")
    for number, path in enumerate(
        (beside, below, elsewhere, nearly, tmp_path / "job" / "gone.py", tmp_path / "job" / "native.so")
    ):
        imported(f"imported_{number}", path)
    written(tmp_path / "job" / "native.so")
    assert imported_files(script, tmp_path / "leg") == {
        str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in (below, beside, script)
    }


def test_links_are_followed_of_files_and_of_folders(tmp_path: Path, imported: Imported) -> None:
    script, model, text = (written(tmp_path / "job" / name) for name in ("train.py", "model.py", "data/text.py"))
    outside = written(tmp_path / "other" / "outside.py")
    links = tmp_path / "links"
    links.mkdir()
    (links / "file.py").symlink_to(model)
    (links / "folder").symlink_to(text.parent)
    (tmp_path / "job" / "out.py").symlink_to(outside)
    imported("a_file", links / "file.py")
    imported("a_folder", links / "folder" / "text.py")
    imported("a_way_out", tmp_path / "job" / "out.py")
    linked = tmp_path / "linked"
    linked.symlink_to(script.parent)
    assert set(imported_files(linked / "train.py", tmp_path / "leg")) == {str(path) for path in (script, model, text)}


def test_an_environment_beside_the_script_is_left_out(
    tmp_path: Path, imported: Imported, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path / "train.py")
    imported("installed", written(tmp_path / ".venv" / "lib" / "installed.py"))
    assert str(tmp_path / ".venv" / "lib" / "installed.py") in imported_files(script, tmp_path / "leg")
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert list(imported_files(script, tmp_path / "leg")) == [str(script)]


def test_what_the_leg_has_written_and_packages_below_the_script_are_left_out(tmp_path: Path, imported: Imported) -> None:
    """Each leg writes its own; packages in a home folder may have thousands of files."""
    script = written(tmp_path / "train.py")
    imported("made", written(tmp_path / "runs" / "1" / "chaos" / "folders" / "above" / "work" / "made.py"))
    imported("a_library", written(tmp_path / ".local" / "lib" / "python3" / "site-packages" / "a_library.py"))
    inputs = tmp_path / "runs" / "1" / "chaos" / "inputs.json"
    record_sources(inputs, script)
    assert (read_inputs(inputs) or {}).keys() == {str(script)}


def test_a_module_that_is_loaded_only_once_it_is_used_stays_unloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`importlib.util.LazyLoader` imports it when it is asked for any attribute: an error of its own would reach the script."""
    script, late = written(tmp_path / "train.py"), tmp_path / "late.py"
    late.write_text("raise ImportError('only on the cluster')")
    loader = importlib.util.LazyLoader(importlib.machinery.SourceFileLoader("late", str(late)))
    spec = importlib.util.spec_from_file_location("late", late, loader=loader)
    assert spec is not None
    monkeypatch.setitem(sys.modules, "late", module := importlib.util.module_from_spec(spec))
    loader.exec_module(module)
    monkeypatch.chdir(tmp_path)
    assert imported_files(script, tmp_path / "leg").keys() == {str(script)}
    assert of_the_job(["late"]) == held(module) == []
    look = own._Look({})
    look.at("late", module)
    assert look.unseen == []
    assert known_as(module) == "importlib.util._LazyModule late"
    assert not any(name.startswith("late:") for name, _ in own._roots(NOTHING_PREPARED))
    with pytest.raises(ImportError, match="only on the cluster"):
        print(module.value)


def test_every_version_that_ran_is_recorded_once(tmp_path: Path) -> None:
    script, inputs = written(tmp_path / "job" / "train.py"), tmp_path / "leg" / "inputs.json"
    digests = []
    for text in ("first", "first", "second", "first"):
        script.write_text(text)
        digests.append(hashlib.sha256(text.encode()).hexdigest())
        record_sources(inputs, script)
    assert read_inputs(inputs) == {str(script): " ".join(digests[1:])}
