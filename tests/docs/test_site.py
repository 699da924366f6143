"""`make docs` builds the pages as a site, and a link or an anchor that leads nowhere fails it."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: pip install 'chaosrun[docs]'")
LINKS = {
    "[x](nowhere.md)": "nowhere.md",
    "[x](job.md#nothing)": "does not contain an anchor '#nothing'",
    "[x](../jobs/nothing/train.py)": "jobs/nothing/train.py",
    "[x](../README.md#nothing)": "does not contain an anchor '#nothing'",
}


def build(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder / "site")]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=False)


def test_the_site_is_built_and_a_link_that_leads_nowhere_is_noticed(tmp_path: Path) -> None:
    for name in ("docs", "jobs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("README.md", "LICENSE", "mkdocs.yml"):
        shutil.copy(ROOT / name, tmp_path / name)
    done = build(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "What a verdict proves" in (tmp_path / "site" / "index.html").read_text()
    assert (tmp_path / "site" / "jobs" / "probe" / "train.py").is_file()
    with open(tmp_path / "docs" / "verdict.md", "a") as page:
        page.write("\n" + " ".join(LINKS) + "\n")
    done = build(tmp_path)
    assert done.returncode == 1
    assert [link for link, said in LINKS.items() if said not in done.stderr] == []
