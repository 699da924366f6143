"""What was there before a drill is not changed by it, and what a leg's script makes lands in the leg."""

import multiprocessing
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from chaosrun.errors import MisuseError, UsageError
from chaosrun.observe.file_guard import FileGuard
from chaosrun.records.codec import encode
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import WorkerEnd
from chaosrun.records.order import WorkerOrder
from chaosrun.supervise.reference import expect_resumable
from chaosrun.supervise.working_folder import check_paths_above, lay_out
from tests.records import write_lines

STEP = "p = torch.nn.Parameter(torch.ones(1)); o = torch.optim.SGD([p], lr=1.0); p.sum().backward(); o.step()"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """A folder of a team that has trained here before."""
    folder = tmp_path / "job"
    for name in ("data/shard.bin", "out/last.pt", "out/old/model.pt", "train.log", "train.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"the team's {name}")
    (folder / "empty").mkdir()
    return folder


def leg_of(job: Path, *outputs: str) -> LegLayout:
    leg = LegLayout(job / ".chaosrun" / "runs" / "probe-1" / "chaos")
    leg.path.mkdir(parents=True)
    lay_out(leg, job, outputs)
    return leg


def tried(job: Path, leg: LegLayout, args: tuple[str, ...], *tries: tuple[str, str], script: str = "") -> dict[str, Any]:
    """What became of each try, in a process of its own: what listens there cannot be taken off again."""
    order = WorkerOrder(
        **{"leg": "chaos", "leg_path": str(leg.path), "storage_path": None, "attempt": 1, "rank": 0, "world_size": 1},
        **{"local_rank": 0, "local_world_size": 1, "node_rank": 0, "master_addr": "", "master_port": 0},
        **{"seed": 0, "deterministic": "off", "threads": 1, "every_steps": 1, "keep": 2, "by": "script", "args": args},
        **{"script": str(job / script)},
        **{"cwd": str(leg.work), "directory": str(job), "drill_began_s": time.time()},
    )
    # Times of the file system are coarser than the clock's.
    time.sleep(0.05)
    context = multiprocessing.get_context("fork")
    answer, say = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(order, tries, say))
    process.start()
    process.join(60)
    assert process.exitcode == 0
    return answer.recv()


def _try(order: WorkerOrder, tries: Sequence[tuple[str, str]], say: Any) -> None:
    os.chdir(order.cwd)
    watch = FileGuard(order)
    watch.install()
    found: dict[str, Any] = {}
    for name, code in tries:
        try:
            exec(code, {"os": os, "shutil": shutil, "torch": torch, "Path": Path, "watch": watch})
            found[name] = "done"
        except MisuseError as error:
            found[name] = f"{error.message} | {error.hint}"
    found["kept"] = watch.refused.message if watch.refused else None
    say.send(found)


def tree(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and ".chaosrun" not in path.parts
    }


def test_an_output_that_is_an_empty_folder_is_there_for_a_script_that_makes_none(job: Path) -> None:
    (job / "kept").mkdir()
    (job / "kept" / ".gitkeep").touch()
    leg = leg_of(job, "empty", "kept", "out")
    for name in ("empty", "kept"):
        assert (leg.work / name).is_dir() and not (leg.work / name).is_symlink() and not os.listdir(leg.work / name)
    assert not (leg.work / "out").exists(), "it might be taken for one that holds a checkpoint"


def test_what_the_team_has_is_never_changed(job: Path) -> None:
    before = tree(job)
    leg = leg_of(job)
    found = tried(
        job,
        leg,
        (),
        ("overwrite", "open('out/last.pt', 'wb')"),
        ("natively", "torch.save({}, 'out/last.pt')"),
        ("append", "open('train.log', 'a')"),
        ("remove", "os.remove('out/last.pt')"),
        ("rename over", "open('new', 'w').close(); os.replace('new', 'out/last.pt')"),
        ("rename away", "os.rename('out/old', 'out/older')"),
        ("all of it", "shutil.rmtree(os.path.realpath('out'))"),
        ("absolute", f"open({str(job / 'train.log')!r}, 'r+')"),
    )
    kept = found.pop("kept")
    assert kept.endswith("a drill never overwrites what another run left")
    assert all("which was there before" in said for said in found.values()), found
    assert "outputs=[out] gives each leg its own" in found["natively"] and "outputs=[train.log]" in found["append"]
    assert "outputs=" not in found["absolute"] and "made from __file__" in found["absolute"], "it leads past the leg's folder"
    assert tree(job) == before


