"""The checkpoint store on an object store: what is committed, and what a restart makes of whatever is left."""

import errno
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from chaosrun.checkpoint.object_storage import WAITS_S, ObjectStorage
from chaosrun.checkpoint.object_store import ObjectCheckpointStore, checkpoint_store
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import ResourcesError, UsageError
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.object_urls import ObjectPlace, why_no_store
from chaosrun.records.trace_writer import TraceWriter
from chaosrun.records.traces import CheckpointRecord
from chaosrun.supervise.objects import claim_objects
from tests.unit.test_checkpoint_store import FILES, save
from tests.unit.test_traces import start as trace_start
from tests.unit.test_traces import step as trace_step

FEW = {"model.safetensors": b"weights", "rng/rank-0.bin": b"dice"}
STEP_10, STEP_20 = "step-00000010.attempt-1", "step-00000020.attempt-1"


Store = ObjectCheckpointStore


class Killed(BaseException):
    """As SIGKILL: nothing of the store's own comes after it."""


class Lister:
    """The file system below a store, whose listings are not what is there."""

    def __init__(self, fs: Any, changed: Callable[[str, list[str]], list[str]]) -> None:
        self._fs, self._changed = fs, changed

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fs, name)

    def find(self, path: str) -> list[str]:
        return self._changed(path, self._fs.find(path))


@pytest.fixture
def bucket(tmp_path: Path) -> Path:
    return tmp_path / "bucket"


@pytest.fixture
def layout(tmp_path: Path, bucket: Path) -> LegLayout:
    return LegLayout(tmp_path / "leg", objects=ObjectPlace(f"file://{bucket}"))


@pytest.fixture
def store(layout: LegLayout) -> Store:
    return opened(layout)


def opened(layout: LegLayout, keep: int = 3) -> Store:
    store = checkpoint_store(layout, keep)
    assert isinstance(store, ObjectCheckpointStore)
    return store


def objects(bucket: Path) -> set[str]:
    return {str(path.relative_to(bucket)) for path in bucket.rglob("*") if path.is_file()}


def expect_restored(layout: LegLayout, name: str, files: dict[str, bytes] = FILES) -> None:
    """A new process goes on from this one, and every byte of it is there."""
    store = opened(layout)
    store.clear_staging()
    assert store.newest_valid().name == name
    for file, data in files.items():
        assert (layout.checkpoints / name / file).read_bytes() == data


def test_a_leg_without_a_url_has_its_checkpoints_in_its_directory(tmp_path: Path) -> None:
    assert type(checkpoint_store(LegLayout(tmp_path), 3)) is CheckpointStore


def test_a_commit_is_a_manifest_beside_the_files_that_it_names(store: Store, layout: LegLayout, bucket: Path) -> None:
    committed = save(store, 10)
    manifest = bucket / f"checkpoints/{STEP_10}.json"
    assert objects(bucket) == {f"checkpoints/{STEP_10}.json", *(f"data/{STEP_10}/{name}" for name in FILES)}
    assert manifest.read_bytes() == (committed / "MANIFEST.json").read_bytes()
    expect_restored(layout, "step-00000010")


@pytest.mark.parametrize("lost", ["checkpoints", "."])
def test_without_the_local_copies_the_newest_is_fetched(store: Store, layout: LegLayout, lost: str, bucket: Path) -> None:
    save(store, 10)
    save(store, 20)
    shutil.rmtree(layout.path / lost)
    expect_restored(layout, "step-00000020")
    assert os.listdir(layout.checkpoints) == ["step-00000020"]


def test_a_damaged_copy_is_set_aside_and_fetched_again(store: Store, layout: LegLayout) -> None:
    save(store, 10)
    (layout.checkpoints / "step-00000010/empty.bin").write_bytes(b"not empty")
    selection = opened(layout).newest_valid()
    assert selection.name == "step-00000010"
    assert [bad.reason for bad in selection.quarantined] == ["step-00000010: empty.bin has 9 bytes instead of 0"]
    expect_restored(layout, "step-00000010")


