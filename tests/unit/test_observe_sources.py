"""What a cached reference depends on of a script: itself and the imported files beside or below it, links followed."""

import hashlib
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from chaosrun.observe.sources import imported_files, record_sources
from chaosrun.records.inputs import read_inputs

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
    assert imported_files(script) == {
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
    assert set(imported_files(linked / "train.py")) == {str(path) for path in (script, model, text)}


def test_an_environment_beside_the_script_is_left_out(
    tmp_path: Path, imported: Imported, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = written(tmp_path / "train.py")
    imported("installed", written(tmp_path / ".venv" / "lib" / "installed.py"))
    assert str(tmp_path / ".venv" / "lib" / "installed.py") in imported_files(script)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    assert list(imported_files(script)) == [str(script)]


def test_every_version_that_ran_is_recorded_once(tmp_path: Path) -> None:
    script, inputs = written(tmp_path / "job" / "train.py"), tmp_path / "leg" / "inputs.json"
    digests = []
    for text in ("first", "first", "second", "first"):
        script.write_text(text)
        digests.append(hashlib.sha256(text.encode()).hexdigest())
        record_sources(inputs, script)
    assert read_inputs(inputs) == {str(script): " ".join(digests[1:])}
