"""What a script does outside its process: what counts, and what does not; and that it outlives the process."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from chaosrun.observe.effects import Effects
from chaosrun.observe.opened import caches, open_files
from chaosrun.records.layout import LegLayout

WRITE, READ = os.O_WRONLY | os.O_CREAT, os.O_RDONLY


@pytest.fixture
def leg(tmp_path: Path) -> LegLayout:
    leg = LegLayout(tmp_path / "chaos")
    for attempt in (1, 2):
        leg.attempt(attempt).path.mkdir(parents=True)
    return leg


@pytest.fixture
def effects(leg: LegLayout, tmp_path: Path) -> Effects:
    return Effects(leg, str(tmp_path / "storage"), attempt=2, rank=0)


def told(leg: LegLayout) -> str:
    path = leg.attempt(2).effects(0)
    return path.read_text() if path.exists() else ""


@pytest.mark.parametrize(
    ("event", "arguments", "words"),
    [
        ("open", ("/tmp/of-the-script", None, WRITE), "it wrote /tmp/of-the-script"),
        ("open", (b"/tmp/of-the-script", None, os.O_RDWR), "it wrote /tmp/of-the-script"),
        ("open", ("{leg}/output/state.txt", None, WRITE), "it wrote {leg}/output/state.txt"),
        ("open", ("/tmp/of-the-script", None, READ), ""),
        ("open", (5, None, WRITE), ""),  # which was heard of when it was opened
        ("open", ("{leg}/attempts/002/rank-0.log", None, WRITE), ""),
        ("open", ("{storage}/step-3/model", None, WRITE), ""),
        ("open", ("/dev/shm/torch_1", None, WRITE), ""),
        ("open", ("/dev/shm/of-the-script", None, WRITE), "it wrote /dev/shm/of-the-script"),
        ("open", ("/srv/__pycache__/train.pyc", None, WRITE), ""),
        ("open", ("{cache}kernel", None, WRITE), ""),
        ("os.rename", ("/tmp/a", "/tmp/b", -1, -1), "it changed /tmp/a (os.rename)"),
        ("os.remove", ("{leg}/staging/x", -1), ""),
        ("os.mkdir", ("/srv/of-the-script", 511, -1), "it changed /srv/of-the-script (os.mkdir)"),
        ("os.mkdir", ("/srv", 511, -1), ""),  # as `makedirs` tries it, with `exist_ok`
        ("os.mkdir", (".", 511, 5), "it changed . (os.mkdir)"),  # below another folder
        ("sqlite3.connect", ("/tmp/a.db",), "it changed /tmp/a.db (sqlite3.connect)"),
        ("sqlite3.connect", (7,), ""),
        ("subprocess.Popen", ("true", ["true"], None, None), "it talked to another process (subprocess.Popen)"),
        ("os.system", (b"true",), "it talked to another process (os.system)"),
        ("socket.connect", (None, ("localhost", 1)), ""),  # before the first batch: as it finds its peers
        ("os.listdir", ("/tmp",), ""),
    ],
)
def test_what_counts(
    leg: LegLayout, effects: Effects, tmp_path: Path, event: str, arguments: tuple[Any, ...], words: str
) -> None:
    def filled(value: Any) -> Any:
        return value.format(leg=leg.path, storage=tmp_path / "storage", cache=caches()[0]) if isinstance(value, str) else value

    effects._hear(event, tuple(map(filled, arguments)))
    assert told(leg) == filled(words)
    assert [seen for seen in effects.seen() if "it holds" not in seen] == ([filled(words)] if words else [])


def test_whom_it_talks_to_counts_once_it_trains(leg: LegLayout, effects: Effects) -> None:
    effects.has_begun = True
    effects._hear("socket.connect", (None, ("localhost", 1)))
    assert told(leg) == "it talked to another process (socket.connect)"


def test_the_first_of_each_attempt_is_told(leg: LegLayout, effects: Effects) -> None:
    Effects(leg, None, attempt=1, rank=0)._hear("os.system", (b"true",))
    Effects(leg, None, attempt=1, rank=1)._hear("os.remove", ("/tmp/of-another-rank", -1))
    effects._hear("os.remove", ("/tmp/first", -1))
    effects._hear("os.remove", ("/tmp/second", -1))
    seen = list(effects.seen())
    assert seen[:2] == ["it talked to another process (os.system)", "it changed /tmp/first (os.remove)"]


def test_a_writer_that_is_not_pythons_is_heard(
    leg: LegLayout, effects: Effects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    native: Any = ModuleType("native")
    native.write = lambda data, path: len(data)
    monkeypatch.setitem(sys.modules, "native", native)
    writers = [("native", "write"), ("native", "no"), ("not_imported", "write")]
    monkeypatch.setattr("chaosrun.observe.effects.NATIVE_WRITERS", writers)
    monkeypatch.setattr("chaosrun.observe.effects.listen", lambda events, listener: None)
    effects.begin()
    write = native.write
    assert write(b"abc", str(leg.path / "staging" / "x")) == 3 and told(leg) == ""
    assert write(b"abc", path=tmp_path / "own") == 3
    assert told(leg) == f"it wrote {tmp_path / 'own'}"


def test_open_files_and_where_they_are_read(effects: Effects, tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(b"0123456789")
    with path.open("rb", buffering=0) as file:
        assert (str(path), False, 0) in open_files()
        file.read(4)
        assert (str(path), False, 4) in open_files()
        assert not any(str(path) in seen for seen in effects.seen())
    with path.open("ab"):
        assert (str(path), True) in {found[:2] for found in open_files()}
        assert f"it holds {path} open for writing" in effects.seen()
    assert str(path) not in {found[0] for found in open_files()}


def test_what_a_forked_process_does_is_heard(leg: LegLayout, tmp_path: Path) -> None:
    program = f"""
import os, tempfile
from pathlib import Path
from types import ModuleType
from chaosrun.observe.effects import Effects
from chaosrun.records.layout import LegLayout
effects = Effects(LegLayout(Path({str(leg.path)!r})), None, attempt=2, rank=0)
effects.begin()
tempfile.tempdir = None
tempfile.gettempdir()  # Python tries whether it can write there
Path(effects._leg.path / "ours").write_text("x")
if (child := os.fork()) == 0:
    Path({str(tmp_path / "own")!r}).write_text("x")
    os._exit(0)
os.waitpid(child, 0)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert told(leg) == f"it wrote {tmp_path / 'own'}"
