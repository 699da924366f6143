import errno
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosrun.checkpoint import audit
from chaosrun.checkpoint.audit import hash_member, list_members
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import InvalidCheckpointError, ResourcesError
from chaosrun.records.layout import MANIFEST_NAME, LegLayout, checkpoint_name
from tests.records import manifest_of

FILES = {"model.safetensors": bytes(range(256)) * 64, "rng/rank-0.bin": b"dice" * 100, "empty.bin": b""}


@pytest.fixture
def layout(tmp_path):
    return LegLayout(tmp_path / "leg")


@pytest.fixture
def store(layout):
    return CheckpointStore(layout, keep=3)


def save(store, step, attempt=1, files=FILES):
    staging = store.stage(step, attempt)
    for name, data in files.items():
        path = staging / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    sealed = store.seal(staging, files)
    store.write_manifest(staging, manifest_of(step, files=sealed, attempt=attempt))
    return store.commit(staging, step)


def names(directory):
    return sorted(os.listdir(directory)) if directory.exists() else []


def test_a_saved_checkpoint_is_found_and_equal(store, layout):
    committed = save(store, 10)
    assert committed == layout.checkpoints / "step-00000010"
    selection = store.newest_valid()
    assert (selection.name, selection.quarantined) == ("step-00000010", ())
    assert selection.manifest == store.audit("step-00000010")
    assert set(selection.manifest.files) == set(FILES)
    assert names(layout.staging) == []


def test_stage_is_the_same_for_every_rank_and_idempotent(store):
    assert store.stage(5, 2) == store.stage(5, 2)
    assert store.stage(5, 2).name == "step-00000005.attempt-2"


def test_nothing_saved_means_start_from_the_beginning(store):
    selection = store.newest_valid()
    assert (selection.name, selection.manifest, selection.quarantined) == (None, None, ())


def test_foreign_entries_are_not_checkpoints_and_stay(store, layout):
    save(store, 10)
    for name in ("step-00000099.tmp", "checkpoint_99", "LATEST"):
        (layout.checkpoints / name).mkdir()
    (layout.staging / "notes").mkdir()
    assert store.newest_valid().name == "step-00000010"
    store.clear_staging()
    assert "LATEST" in names(layout.checkpoints)
    assert names(layout.staging) == ["notes"]


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def zero_tail(path):
    data = path.read_bytes()
    path.write_bytes(data[:-8] + bytes(8))


def link_instead(path):
    target = path.parents[2] / "elsewhere"
    os.rename(path, target)
    path.symlink_to(target)


def pipe_instead(path):
    path.unlink()
    os.mkfifo(path)


def directory_instead(path):
    path.unlink()
    path.mkdir()