@pytest.mark.parametrize("change", ["removed", "bit"])
def test_what_the_store_does_not_give_back_goes_to_its_quarantine(
    store: Store, layout: LegLayout, bucket: Path, change: str
) -> None:
    save(store, 10)
    save(store, 20)
    shutil.rmtree(layout.checkpoints)
    damaged = bucket / f"data/{STEP_20}/rng/rank-0.bin"
    if change == "removed":
        damaged.unlink()
    else:
        damaged.write_bytes(damaged.read_bytes().replace(b"d", b"e", 1))
    selection = opened(layout).newest_valid()
    assert selection.name == "step-00000010"
    assert [bad.moved_to for bad in selection.quarantined] == [f"file://{bucket}/quarantine/{STEP_20}.json"]
    told = json.loads((bucket / f"quarantine/{STEP_20}.json").read_bytes())
    assert "rank-0.bin" in told["reason"] and json.loads(told["manifest"])["step"] == 20
    assert f"checkpoints/{STEP_20}.json" not in objects(bucket)
    expect_restored(layout, "step-00000010")


@pytest.mark.parametrize("damage", ["not a manifest", "another's"])
def test_a_damaged_manifest_is_not_gone_on_from(store: Store, layout: LegLayout, bucket: Path, damage: str) -> None:
    save(store, 10)
    save(store, 20)
    other = b"{}" if damage == "not a manifest" else (bucket / f"checkpoints/{STEP_10}.json").read_bytes()
    (bucket / f"checkpoints/{STEP_20}.json").write_bytes(other)
    selection = opened(layout).newest_valid()
    assert selection.name == "step-00000010"
    # The object, and the local copy, of which the store has no manifest any more.
    assert [bad.name for bad in selection.quarantined] == ["step-00000020"] * 2
    assert "was never committed" in selection.quarantined[1].reason


def test_a_copy_that_the_store_knows_nothing_of_was_never_committed(store: Store, layout: LegLayout, bucket: Path) -> None:
    save(store, 10)
    save(CheckpointStore(LegLayout(layout.path), keep=3), 20)
    selection = opened(layout).newest_valid()
    assert selection.name == "step-00000010"
    told = f"step-00000020: was never committed: file://{bucket}/checkpoints has no manifest of it"
    assert [bad.reason for bad in selection.quarantined] == [told]


def test_a_later_attempt_s_checkpoint_of_a_step_is_the_one(store: Store, layout: LegLayout) -> None:
    save(store, 10, attempt=1)
    assert store.set_aside(10, "spoiled")
    save(store, 10, attempt=2)
    selection = opened(layout).newest_valid()
    assert selection.manifest and selection.manifest.attempt == 2
    assert not selection.quarantined


def test_retention_keeps_as_many_with_and_without_local_copies(store: Store, layout: LegLayout, bucket: Path) -> None:
    for step in range(10, 60, 10):
        save(store, step)
    shutil.rmtree(layout.checkpoints)
    after = opened(layout)
    save(after, 60)
    assert after.retain() == ["step-00000010", "step-00000020", "step-00000030"]
    assert {name.split("/")[1][:13] for name in objects(bucket)} == {f"step-000000{step}" for step in (40, 50, 60)}
    assert os.listdir(layout.checkpoints) == ["step-00000060"]


def test_what_is_not_whole_does_not_count_as_kept(store: Store, layout: LegLayout, bucket: Path) -> None:
    for step in range(10, 60, 10):
        save(store, step)
    (bucket / "data/step-00000050.attempt-1/empty.bin").unlink()
    after = opened(layout)
    assert after.retain() == ["step-00000010"]  # 40, 30, 20 are the three that are whole


