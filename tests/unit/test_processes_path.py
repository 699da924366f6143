"""Which release a process imports: the one that the job's PYTHONPATH puts first, also where chaosrun lies in site-packages."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaosrun import processes


@pytest.mark.parametrize("own", [True, False])
def test_a_jobs_own_release_hides_the_installed_one(own: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("installed", "beside"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "library.py").write_text(f"print({folder!r})")
    monkeypatch.setattr(processes, "PACKAGE_ROOT", tmp_path / "installed")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "beside") if own else ""}
    told = subprocess.run(
        [sys.executable, "-c", "import library"], env=processes.with_package(environment), capture_output=True, text=True
    )
    assert told.stdout.strip() == ("beside" if own else "installed")