MODEL = "model.safetensors"
DAMAGE = {
    "truncated": (lambda at: os.truncate(at / MODEL, 100), f"{MODEL} has 100 bytes instead of 16384"),
    "emptied": (lambda at: os.truncate(at / MODEL, 0), f"{MODEL} has 0 bytes"),
    "grown": (lambda at: os.truncate(at / "empty.bin", 1), "empty.bin has 1 bytes instead of 0"),
    "one bit": (lambda at: flip(at / "rng/rank-0.bin"), r"rng/rank-0.bin .*its hash differs"),
    "zeroed tail": (lambda at: zero_tail(at / MODEL), rf"{MODEL} .*its hash differs"),
    "missing file": (lambda at: (at / MODEL).unlink(), f"{MODEL} is missing"),
    "missing manifest": (lambda at: (at / MANIFEST_NAME).unlink(), f"{MANIFEST_NAME} is missing"),
    "one bit of the manifest": (lambda at: flip(at / MANIFEST_NAME), f"{MANIFEST_NAME} is damaged"),
    "manifest truncated": (lambda at: os.truncate(at / MANIFEST_NAME, 40), f"{MANIFEST_NAME} is damaged: not JSON"),
    "extra file": (lambda at: (at / "rng/rank-9.bin").write_bytes(b"x"), r"rng/rank-9.bin is not in the manifest"),
    "link": (lambda at: link_instead(at / MODEL), f"{MODEL} is a symbolic link"),
    "manifest a link": (lambda at: link_instead(at / MANIFEST_NAME), f"{MANIFEST_NAME} is a symbolic link"),
    "pipe": (lambda at: pipe_instead(at / MODEL), f"{MODEL} is a special file"),
    "directory": (lambda at: directory_instead(at / MODEL), f"{MODEL} is missing"),
    "another step": (lambda at: (at / MANIFEST_NAME).write_bytes(manifest_of(10).to_bytes()), "belongs to step 10, not 20"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_named_quarantined_and_the_older_one_used(store, layout, damage):
    save(store, 10)
    newest = save(store, 20)
    spoil, reason = DAMAGE[damage]
    spoil(newest)
    with pytest.raises(InvalidCheckpointError, match=reason):
        store.audit("step-00000020")
    selection = store.newest_valid()
    assert selection.name == "step-00000010"
    (quarantined,) = selection.quarantined
    assert (quarantined.name, quarantined.step) == ("step-00000020", 20)
    assert reason.split(" ")[0] in quarantined.reason
    assert quarantined.moved_to == str(layout.quarantine / "step-00000020.invalid-1")
    assert names(layout.checkpoints) == ["step-00000010"]
    assert names(layout.quarantine) == ["step-00000020.invalid-1"]
    assert store.newest_valid().quarantined == ()


def test_a_checkpoint_copied_under_another_step_is_refused(store, layout):
    os.rename(save(store, 10), layout.checkpoints / "step-00000011")
    with pytest.raises(InvalidCheckpointError, match="belongs to step 10, not 11"):
        store.audit("step-00000011")


def test_a_link_or_file_under_a_checkpoints_name_is_refused_and_only_it_is_moved(store, layout):
    real = save(store, 10)
    (layout.checkpoints / "step-00000030").symlink_to(real)
    (layout.checkpoints / "step-00000020").write_bytes(b"x")
    selection = store.newest_valid()
    assert selection.name == "step-00000010"
    assert [item.reason for item in selection.quarantined] == [
        "step-00000030: is a symbolic link, not a directory",
        "step-00000020: is a file, not a directory",
    ]


def test_all_invalid_means_none_and_names_each(store, layout):
    for step in (10, 20):
        flip(save(store, step) / MODEL)
    selection = store.newest_valid()
    assert selection.name is None
    assert [item.step for item in selection.quarantined] == [20, 10]
    flip(save(store, 20) / MODEL)
    assert str(store.newest_valid().quarantined[0].moved_to).endswith("step-00000020.invalid-2")


def test_audit_of_what_does_not_exist(store):
    with pytest.raises(InvalidCheckpointError, match="there is no such checkpoint"):
        store.audit("step-00000010")
    with pytest.raises(InvalidCheckpointError, match="not the name of a checkpoint"):
        store.audit("../step-00000010")


def test_a_partial_audit_hashes_only_what_it_is_asked_for_but_sees_every_size(store):
    directory = save(store, 10)
    flip(directory / MODEL)
    store.audit("step-00000010", hashed=["rng/rank-0.bin"])
    with pytest.raises(InvalidCheckpointError, match="its hash differs"):
        store.audit("step-00000010", hashed=[MODEL])
    os.truncate(directory / MODEL, 5)
    with pytest.raises(InvalidCheckpointError, match=f"{MODEL} has 5 bytes"):
        store.audit("step-00000010", hashed=["rng/rank-0.bin"])


def test_sealing_a_missing_file_a_link_or_an_outside_path(store, tmp_path):
    staging = store.stage(1, 1)
    with pytest.raises(InvalidCheckpointError, match=r"model\.bin is missing"):
        store.seal(staging, ["model.bin"])
    (tmp_path / "outside").write_bytes(b"x")
    (staging / "model.bin").symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidCheckpointError, match="symbolic link"):
        store.seal(staging, ["model.bin"])
    with pytest.raises(ValueError, match="not a plain relative path"):
        store.seal(staging, ["../../outside"])
    with pytest.raises(ValueError, match=r"'\\udcff\.bin' is not UTF-8"):
        store.seal(staging, [os.fsdecode(b"\xff.bin")])


def test_a_manifest_that_does_not_match_the_files_is_not_written(store):
    staging = store.stage(1, 1)
    (staging / "a").write_bytes(b"a")
    sealed = store.seal(staging, ["a"])
    (staging / "late").write_bytes(b"b")
    with pytest.raises(InvalidCheckpointError, match="not what was sealed: late"):
        store.write_manifest(staging, manifest_of(1, files=sealed))
    assert not (staging / MANIFEST_NAME).exists()


def test_committing_without_a_manifest_is_a_bug(store):
    with pytest.raises(AssertionError):
        store.commit(store.stage(1, 1), 1)


def test_committing_a_step_again_keeps_the_superseded_one_aside(store, layout):
    save(store, 10, attempt=1)
    save(store, 10, attempt=2)
    assert store.newest_valid().manifest.attempt == 2
    assert names(layout.quarantine) == ["step-00000010.superseded-1"]


def test_a_superseded_checkpoint_returns_when_its_successor_never_came(store, layout):
    save(store, 10, attempt=1)
    save(store, 10, attempt=2)
    os.rename(layout.checkpoints / "step-00000010", layout.staging / "step-00000010.attempt-2")
    assert store.newest_valid().manifest.attempt == 1
    assert names(layout.quarantine) == []


def test_a_superseded_checkpoint_stays_aside_once_retention_took_its_successor(layout):
    store = CheckpointStore(layout, keep=2)
    for step in (10, 10, 20, 30):
        save(store, step)
    assert store.retain() == ["step-00000010"]
    assert store.newest_valid().name == "step-00000030"
    assert names(layout.checkpoints) == ["step-00000020", "step-00000030"]


def test_retention_deletes_the_oldest_and_leaves_nothing_in_staging(store, layout):
    for step in (10, 20, 30, 40, 50):
        save(store, step)
    assert store.retain() == ["step-00000010", "step-00000020"]
    assert names(layout.checkpoints) == [checkpoint_name(step) for step in (30, 40, 50)]
    assert names(layout.staging) == []
    assert store.retain() == []


def test_retention_does_not_count_invalid_ones(layout):
    store = CheckpointStore(layout, keep=1)
    for step in (10, 20, 30, 40):
        save(store, step)
    flip(layout.checkpoints / "step-00000030" / MODEL)
    assert store.retain() == ["step-00000010"]
    assert names(layout.checkpoints) == ["step-00000020", "step-00000030", "step-00000040"]


def test_retention_notices_damage_to_one_it_has_audited_before(layout):
    store = CheckpointStore(layout, keep=2)
    for step in (10, 20, 30):
        save(store, step)
    assert store.retain() == ["step-00000010"]
    flip(layout.checkpoints / "step-00000030" / MODEL)
    save(store, 40)
    assert store.retain() == []
    assert names(layout.checkpoints) == ["step-00000020", "step-00000030", "step-00000040"]


def test_leftovers_of_killed_attempts_are_cleared(store, layout):
    save(store, 10)
    (store.stage(20, 3) / "half").write_bytes(b"x")
    (layout.staging / "step-00000005.deleted-1").mkdir()
    assert store.newest_valid().name == "step-00000010"
    store.clear_staging()
    assert names(layout.staging) == []
    store.clear_staging()


def test_the_bytes_reach_the_disk_before_the_name_does(store, layout, monkeypatch):
    """Order of fsyncs and renames: files, then folders, then the manifest, then the commit, then the folders around it."""
    events = []
    real_fsync, real_rename = os.fsync, os.rename

    def fsync(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def rename(source, target, **options):
        events.append(("rename", str(target)))
        real_rename(source, target, **options)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    target = save(store, 10)
    staging = str(layout.staging / "step-00000010.attempt-1")
    manifest_named = events.index(("rename", f"{staging}/{MANIFEST_NAME}"))
    committed = events.index(("rename", str(target)))
    before_manifest = events[:manifest_named]
    for needed in [*(f"{staging}/{name}" for name in FILES), f"{staging}/rng", staging]:
        assert ("fsync", needed) in before_manifest
    assert any(kind == "fsync" and ".MANIFEST.json." in path for kind, path in before_manifest)
    assert ("fsync", staging) in events[manifest_named:committed]
    assert ("fsync", str(layout.checkpoints)) in events[committed:]


INTERRUPTED = ("mkdir", "fsync", "rename", "replace", "unlink", "rmdir", "open")


def run_until_call(action, last):
    """Run `action` in a forked child that vanishes, as by SIGKILL, before file system call `last`. True if it got through."""
    child = os.fork()
    if child == 0:
        count = 0

        def wrap(real):
            def interrupted(*args, **kwargs):
                nonlocal count
                if count == last:
                    os._exit(9)
                count += 1
                return real(*args, **kwargs)

            return interrupted

        for name in INTERRUPTED:
            setattr(os, name, wrap(getattr(os, name)))
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9), f"the child failed with {code}"
    return code == 0


@pytest.mark.parametrize(
    ("before", "step"), [((10, 20, 30), 40), ((10,), 20), ((10,), 10)], ids=["retention", "second", "superseding"]
)
def test_a_kill_before_any_file_system_call_leaves_a_valid_checkpoint(tmp_path, before, step):
    for last in range(400):
        layout = LegLayout(tmp_path / str(last))
        store = CheckpointStore(layout, keep=3)
        for earlier in before:
            save(store, earlier)

        def action(store=store):
            save(store, step, attempt=2)
            store.retain()

        finished = run_until_call(action, last)
        after = CheckpointStore(layout, keep=3)
        selection = after.newest_valid()
        assert selection.quarantined == (), f"a half-made checkpoint was visible after call {last}"
        assert selection.name in (checkpoint_name(before[-1]), checkpoint_name(step))
        assert len([name for name in names(layout.checkpoints) if after.audit(name)]) >= min(len(before), 2)
        after.clear_staging()
        assert names(layout.staging) == []
        if finished:
            assert selection.manifest is not None
            assert selection.manifest.attempt == 2
            assert last > 20
            return
    pytest.fail("the save never finished")


@pytest.mark.parametrize(
    ("code", "hint"), [(errno.ENOSPC, "free some space"), (errno.EDQUOT, "free some space"), (errno.EROFS, "writable")]
)
def test_storage_failures_are_explained_and_leave_the_older_checkpoint(store, layout, monkeypatch, code, hint):
    save(store, 10)

    def failing(descriptor):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(ResourcesError, match=r"checkpoint storage failed at .*step-00000020") as caught:
        save(store, 20)
    assert hint in caught.value.hint
    monkeypatch.undo()
    store.clear_staging()
    assert store.newest_valid().name == "step-00000010"


def test_other_errors_are_not_dressed_up_as_storage(store, monkeypatch):
    def failing(descriptor):
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(OSError) as caught:
        save(store, 10)
    assert caught.value.errno == errno.EBADF


def test_a_real_file_size_limit_while_the_manifest_is_written(store, layout):
    save(store, 10)
    staging = store.stage(20, 1)
    many = {f"file-{number}": b"" for number in range(40)}
    for name in many:
        (staging / name).touch()
    sealed = store.seal(staging, many)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        try:
            store.write_manifest(staging, manifest_of(20, files=sealed))
        except ResourcesError as error:
            os._exit(0 if "ulimit" in (error.hint or "") else 2)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not (staging / MANIFEST_NAME).exists()
    assert set(list_members(staging)) == set(many)
    assert store.newest_valid().name == "step-00000010"


def test_a_file_where_the_storage_should_be(tmp_path):
    (tmp_path / "storage").write_bytes(b"")
    store = CheckpointStore(LegLayout(tmp_path / "leg", tmp_path / "storage"), keep=3)
    with pytest.raises(ResourcesError, match="storage") as caught:
        store.stage(10, 1)
    assert "move the file away" in (caught.value.hint or "")


def test_storage_that_nobody_may_write(tmp_path):
    # The kernel refuses directories in sysfs even to root.
    store = CheckpointStore(LegLayout(tmp_path / "leg", Path("/sys/chaosrun")), keep=3)
    with pytest.raises(ResourcesError) as caught:
        store.stage(10, 1)
    assert "writable" in (caught.value.hint or "")


def test_storage_elsewhere_holds_everything(tmp_path):
    layout = LegLayout(tmp_path / "leg", tmp_path / "deep" / "storage")
    save(CheckpointStore(layout, keep=3), 10)
    assert names(tmp_path / "deep" / "storage") == ["checkpoints", "staging"]
    assert not layout.path.exists()


def test_choosing_a_checkpoint_looks_at_the_newest_alone(store, layout, monkeypatch):
    looked_at, slept = set(), []
    for step in (10, 20, 30):
        save(store, step)
    open_file = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest, **more: looked_at.add(str(path)) or open_file(path, *rest, **more))
    monkeypatch.setattr(time, "sleep", slept.append)
    assert store.newest_valid().name == "step-00000030"
    newest, *older = (str(layout.checkpoints / f"step-000000{step}") for step in (30, 20, 10))
    assert any(path.startswith(newest) for path in looked_at)
    assert not any(path.startswith(tuple(older)) for path in looked_at) and not slept


