"""What a rank reads of files that another leg left: every way of reading is told, writing and what is no result of a training
is not."""

import json
import os
import pwd
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaosrun.cluster import joining
from chaosrun.observe import opened as module
from chaosrun.observe.opened import FileWatch, caches
from chaosrun.records.history import read_leg
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.opened import TrainingTime, earlier_legs, opened_files, training_time
from tests.records import read_lines
from tests.unit.forked import printed
from tests.unit.legs import edit_journal, edit_ranks, write_run

IMPORTS = """
import dbm.dumb, json, os, pathlib, pickle, shelve, sqlite3, sys, time
import numpy, torch, safetensors.torch
from types import SimpleNamespace
from chaosrun.observe.opened import FileWatch
from chaosrun.records.opened import TrainingTime

def watch(root, own, earlier, made="nowhere", began_s=0.0):
    attempt = SimpleNamespace(opened=lambda rank: root / "record")
    leg = SimpleNamespace(path=own, output=root / made, work=root / made, attempt=lambda number: attempt)
    return FileWatch(SimpleNamespace(attempt=2, rank=1, earlier=earlier, drill_began_s=began_s, reference_path=None), leg)
"""
LEAVE = """
os.chdir(root)
os.environ["HOME"] = str(root)
for folder in ("own", "elsewhere", ".cache/mine", ".cache/huggingface", "__pycache__", "made"):
    pathlib.Path(folder).mkdir(parents=True)
early = time.time()
while time.time() < early + 0.05: pass  # a file's time is that of the kernel's last tick
pathlib.Path("prepared").write_text("before the first batch")
while time.time() < early + 0.1: pass
since = time.time()
while time.time() < since + 0.05: pass
for name in ("text", "bytes", "copied", "moved", "added", "rights", "argument", "shell", "child", "library",
             "elsewhere/absolute", "elsewhere/chdir", ".cache/mine/stats", ".cache/huggingface/model", "__pycache__/m.pyc",
             "log", "rewritten", "listed", "replaced", "low", "memory", "removed", "own/state"):
    pathlib.Path(name).write_text("left")
numpy.save("array.npy", numpy.ones(3)); torch.save({"a": torch.ones(3)}, "state.pt")
safetensors.torch.save_file({"a": torch.ones(3)}, "state.safetensors")
pathlib.Path("state.pkl").write_bytes(pickle.dumps(1))
with shelve.open("shelf") as shelf: shelf["a"] = 1
with sqlite3.connect("base.db") as base: base.execute("create table t (a)")
os.symlink("text", "link")
os.symlink("../listed", "own/linked")
while time.time() < since + 0.15: pass
until = time.time()
while time.time() < until + 0.05: pass
earlier = TrainingTime(leg="reference leg", begun_s=early, since_s=since, until_s=until)
watching = watch(root, root / "own", [earlier])
watching.begin()
"""
READS = {
    "open('prepared').read()": "prepared",
    "open('own/linked').read()": "listed",
    "open('text').read()": "text",
    "pathlib.Path('bytes').read_bytes()": "bytes",
    "__import__('shutil').copy('copied', 'copy'); open('copy').read()": "copied",
    "os.rename('moved', 'here'); open('here').read()": "here",
    "open('added', 'a').write('more'); open('added').read()": "added",
    "os.chmod('rights', 0o600); open('rights').read()": "rights",
    "__import__('subprocess').check_output(['cat', 'argument'])": "argument",
    "os.system('cat < shell > /dev/null')": "shell",
    "__import__('multiprocessing').get_context('fork').Process(target=lambda: open('child').read()).start()": "child",
    "os.chdir('elsewhere'); open('chdir').read(); os.chdir('..')": "elsewhere/chdir",
    "open(root / 'elsewhere' / 'absolute').read()": "elsewhere/absolute",
    "os.close(os.open('low', os.O_RDONLY))": "low",
    "open('memory', 'r+').read()": "memory",
    "open('.cache/mine/stats').read()": ".cache/mine/stats",
    "numpy.load('array.npy')": "array.npy",
    "torch.load('state.pt')": "state.pt",
    "safetensors.torch.load_file('state.safetensors')": "state.safetensors",
    "pickle.load(open('state.pkl', 'rb'))": "state.pkl",
    "shelve.open('shelf')['a']": "shelf",
    "sqlite3.connect('file:base.db?mode=ro', uri=True)": "base.db",
}
OTHERS = (
    "open('log', 'a').write('more')",
    "open('rewritten', 'w').write('new'); open('rewritten').read()",
    "os.listdir('.'); os.path.exists('listed')",
    "open('new', 'w').write('1'); os.replace('new', 'replaced'); open('replaced').read()",
    "os.remove('removed'); os.system('rm -f listed')",
    "open('made/own', 'w').write('1'); open('made/own').read()",
    "open('own/state').read()",
    "open('.cache/huggingface/model').read()",
    "open('__pycache__/m.pyc').read()",
    "open('/proc/self/stat').read()",
)


