"""What an attempt left in shared memory goes with it; what was there before, or is in use, stays. In a directory of the test's
own: on this machine other tests clean up after themselves at the same time."""

from pathlib import Path

import pytest

from chaosrun import processes


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    return tmp_path


def test_what_was_there_before_stays(folder: Path) -> None:
    (folder / "psm_before").touch()
    before = processes.shared_memory_entries()
    (folder / "psm_left").touch()
    (folder / "torch_left").touch()
    (folder / "somebody_elses").touch()
    assert processes.remove_shared_memory_leftovers(before) == ["psm_left", "torch_left"]
    assert sorted(path.name for path in folder.iterdir()) == ["psm_before", "somebody_elses"]


def test_what_is_in_use_stays(folder: Path) -> None:
    with (folder / "psm_in_use").open("w"):
        assert processes.remove_shared_memory_leftovers(frozenset()) == []
    assert processes.remove_shared_memory_leftovers(frozenset()) == ["psm_in_use"]