def test_what_lies_in_quarantine_is_told_but_what_a_newer_one_took_the_place_of(store, layout):
    assert list(store.quarantined()) == []
    for _ in range(2):
        save(store, 20)
    assert list(store.quarantined()) == []
    aside = store.set_aside(20, "nobody saw it")
    assert [(each.name, each.step, each.moved_to) for each in store.quarantined()] == [("step-00000020", 20, aside.moved_to)]


def test_a_checkpoint_that_is_not_wanted_is_set_aside_and_the_older_one_used(store, layout):
    save(store, 10)
    save(store, 20)
    aside = store.set_aside(20, "nobody saw it")
    assert aside is not None
    assert (aside.name, aside.reason) == ("step-00000020", "nobody saw it")
    assert store.newest_valid().name == "step-00000010"
    assert names(layout.quarantine) == ["step-00000020.unwanted-1"]
    assert store.set_aside(20, "again") is None


def test_files_that_nobody_has_written_to_since_they_were_hashed_are_not_hashed_again(store, monkeypatch):
    directory = save(store, 10)
    read: list[str] = []
    monkeypatch.setattr(audit, "hash_member", lambda _, name: read.append(name) or hash_member(directory, name))
    selection = store.newest_valid()
    assert sorted(read) == sorted(FILES)
    again = CheckpointStore(store._layout, keep=3)
    assert again.audit("step-00000010", hashed=[MODEL], vouched=selection.signature) == selection.manifest
    assert len(read) == len(FILES)
    flip(directory / MODEL)
    with pytest.raises(InvalidCheckpointError, match="its hash differs"):
        again.audit("step-00000010", hashed=[MODEL], vouched=selection.signature)