def test_what_is_new_is_the_legs_own(job: Path) -> None:
    before = tree(job)
    leg = leg_of(job)
    found = tried(
        job,
        leg,
        (),
        ("step", STEP),
        ("beside", "open('new.txt', 'w').write('mine')"),
        ("in a folder", "os.makedirs('out/run-2', exist_ok=True); torch.save({}, 'out/run-2/model.pt')"),
        ("in an empty one", "Path('empty/x').write_text('mine')"),
        ("a name in the place of another", "Path('t').write_text('mine'); os.replace('t', 'train.log')"),
        ("inputs", "assert Path('data/shard.bin').read_text() and Path('out/last.pt').read_text()"),
    )
    assert found.pop("kept") is None
    assert set(found.values()) == {"done"}, found
    assert tree(job) == before and os.listdir(job / "empty") == []
    own = ["empty/x", "new.txt", "out/run-2/model.pt", "train.log"]
    assert (
        sorted(
            str(path.relative_to(leg.work))
            for path in leg.work.rglob("*")
            if path.is_file() and not path.is_symlink() and (path.resolve().is_relative_to(leg.work.resolve()))
        )
        == own
    )


READ = "open({!r}, 'rb').read()"
SAVED = "torch.save({{}}, 'next.pt'); Path({0!r}).parent.mkdir(exist_ok=True); os.replace('next.pt', {0!r})"


@pytest.mark.parametrize(
    ("read", "saved", "outputs"),
    [
        ("out/last.pt", "out/last.pt", "out"),
        ("out/step-10.pt", "out/step-15.pt", "out"),
        ("out/checkpoint-10/optimizer.pt", "out/checkpoint-15/optimizer.pt", "out"),
        ("step-10.pt", "step-15.pt", "step-10.pt"),
        ("code/last.pt", "code/last.pt", "code/last.pt"),
        ("data/base.pt", "data/tuned.pt", None),
        ("data/base-10.pt", "out/base-15.pt", None),
    ],
)
def test_a_script_that_begins_with_the_teams_checkpoint_is_told(job: Path, read: str, saved: str, outputs: str | None) -> None:
    """Weights that it begins with, and does not save to, are an input."""
    (job / read).parent.mkdir(parents=True, exist_ok=True)
    (job / read).write_text("the team's")
    before = tree(job)
    tries = [("read", READ.format(read)), ("step", STEP), ("save", SAVED.format(saved))]
    found = tried(job, leg_of(job), (), *tries, script="code/train.py")
    assert tree(job) == before
    if outputs is None:
        assert set(found.values()) == {"done", None}
    else:
        assert found["save"].startswith(f"the script began with {read}, which another run left, and saves ")
        assert f"outputs=[{outputs}] gives each leg its own" in found["save"]


def test_a_folder_that_is_renamed_and_items_of_a_data_set(job: Path) -> None:
    for name in ("out/checkpoint-10/model.bin", "data/item-1.pt", "data/item-2.pt"):
        (job / name).parent.mkdir(exist_ok=True)
        (job / name).write_text("the team's")
    tries = [
        (
            "items",
            f"{READ.format('data/item-1.pt')}; {READ.format('data/item-2.pt')}; {READ.format('out/checkpoint-10/model.bin')}",
        ),
        ("step", STEP),
        ("more items", "torch.save({}, 'data/item-3.pt')"),
        ("renamed", "os.mkdir('out/tmp'); os.rename('out/tmp', 'out/checkpoint-15')"),
    ]
    found = tried(job, leg_of(job), (), *tries)
    assert (found["items"], found["more items"]) == ("done", "done")
    assert found["renamed"].startswith("the script began with out/checkpoint-10/model.bin")


def test_a_checkpoint_of_accelerate_is_known_by_its_optimizer(job: Path) -> None:
    """Its weights, in model.safetensors, are not opened by Python."""
    for name in ("train.bin", "ckpt/epoch_2/optimizer.bin"):
        (job / name).parent.mkdir(parents=True, exist_ok=True)
        (job / name).write_text("the team's")
    reads = f"{READ.format('train.bin')}; {READ.format('ckpt/epoch_2/optimizer.bin')}"
    found = tried(job, leg_of(job), (), ("read", f"{reads}; assert watch.began_with == 'ckpt/epoch_2/optimizer.bin'"))
    assert found["read"] == "done"


def test_a_leg_that_trained_next_to_nothing_is_told_what_it_read(job: Path) -> None:
    leg = leg_of(job)
    for began_with, told in ((None, "outputs=[FOLDER]"), ("out/last.pt", "it read out/last.pt: if an earlier run left that")):
        end = WorkerEnd(status="returned", exit_code=0, began_with=began_with)
        leg.attempt(1).path.mkdir(parents=True, exist_ok=True)
        leg.attempt(1).end(0).write_bytes(encode(end))
        with pytest.raises(UsageError, match="saved nothing") as caught:
            expect_resumable(leg, 1, 1)
        assert told in (caught.value.hint or "")


def test_a_script_that_clears_its_saves_away_at_its_end_has_saved(job: Path) -> None:
    leg = leg_of(job)
    leg.attempt(1).path.mkdir(parents=True)
    start = {"kind": "start", "v": 3, "attempt": 1, "rank": 0, "world_size": 1, "pid": 1, "entered_s": 0.0, "time_s": 0.0}
    start |= {"position": {"epoch": 0, "batches": 0, "step": 0}, "restored": None, "rng": "r", "param": "p"}
    start |= {"params": "AAAAAA==", "tensors": ["w"], "digests": None}
    saved = {"kind": "save", "step": 1, "time_s": 1.0, "done": True}
    for how, path in (("open", "ckpt/log"), ("torch.save", "/elsewhere/1.pt"), ("remove", "ckpt/1.pt")):
        write_lines(leg.attempt(1).trace(0), [start, {**saved, "how": how, "path": path}])
        with pytest.raises(UsageError, match="saved nothing"):
            expect_resumable(leg, 1, 1)
    write_lines(leg.attempt(1).trace(0), [start, {**saved, "how": "torch.save", "path": "ckpt/1.pt"}])
    expect_resumable(leg, 1, 1)