def test_another_run_s_object_is_not_overwritten(store: Store, layout: LegLayout, bucket: Path) -> None:
    (bucket / "checkpoints").mkdir(parents=True)
    (bucket / f"checkpoints/{STEP_10}.json").write_bytes(b"theirs")
    with pytest.raises(ResourcesError, match="exists already and belongs to another run") as error:
        save(store, 10)
    assert "name another prefix" in str(error.value.hint)
    assert (bucket / f"checkpoints/{STEP_10}.json").read_bytes() == b"theirs"
    assert not layout.checkpoints.exists() or os.listdir(layout.checkpoints) == []


def test_a_lost_reply_is_no_other_run(store: Store, layout: LegLayout) -> None:
    def lose(kind: str, key: str, moment: str) -> None:
        if (kind, moment) == ("create", "after"):
            raise TimeoutError("no reply")

    store.objects.listeners.append(lose)
    save(store, 10)
    expect_restored(layout, "step-00000010")
    with pytest.raises(ResourcesError, match="belongs to another run"):
        store.objects.put_new(f"checkpoints/{STEP_10}.json", b"another's")


def test_a_request_that_was_never_done_is_no_commit(store: Store, layout: LegLayout) -> None:
    def refuse(kind: str, key: str, moment: str) -> None:
        if (kind, moment) == ("create", "before"):
            raise TimeoutError("no connection")

    store.objects.listeners.append(refuse)
    with pytest.raises(ResourcesError, match="no connection"):
        save(store, 10)
    assert opened(layout).newest_valid().name is None


def test_a_store_that_loses_bytes_is_told(store: Store, bucket: Path) -> None:
    def cut(kind: str, key: str, moment: str) -> None:
        if (kind, moment) == ("put", "after") and key.endswith("model.safetensors"):
            (bucket / key).write_bytes(b"half")

    store.objects.listeners.append(cut)
    with pytest.raises(ResourcesError, match="it has 4 bytes of the 16384 that were put"):
        save(store, 10)
    assert not (bucket / "checkpoints").exists()


def late_for(layout: LegLayout) -> Store:
    """In whose listings the second checkpoint is not to be seen."""
    late = opened(layout)
    late.objects._made = Lister(late.objects.fs, lambda _, found: [path for path in found if STEP_20 not in path])
    return late


def test_a_late_listing_loses_no_commit(store: Store, layout: LegLayout) -> None:
    save(store, 10)
    save(store, 20)
    late = late_for(layout)
    assert late.clear_staging() == []
    assert late.newest_valid().name == "step-00000020"


def test_a_late_listing_without_local_copies_loses_no_commit_that_is_traced(store: Store, layout: LegLayout) -> None:
    save(store, 10)
    save(store, 20)
    shutil.rmtree(layout.path)
    late = late_for(layout)
    assert late.newest_valid().name == "step-00000010"  # nobody knows of the other
    shutil.rmtree(layout.path)
    writer = TraceWriter(layout.attempt(1).trace(0))
    writer.write(trace_start(0))
    writer.write(trace_step(1))
    writer.write(CheckpointRecord(step=20, time_s=0.0, name="step-00000020", duration_s=0.0))
    assert late.newest_valid().name == "step-00000020"


def test_a_listing_that_shows_what_is_gone_keeps_nothing_from_being_kept(store: Store, layout: LegLayout, bucket: Path) -> None:
    for step in range(10, 60, 10):
        save(store, step)
    store.set_aside(50, "unwanted")
    after = opened(layout)
    gone = f"{bucket}/checkpoints/step-00000050.attempt-1.json"
    stale = Lister(after.objects.fs, lambda path, found: [*found, gone] if path.endswith("checkpoints") else found)
    after.objects._made = stale
    assert after.retain() == ["step-00000010"]