def test_a_file_that_changes_while_it_is_hashed_is_not_vouched_for(store, monkeypatch):
    directory = save(store, 10)

    def hashed_too_early(_, name):
        entry = hash_member(directory, name)
        if name == MODEL:
            flip(directory / MODEL)
        return entry

    monkeypatch.setattr(audit, "hash_member", hashed_too_early)
    assert store.newest_valid().signature not in ("", audit.signature_of(directory))


@pytest.mark.parametrize("spoilt", ["large-0", "large-2", "small"])
def test_of_files_that_are_hashed_at_once_the_damaged_one_is_named(store, spoilt):
    large = {f"large-{number}": bytes([number]) * (1 << 20) for number in range(3)}
    directory = save(store, 10, files={**large, "small": b"1"})
    store.audit("step-00000010")
    flip(directory / spoilt)
    with pytest.raises(InvalidCheckpointError, match=f"{spoilt} has the right size but other contents"):
        store.audit("step-00000010")


WRITES = """
import sys, time
from pathlib import Path
from chaosrun.checkpoint.store import written_back
folder = Path(sys.argv[1])
with written_back(folder):
    (folder / "a").write_bytes(b"a" * 4096)
    (folder / "linked").symlink_to(sys.argv[2])
    (folder / "gone").symlink_to("/nowhere")
    time.sleep(0.3)
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_what_is_written_is_on_its_way_to_the_disk_before_it_is_synced(tmp_path):
    (other := tmp_path / "other").write_bytes(b"b")
    (folder := tmp_path / "folder").mkdir()
    tracing = ["strace", "-f", "-y", "-e", "trace=sync_file_range"]
    done = subprocess.run([*tracing, sys.executable, "-c", WRITES, folder, other], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    calls = [line for line in done.stderr.splitlines() if "sync_file_range(" in line]
    assert any(f"<{folder}/a>" in line and line.endswith("SYNC_FILE_RANGE_WRITE) = 0") for line in calls), done.stderr
    assert not any(str(other) in line for line in calls), "a link is not followed"