def test_outputs_begin_empty(job: Path) -> None:
    before = tree(job)
    leg = leg_of(job, "out/old", "train.log", "not/there")
    found = tried(
        job,
        leg,
        (),
        ("not there", "assert not os.path.exists('out/old') and not os.path.exists('train.log')"),
        ("beside it is", "assert os.path.exists('out/last.pt')"),
        ("written", "os.makedirs('out/old'); Path('out/old/model.pt').write_text('x'); Path('train.log').write_text('x')"),
    )
    assert set(found.values()) == {"done", None}, found
    assert tree(job) == before


def test_what_lies_above_is_read_and_never_written(job: Path) -> None:
    for name in ("beside/x", "other.txt"):
        (job.parent / name).parent.mkdir(exist_ok=True)
        (job.parent / name).write_text("the team's")
    leg = leg_of(job)
    found = tried(
        job,
        leg,
        (),
        ("read", f"assert Path('../beside/x').read_text() == Path('../../' + {job.parent.name!r} + '/other.txt').read_text()"),
        ("itself", "assert Path('../job/train.py').read_text() and os.path.samefile('../job', '.')"),
        ("there", "os.makedirs('../beside', exist_ok=True)"),
        ("new", "open('../beside/new', 'w')"),
        ("over", "torch.save({}, '../other.txt')"),
        ("a folder", "os.mkdir('../out')"),
    )
    assert [found.pop(name) for name in ("read", "itself", "there")] == ["done"] * 3
    assert found.pop("kept").startswith("the script would write ../beside/new, outside of what is this leg's own")
    assert all("{output}" in said and "outputs=" not in said for said in found.values()), found
    assert os.listdir(job.parent / "beside") == ["x"] and not (job.parent / "out").exists()
    check_paths_above(["--data=../beside/x", "../job/train.py", "../none"], job, leg.work)
    deep = os.path.relpath("/etc/hosts", job)
    with pytest.raises(UsageError, match="folders above") as refused:
        check_paths_above([f"--data={deep}"], job, leg.work)
    assert refused.value.hint and refused.value.hint.endswith("write /etc/hosts")


def test_checkpoints_are_kept_wherever_they_lie(job: Path, tmp_path: Path) -> None:
    """Also where no argument names them."""
    old, ids = tmp_path / "elsewhere" / "last.pt", tmp_path / "elsewhere" / "ids.txt"
    old.parent.mkdir()
    for path in (old, ids):
        path.write_text("the team's")
    leg = leg_of(job)
    saves = [("over", f"torch.save({{}}, {str(old)!r})"), ("in place of", f"Path('t').touch(); os.replace('t', {str(old)!r})")]
    home = Path.home() / f"chaosrun-none-{os.getpid()}" / "new.pt"  # a folder left by a run that failed is another's
    new = f"os.makedirs({str(home.parent / 'deep')!r}); open({str(home.parent / 'deep' / home.name)!r}, 'wb')"
    found = tried(job, leg, (), *saves, ("other files", f"open({str(ids)!r}, 'a')"), ("step", STEP), ("new", new))
    assert not home.parent.exists(), "nothing is left of what was refused"
    assert all(
        "which was there before" in found[name] and "to lie in its working folder" in found[name] for name, _ in saves
    ), found
    assert found["other files"] == "done" and "both legs would share it" in found["new"]
    assert old.read_text() == "the team's"


def test_paths_in_arguments(job: Path, tmp_path: Path) -> None:
    """Absolute ones lead out of the leg: what would be written there, both legs would share."""
    new, cache = tmp_path / "new", tmp_path / "cache"
    cache.mkdir()
    (cache / "held").write_text("x")
    found = tried(
        job,
        leg_of(job),
        (f"--out={new}", "--cache", str(cache)),
        ("an output", f"os.makedirs({str(new)!r})"),
        ("a cache", f"open({str(cache / 'more')!r}, 'w').close()"),
        ("held", f"open({str(cache / 'held')!r}, 'w')"),
        ("step", STEP),
        ("a save", f"torch.save({{}}, {str(cache / 'model.pt')!r})"),
        ("elsewhere", f"open({str(tmp_path / 'elsewhere')!r}, 'w').close()"),
    )
    assert not new.exists() and not (cache / "model.pt").exists() and (cache / "held").read_text() == "x"
    assert "both legs would share it | write {output} in the place of its path" in found["an output"]
    assert (found["a cache"], found["step"], found["elsewhere"]) == ("done", "done", "done")
    assert "which was there before" in found["held"] and "both legs would share it" in found["a save"]
