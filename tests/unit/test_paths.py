"""Names and paths that lead out of their place, are too long, or hold odd characters: refused in a sentence, never followed."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.errors import ChaosrunError, ResourcesError, SpecError, UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import RunInfo, own_leg, read_run
from chaosrun.records.supervision import supervision
from chaosrun.spec.job_file import load_job
from chaosrun.supervise import creation, find_runs
from chaosrun.supervise.creation import create_run
from chaosrun.supervise.drill import leg_of

LONG = "n" * 300
ODD_NAMES = [
    "../up",
    "..",
    ".hidden",
    "a/b",
    "a\\b",
    "",
    " ",
    "a b",
    "a\nb",
    "ä",
    "a\u202eb",
    "-rf",
    "~",
    "$HOME",
    "a;b",
    LONG,
    "n" * 65,
]


def job(folder: Path, **values: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "train.py").write_text("import chaosrun\n")
    path = folder / "job.yaml"
    path.write_text(json.dumps({"name": "probe", "script": "train.py", "workers": 1, **values}))
    return path


def create(path: Path, root: Path) -> RunLayout:
    loaded = load_job(path)
    return create_run(root, loaded, plan=FaultPlan(seed=0), overrides=[], reference="auto")


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_job_has_a_plain_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SpecError, match="1 to 64 letters"):
        load_job(job(tmp_path, name=name))


def test_a_run_lies_below_the_root_and_is_new(tmp_path: Path) -> None:
    path = job(tmp_path / "job", name="n" * 64)
    first, second = create(path, tmp_path / "root"), create(path, tmp_path / "root")
    assert first.path.parent == second.path.parent == tmp_path / "root" / "runs"
    assert first.path != second.path


def test_a_run_that_cannot_be_recorded_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(run: RunLayout, info: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run.run_json))

    monkeypatch.setattr("chaosrun.supervise.creation.write_run", fail)
    with pytest.raises(OSError, match="No space left"):
        create(job(tmp_path / "job"), tmp_path / "root")
    assert list((tmp_path / "root" / "runs").iterdir()) == []


@pytest.mark.parametrize("folder", ["root", "job"])
def test_a_folder_that_no_record_can_name_is_refused_before_anything_is_made(tmp_path: Path, folder: str) -> None:
    where = {"root": tmp_path / "root", "job": tmp_path / "job", folder: tmp_path / "caf\udce9"}
    with pytest.raises(UsageError, match="not UTF-8"):
        create(job(where["job"]), where["root"])
    assert not where["root"].exists()


def test_a_link_that_waits_under_the_name_of_a_run_is_not_followed(tmp_path: Path) -> None:
    """A run directory is made, never found."""
    path, elsewhere = job(tmp_path / "job"), tmp_path / "elsewhere"
    taken = create(path, tmp_path / "root").path
    for entry in sorted(taken.rglob("*"), reverse=True):
        entry.unlink()
    taken.rmdir()
    elsewhere.mkdir()
    taken.symlink_to(elsewhere)
    assert create(path, tmp_path / "root").path != taken
    assert not any(elsewhere.iterdir())


def test_checkpoints_elsewhere_get_a_directory_of_the_runs_name(tmp_path: Path) -> None:
    """`checkpoint.storage` may be anywhere the user says; what the run adds to it is its own name."""
    run = create(job(tmp_path / "job", checkpoint={"storage": "../store"}), tmp_path / "root")
    assert own_leg(run, read_run(run), "chaos").storage == tmp_path / "store" / run.run_id / "chaos"


def test_storage_that_stands_under_that_name_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda *_: "20200101-000000")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "probe-20200101-000000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="cannot be written"):
        create(job(tmp_path / "job", checkpoint={"storage": "../store"}), tmp_path / "root")
    assert not any((tmp_path / "root" / "runs").iterdir())


@pytest.mark.parametrize("full", ["runs", "store"])
def test_a_full_disk_is_no_wrong_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str) -> None:
    making = Path.mkdir

    def make(path: Path, *args: Any, **options: Any) -> None:
        if path.parent.name == full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        making(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", make)
    with pytest.raises(ResourcesError, match="No space left") as raised:
        create(job(tmp_path / "job", checkpoint={"storage": "../store"}), tmp_path / "root")
    assert raised.value.exit_code == 7


def test_a_run_that_cannot_be_recorded_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: RunLayout, info: RunInfo) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(run.run_json))

    monkeypatch.setattr(creation, "write_run", refuse)
    with pytest.raises(OSError, match="Input/output error"):
        create(job(tmp_path / "job", checkpoint={"storage": "../store"}), tmp_path / "root")
    assert not any(entry for folder in ("store", "root/runs") for entry in (tmp_path / folder).iterdir())


@pytest.mark.parametrize("storage", [LONG, "x/" * 3000, "a\0b", "train.py/inside", "\ud800"])
def test_storage_that_is_no_path(tmp_path: Path, storage: str) -> None:
    with pytest.raises(ChaosrunError):
        create(job(tmp_path / "job", checkpoint={"storage": storage}), tmp_path / "root")


@pytest.mark.parametrize("script", [LONG, "x/" * 3000, "a\0b", "..", ".", "train.py/inside", "\ud800", f"{LONG}/{LONG}.py"])
def test_a_script_that_is_no_file(tmp_path: Path, script: str) -> None:
    with pytest.raises(SpecError):
        load_job(job(tmp_path, script=script))


@pytest.mark.parametrize("name", [LONG, "x/" * 3000, "\ud800", "nowhere/job.yaml"])
def test_a_job_file_that_is_none(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        load_job(tmp_path / name)


@pytest.mark.parametrize("where", ["/etc", "/", "..", "elsewhere", "/tmp/other-run/chaos", "", 3, ["/etc"], "/a\0b"])
def test_a_run_writes_to_no_storage_but_its_own(tmp_path: Path, where: Any) -> None:
    run = create(job(tmp_path / "job"), tmp_path / "root")
    info = json.loads(run.run_json.read_text())
    run.run_json.write_text(json.dumps({**info, "storage": {**info["storage"], "chaos": where}}))
    with pytest.raises(UsageError):
        own_leg(run, read_run(run), "chaos")


def test_nor_does_a_copy_of_a_run_write_to_the_originals(tmp_path: Path) -> None:
    run = create(job(tmp_path / "job", checkpoint={"storage": "../store"}), tmp_path / "root")
    copy = RunLayout(run.path.rename(run.path.with_name("copy")))
    with pytest.raises(UsageError, match="not this run's"):
        own_leg(copy, read_run(copy), "reference")
    # It may still be read, and judged.
    assert leg_of(copy, "reference").storage == tmp_path / "store" / run.run_id / "reference"


@pytest.mark.parametrize("place", [".", "checkpoints", "staging", "quarantine"])
@pytest.mark.parametrize("storage", [None, "../store"])
def test_nor_through_a_link_in_place_of_a_folder(tmp_path: Path, place: str, storage: str | None) -> None:
    run = create(job(tmp_path / "job", checkpoint={"storage": storage}), tmp_path / "root")
    leg = own_leg(run, read_run(run), "reference")
    link = leg.checkpoints.parent / place
    link.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "elsewhere").mkdir()
    link.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is a symbolic link"):
        own_leg(run, read_run(run), "reference")


@pytest.mark.parametrize(
    "ref", ["", LONG, f"../{LONG}", "x/" * 3000, "../..", "/", "/etc/", "a\0b", "a/\0", "\ud800/x", "..", "."]
)
def test_no_run_is_found_by_a_name_that_is_none(tmp_path: Path, ref: str) -> None:
    create(job(tmp_path / "job"), tmp_path / "root")
    if ref in ("..", "."):
        os.chdir(tmp_path)
    with pytest.raises(UsageError) as refused:
        api.find_run(ref, tmp_path / "root")
    assert len(refused.value.message) < 300


def test_a_folder_that_is_no_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not a run: run\.json is missing"):
        api.find_run(str(tmp_path), tmp_path)


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    path, root = job(tmp_path / "job"), tmp_path / "root"
    sound, damaged, torn = (create(path, root) for _ in range(3))
    damaged.run_json.write_text("{}")
    torn.run_json.write_bytes(b'{"v": 1, "run_id"\xff')
    listed = {summary.run_id: summary.status for summary in api.list_runs(root)}
    assert listed == {sound.run_id: "interrupted", damaged.run_id: "damaged", torn.run_id: "damaged"}
    assert api.find_run(sound.run_id, root) == sound
    for run in (damaged, torn):
        with pytest.raises(UsageError, match=r"run\.json"):
            api.verify(api.find_run(run.run_id, root))


def test_a_run_removed_while_the_list_is_made_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, root = job(tmp_path / "job"), tmp_path / "root"
    kept, removed = (create(path, root) for _ in range(2))

    def reading(run: RunLayout) -> RunInfo:
        if run == removed:
            run.run_json.unlink()
        return read_run(run)

    monkeypatch.setattr(find_runs, "read_run", reading)
    assert [summary.run_id for summary in api.list_runs(root)] == [kept.run_id]


def test_the_list_has_how_a_run_ended(tmp_path: Path) -> None:
    path, root = job(tmp_path / "job"), tmp_path / "root"
    failed, left, odd = (create(path, root) for _ in range(3))
    failed.verdict_json.write_text('{"status": "INCONCLUSIVE", "outcome": "user_error", "exit_code": 4}')
    odd.verdict_json.write_text('{"status": "INCONCLUSIVE", "outcome": 7, "exit_code": "x"}')
    with pytest.raises(ResourcesError), supervision(left):
        raise ResourcesError("no Ray cluster answers")
    listed = {summary.run_id: (summary.status, summary.outcome, summary.exit_code) for summary in api.list_runs(root)}
    assert listed == {
        failed.run_id: ("INCONCLUSIVE", "user_error", 4),
        left.run_id: ("interrupted", None, 7),
        odd.run_id: ("INCONCLUSIVE", None, None),
    }
