"""What a script imports and is not there is told before anything starts, and nothing else is."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.errors import SpecError
from chaosrun.preflight.conduct import Request

MISSING = "import torch\nimport no_such_module.below\nfrom nor_this import that\nimport beside\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_ray: None) -> Path:
    monkeypatch.chdir(tmp_path)
    # Whichever environment is active: what another Python can import is not known.
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    Path("beside.py").write_text("import not_seen_from_outside\n")
    return tmp_path


def told(script: str, *more: str) -> list[str]:
    """Without their folders; empty for a job that may start."""
    Path("train.py").write_text(script)
    way = () if any(line.startswith(("module", "command")) for line in more) else ("script: train.py",)
    Path("job.yaml").write_text("\n".join(["name: x", "workers: 2", *way, *more, ""]))
    try:
        api.plan(Path("job.yaml"))
    except SpecError as error:
        return [line.rpartition("/")[2] for line in error.message.splitlines() if not line.startswith(" ")]
    return []


@pytest.mark.parametrize("way", ["script: train.py", "module: train", "command: [torchrun, --nproc-per-node, 2, train.py]"])
def test_each_missing_module_is_told_at_its_line(way: str) -> None:
    more = () if way.startswith("script") else (way,)
    assert told(MISSING, *more) == [
        "train.py:2:1: ModuleNotFoundError: No module named 'no_such_module'",
        "train.py:3:1: ModuleNotFoundError: No module named 'nor_this'",
    ]


@pytest.mark.parametrize(
    "script",
    [
        "try:\n    import no_such_module\nexcept ImportError:\n    pass\n",
        "if False:\n    import no_such_module\n",
        "def later():\n    import no_such_module\n",
        "import sys\nsys.path.insert(0, 'lib')\nimport no_such_module\n",
        "from __future__ import annotations\nimport os, json, torch.nn, beside\n",
        "import kept_elsewhere\n",
    ],
    ids=["try", "if", "function", "sys.path", "there", "PYTHONPATH"],
)
def test_what_may_be_there_is_not(script: str) -> None:
    Path("lib").mkdir()
    Path("lib/kept_elsewhere.py").write_text("")
    assert told(script, "env: {PYTHONPATH: lib}") == []


def test_nodes_of_another_ray_may_have_other_packages() -> None:
    assert told(MISSING)
    api.plan(Path("job.yaml"), address="auto")
    assert told(MISSING, "command: [/bin/sh, train.py]") == [], "nor is another program's Python this one"


@pytest.mark.parametrize(
    "begin", [api.sweep, lambda job: api.preflight(Request(job=job, skip=["cluster"]))], ids=["sweep", "preflight"]
)
def test_what_begins_with_many_drills_tells_it_before_the_first(begin: Callable[[Path], object]) -> None:
    told(MISSING)
    with pytest.raises(SpecError, match="No module named 'no_such_module'"):
        begin(Path("job.yaml"))
    assert list(Path(".chaosrun").rglob("*.json*")) == []


def test_preloads() -> None:
    expected = ["job.yaml:4:31: recovery.preload: no module no_such_module"]
    assert told("", "recovery: {preload: [os.path, no_such_module.below]}") == expected
    assert told("", "recovery: {preload: [kept_elsewhere]}")
    Path("lib").mkdir()
    Path("lib/kept_elsewhere.py").write_text("")
    assert told("", "recovery: {preload: [kept_elsewhere]}", "env: {PYTHONPATH: lib}") == []


def test_a_script_that_never_attaches() -> None:
    (line,) = told("import chaosrun\n")
    assert line == "job.yaml:3:1: train.py imports chaosrun, and nothing beside it calls chaosrun.attach"
    assert told("import chaosrun\n", "resume: {by: script}") == []
    assert told("import chaosrun\nrun = chaosrun.attach(accelerator)\n") == []
    Path("beside.py").write_text("from chaosrun import attach\n")
    assert told("import chaosrun, beside\n") == []
