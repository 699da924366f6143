"""A script's renames are told with both names."""

from pathlib import Path

import pytest

from chaosrun.observe.saves import SaveWatch
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