NATIVE = (
    "import ctypes; libc = ctypes.CDLL(None); fd = libc.open(b'library', 0)\n"
    "held = torch.UntypedStorage.from_file('memory', False, 4)\nwatching.look_at_mappings()\n"
)
WAIT = "for child in __import__('multiprocessing').active_children(): child.join()"
PROGRAMS = {
    "reads": "\n".join([*READS, "open('text').read()", WAIT]),
    "others": "\n".join(OTHERS),
    "native": NATIVE,
    "again": (
        "watching = watch(root, root, [], 'elsewhere', early)\n"
        "watching.begin()\n"
        "for path in ('elsewhere/absolute', 'text'): open(path, 'r+').read()\n"
        "open('elsewhere/new', 'w').write('1'); open('elsewhere/new').read(); open('elsewhere/chdir', 'w').write('2')\n"
    ),
    "tracker": "exec(compile('open(\"text\").read()', 'x', 'exec'), {'__name__': 'mlflow.store'})",
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """By program, the records of what it opened, with paths below its folder."""
    roots = {name: tmp_path_factory.mktemp(name) for name in PROGRAMS}
    before = {name: f"root = pathlib.Path({str(root)!r})\n{LEAVE}" for name, root in roots.items()}
    printed(IMPORTS, [before[name] + code for name, code in PROGRAMS.items()])
    return {
        name: [{**record, "path": os.path.relpath(record["path"], root)} for record in read_lines(root / "record")]
        if (root / "record").exists()
        else []
        for name, root in roots.items()
    }


def test_every_way_of_reading_is_told_once(told: dict[str, list[dict[str, Any]]]) -> None:
    found = told["reads"]
    paths = [record["path"] for record in found]
    names = {name.partition(".")[0] if name.startswith("shelf") else name for name in paths}
    assert names >= set(READS.values()), set(READS.values()) - names
    assert [record["path"] for record in found if record.get("before_training")] == ["prepared"]
    assert len(paths) == len(set(paths))
    assert {(r["left_by"], r["attempt"], r["rank"]) for r in found} == {("reference leg", 2, 1)}


def test_writing_looking_and_caches_of_libraries_are_not_told(told: dict[str, list[dict[str, Any]]]) -> None:
    assert told["others"] == []


def test_what_an_earlier_attempt_wrote_is_told_as_this_legs_own(told: dict[str, list[dict[str, Any]]]) -> None:
    """In its folder of outputs alone, and neither what this attempt writes nor what it writes anew."""
    own = [record["path"] for record in told["again"] if not record["left_by"]]
    assert own == ["elsewhere/absolute"]


def test_what_stays_mapped_is_told_whoever_opened_it(told: dict[str, list[dict[str, Any]]]) -> None:
    assert {record["path"] for record in told["native"]} == {"library", "memory"}


def test_the_books_of_a_tracker_are_its_own(told: dict[str, list[dict[str, Any]]]) -> None:
    assert told["tracker"] == []


def test_a_leg_trains_from_its_first_batch_to_its_end(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    time_ = training_time(run.reference, "reference leg")
    assert time_ is not None
    starts = [next(read_lines(path))["time_s"] for path in run.reference.attempt(1).path.glob("*.trace")]
    last = json.loads(run.reference.journal.read_text().splitlines()[-1])["time_s"]
    assert (time_.since_s, time_.until_s) == (min(starts), max(last, *starts)) and time_.begun_s <= time_.since_s
    assert training_time(run.leg("confirm"), "confirm leg") is None


def test_legs_of_other_scripts_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    script = None
    for name in ("a", "b"):
        made = write_run(tmp_path / name)
        made.path.rename(tmp_path / "runs" / name)
        script = json.loads((tmp_path / "runs" / name / "run.json").read_text())["script"]
    own = tmp_path / "runs" / "b"
    assert script is not None
    found = {time.leg for time in earlier_legs(tmp_path, own, script, own / "chaos")}
    assert found == {"reference leg", "reference leg of run a", "chaos leg of run a"}
    assert {time.leg for time in earlier_legs(tmp_path, own, "/another.py", own / "chaos")} == {"reference leg"}
    # What runs left that were over when this one's reference was made, the reference found as well.
    layout = RunLayout(own)
    edit_journal(layout, "reference", later)
    edit_ranks(layout, "reference", 1, later)
    assert {time.leg for time in earlier_legs(tmp_path, own, script, own / "chaos")} == {"reference leg"}
    assert earlier_legs(tmp_path, own, script, own / "reference")[0].leg == "chaos leg"


def later(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "time_s": line["time_s"] + 10_000} if "time_s" in line else line


def test_installed_packages_are_nobodys_output() -> None:
    skipped = tuple(caches())
    of_python = [os.path.realpath(sys.executable), *(file for file in module.mapped_files() if ".so" in file)]
    for file in (pytest.__file__, os.__file__, "/usr/lib/x86_64-linux-gnu/libm.so.6", *of_python):
        assert file.startswith(skipped), file
    assert not "/library/data".startswith(skipped) and not __file__.startswith(skipped)


def test_a_user_without_a_name_and_a_home_has_caches_and_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that is given any user id."""

    def unknown(uid: int) -> Any:
        raise KeyError(uid)

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)
    assert caches()
    assert joining._kept_token() is None


def test_records_are_read_again_and_damage_is_a_problem(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    problems: list[str] = []
    assert opened_files(run.leg("chaos"), problems) == ()
    path = run.leg("chaos").attempt(2).opened(0)
    path.write_text('{"path": "/a", "left_by": "reference leg", "changed_s": 1.0, "attempt": 2, "rank": 0}\n{"path": 3}\n')
    assert [found.path for found in opened_files(run.leg("chaos"), problems)] == ["/a"]
    assert len(problems) == 1 and "path" in problems[0]
    path.write_text('{"path": "/a", "left_by": "", "changed_s": 1.0, "attempt": 2, "rank": 0}\n')
    assert opened_files(run.leg("chaos"), problems) == ()
    assert [found.path for found in read_leg(run.leg("chaos")).read_again] == ["/a"]


@pytest.mark.parametrize("path", ["/nowhere", 3, b"\0", None, "/tmp"])
def test_what_cannot_be_looked_at_is_left_to_whoever_opens_it(path: object) -> None:
    earlier = [TrainingTime(leg="x", begun_s=0, since_s=0, until_s=time.time())]
    order: Any = SimpleNamespace(earlier=earlier, attempt=1, rank=0, drill_began_s=0.0, reference_path=None)
    watching = FileWatch(order, LegLayout(Path("/nowhere")))
    watching._open(path, "r", 0)
    watching._keep(path)
    watching._start(path)
    assert list(module.open_files())