def test_a_busy_store_is_asked_again_and_told_in_the_end(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []
    monkeypatch.setattr("chaosrun.checkpoint.object_storage.time.sleep", waited.append)
    refusals = iter([2, 1])

    def refuse(kind: str, key: str, moment: str) -> None:
        if moment == "before" and next(refusals, 0):
            raise OSError(errno.EBUSY, "Please reduce your request rate")

    store.objects.listeners.append(refuse)
    assert store.objects.read("nothing") is None
    assert waited == [0.2, 0.8]
    refusals = iter([1] * (1 + len(WAITS_S)))
    with pytest.raises(ResourcesError, match="Please reduce your request rate") as error:
        store.objects.read("nothing")
    assert "every_steps" in str(error.value.hint)


def test_what_the_library_draws_is_not_missed(store: Store) -> None:
    random.seed(7)
    expected = random.Random(7).random()
    store.objects.listeners.append(lambda kind, key, moment: random.seed(3))
    save(store, 10)
    assert random.random() == expected


def test_a_store_that_ignores_the_condition_is_found(store: Store, bucket: Path) -> None:
    store.objects.try_out()
    assert objects(bucket) == set()
    ignoring = ObjectStorage(ObjectPlace(f"file://{bucket}"))
    ignoring._create = lambda key, data: ignoring.fs.pipe_file(ignoring._path(key), data)  # type: ignore[method-assign]
    with pytest.raises(UsageError, match="ignores conditional puts"):
        ignoring.try_out()
    assert objects(bucket) == set()


def test_two_runs_of_one_name_do_not_share_a_place(tmp_path: Path, bucket: Path) -> None:
    place = ObjectPlace(f"file://{bucket}/run-1")
    claim_objects(place, RunLayout(tmp_path / "here/run-1"))
    with pytest.raises(ResourcesError, match="belongs to another run"):
        claim_objects(place, RunLayout(tmp_path / "there/run-1"))


@pytest.mark.parametrize(
    ("url", "why"),
    [
        *(("hdfs://place/x", "conditional put"), ("s3://", "names no bucket")),
        *(("file://relative/x", "not absolute"), ("file:///fine", None)),
    ],
)
def test_what_is_known_of_a_url_without_asking(url: str, why: str | None) -> None:
    found = why_no_store(url)
    assert found is None if why is None else found and why in found[0]


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = ("it needs gcsfs, which is not installed", "pip install 'chaosrun[gs]', on every node")
    assert why_no_store("gs://bucket") == said


def killed_at(layout: LegLayout, number: int, moment: str) -> Iterator[int]:
    """Steps that were acknowledged by an attempt that is killed before or after its request `number`."""
    store = opened(layout, keep=2)
    asked = count()

    def kill(kind: str, key: str, when: str) -> None:
        if when == moment and next(asked) == number:
            raise Killed

    store.objects.listeners.append(kill)
    for step in (10, 20, 30):
        save(store, step, files=FEW)
        yield step
        store.retain()


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("copies", ["kept", "lost"])
def test_a_kill_at_any_request_loses_nothing_committed(tmp_path: Path, moment: str, copies: str) -> None:
    number, ended = 0, False
    while not ended:
        number += 1
        bucket = tmp_path / f"bucket-{number}"
        layout = LegLayout(tmp_path / f"leg-{number}", objects=ObjectPlace(f"file://{bucket}"))
        acknowledged = 0
        try:
            for step in killed_at(layout, number, moment):
                acknowledged = step
            ended = True
        except Killed:
            pass
        if copies == "lost" and layout.checkpoints.exists():
            shutil.rmtree(layout.checkpoints)
        store = opened(layout, keep=2)
        store.clear_staging()
        selection = store.newest_valid()
        step = selection.manifest.step if selection.manifest else 0
        assert not selection.quarantined
        assert acknowledged <= step <= acknowledged + 10
        if step:
            expect_restored(layout, f"step-{step:08d}", FEW)
        # Nothing is left of what was not committed.
        stems = {name.split("/")[1] for name in objects(bucket) if name.startswith("data/")}
        assert {f"checkpoints/{stem}.json" for stem in stems} == {n for n in objects(bucket) if n.startswith("checkpoints/")}
    assert number > 18  # puts, looks, conditional puts, lists, deletes
