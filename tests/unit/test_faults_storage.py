"""Damage to stored checkpoints: of the right file, noticed by the audit, written down, and never outside the run's folder."""

import errno
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaosrun.checkpoint.object_store import checkpoint_store
from chaosrun.checkpoint.store import CheckpointStore
from chaosrun.errors import InvalidCheckpointError, ResourcesError
from chaosrun.faults import storage
from chaosrun.faults.fault import Fault
from chaosrun.faults.kinds import KINDS
from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.points import DiskPoints, FaultPoints
from chaosrun.faults.storage import RequestNote
from chaosrun.faults.strike import Pace, Strike
from chaosrun.records.filesystem import Filesystem, written_for
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.layout import MANIFEST_NAME, LegLayout
from chaosrun.records.markers import read_note
from chaosrun.records.object_urls import ObjectPlace
from chaosrun.records.order import WorkerOrder
from tests.integration.ranks import make_orders
from tests.records import manifest_of, read_lines
from tests.unit.events import event

FILES = {
    "model.safetensors": bytes(range(1, 251)) * 80,
    "chaosrun-rank-0.pt": b"rank 0" * 20,
    "chaosrun-rank-1.pt": b"rank 1" * 20,
}


def order(leg: LegLayout, **changes: Any) -> WorkerOrder:
    return replace(make_orders(leg.path, "", attempt=3, workers=2)[1], **changes)


class Leg:
    """A leg with checkpoints of steps 10 and 20."""

    def __init__(self, path: Path, objects: ObjectPlace | None = None) -> None:
        self.layout = LegLayout(path, objects=objects)
        self.disk = Filesystem()
        self.store = checkpoint_store(self.layout, 3, self.disk)
        for step in (10, 20):
            self.save(step)

    def save(self, step: int) -> Path:
        staging = self.store.stage(step, 3)
        for name, data in FILES.items():
            (staging / name).write_bytes(data)
        self.store.write_manifest(staging, manifest_of(step, attempt=3, files=self.store.seal(staging, sorted(FILES))))
        return self.store.commit(staging, step)

    @property
    def newest(self) -> Path:
        return self.layout.checkpoints / "step-00000020"

    def strike(self, kind: str, at: dict[str, Any] | None = None, **options: Any) -> Strike:
        fault = Fault(id="F1", kind=kind, rank=1, options=options, source="test")  # type: ignore[arg-type]
        own = order(self.layout)
        return Strike(fault=fault, step=20, order=own, leg=self.layout, training=None, pace=Pace(), at=at or {})

    def note(self, kind: str = "truncate") -> Any:
        note = read_note(self.layout, "F1", KINDS[kind].note)
        assert note is not None
        return note


@pytest.fixture
def leg(tmp_path: Path) -> Leg:
    return Leg(tmp_path / "run" / "chaos")


REASONS = {
    "truncate": "model.safetensors has 10000 bytes instead of 20000",
    "zero_tail": "model.safetensors has the right size but other contents",
    "flip_file_bit": "model.safetensors has the right size but other contents",
    "missing_file": "chaosrun-rank-1.pt is missing",
    "missing_manifest": "MANIFEST.json is missing",
    "foreign_manifest": "MANIFEST.json belongs to step 10, not 20",
}


def strike(strike: Strike) -> None:
    assert strike.fault.facts.inside is not None
    strike.fault.facts.inside(strike)


def test_every_damage_is_here() -> None:
    assert REASONS.keys() == {name for name, kind in KINDS.items() if kind.damages == "checkpoint"}


@pytest.mark.parametrize("kind", REASONS)
def test_damage_is_found_by_the_audit_and_told_by_the_note(leg: Leg, kind: str) -> None:
    strike(leg.strike(kind))
    with pytest.raises(InvalidCheckpointError, match=REASONS[kind]):
        leg.store.audit("step-00000020")
    note = leg.note()
    file = REASONS[kind].split()[0]
    assert (note.checkpoint, note.file, note.path) == ("step-00000020", file, f"checkpoints/step-00000020/{file}")
    assert note.problem is None and note.final is True
    path = leg.newest / file
    assert note.before.size > 0
    assert note.before != note.after
    assert (note.after is None) == (not path.exists())
    if note.after:
        assert note.after.size == path.stat().st_size
    leg.store.audit("step-00000010")
    assert leg.store.newest_valid().name == "step-00000010"


def test_one_bit_is_one_bit_and_zeros_are_the_tail_alone(leg: Leg) -> None:
    path, data = leg.newest / "model.safetensors", FILES["model.safetensors"]
    strike(leg.strike("flip_file_bit"))
    changed = [(a, b) for a, b in zip(data, path.read_bytes(), strict=True) if a != b]
    assert len(changed) == 1 and (changed[0][0] ^ changed[0][1]).bit_count() == 1
    path.write_bytes(data)
    strike(leg.strike("zero_tail"))
    assert path.read_bytes() == data[:-4096] + bytes(4096)


def test_a_tail_of_zeros_is_made_longer(leg: Leg) -> None:
    path = leg.newest / "model.safetensors"
    path.write_bytes(b"x" * 10_000 + bytes(9_000))
    strike(leg.strike("zero_tail"))
    data = path.read_bytes()
    assert len(data) == 19_000 and data.count(b"x") == 19_000 - 4 * 4096
    assert leg.note().problem is None


def test_the_manifest_of_a_first_checkpoint_is_made_out_for_another_step(tmp_path: Path) -> None:
    leg = Leg(tmp_path / "run" / "chaos")
    leg.store.set_aside(10, "away with it")
    strike(leg.strike("foreign_manifest"))
    with pytest.raises(InvalidCheckpointError, match="belongs to step 19, not 20"):
        leg.store.audit("step-00000020")


def test_a_file_that_the_plan_names(leg: Leg) -> None:
    strike(leg.strike("truncate", file="chaosrun-rank-0.pt"))
    assert leg.note().file == "chaosrun-rank-0.pt"
    strike(leg.strike("flip_file_bit", file=MANIFEST_NAME))
    with pytest.raises(InvalidCheckpointError, match=r"MANIFEST\.json is damaged"):
        leg.store.audit("step-00000020")


def test_what_cannot_be_damaged_is_told_as_a_problem(leg: Leg, tmp_path: Path) -> None:
    strike(leg.strike("truncate", file="nothing.bin"))
    assert "has no file nothing.bin, it holds MANIFEST.json, chaosrun-rank-0.pt" in leg.note().problem
    (leg.newest / "empty.bin").touch()
    strike(leg.strike("truncate", file="empty.bin"))
    assert leg.note().problem == "empty.bin is what it was before"
    bare = LegLayout(tmp_path / "bare" / "chaos")
    strike(replace(leg.strike("truncate"), leg=bare))
    assert "no checkpoint" in str(read_note(bare, "F1", KINDS["truncate"].note))


def outside_by_dots(leg: Leg, outside: Path) -> str:
    return os.path.relpath(outside, leg.newest)


def inside_the_run_alone(leg: Leg, outside: Path) -> str:
    (leg.layout.path / "precious.bin").write_bytes(outside.read_bytes())
    return "../../precious.bin"


def outside_by_name(leg: Leg, outside: Path) -> str:
    return str(outside)


def outside_by_link(leg: Leg, outside: Path) -> str:
    (leg.newest / "linked.bin").symlink_to(outside)
    return "linked.bin"


def outside_by_hard_link(leg: Leg, outside: Path) -> str:
    (leg.newest / "linked.bin").hardlink_to(outside)
    return "linked.bin"


def outside_by_a_linked_folder(leg: Leg, outside: Path) -> str:
    (leg.newest / "folder").symlink_to(outside.parent)
    return f"folder/{outside.name}"


@pytest.mark.parametrize("kind", ["truncate", "zero_tail", "flip_file_bit", "missing_file"])
@pytest.mark.parametrize(
    "way",
    [inside_the_run_alone, outside_by_dots, outside_by_name, outside_by_link, outside_by_hard_link, outside_by_a_linked_folder],
)
def test_nothing_outside_the_run_is_touched(leg: Leg, tmp_path: Path, kind: str, way: Any) -> None:
    outside = tmp_path / "elsewhere" / "precious.bin"
    outside.parent.mkdir()
    outside.write_bytes(b"precious" * 100)
    strike(leg.strike(kind, file=way(leg, outside)))
    assert all(path.read_bytes() == b"precious" * 100 for path in [outside, *leg.layout.path.glob("precious.bin")])
    assert "nothing was damaged" in leg.note().problem


def test_a_checkpoint_that_is_a_link_is_left_alone(leg: Leg, tmp_path: Path) -> None:
    real = tmp_path / "elsewhere"
    os.rename(leg.newest, real)
    leg.newest.symlink_to(real)
    strike(leg.strike("missing_manifest"))
    assert (real / MANIFEST_NAME).exists()
    assert "outside the run's own folder" in leg.note().problem


def test_storage_elsewhere_is_the_runs_own(tmp_path: Path) -> None:
    leg = Leg(tmp_path / "run" / "chaos")
    elsewhere = LegLayout(leg.layout.path, tmp_path / "storage" / "run" / "chaos")
    elsewhere.checkpoints.parent.mkdir(parents=True)
    os.rename(leg.layout.checkpoints, elsewhere.checkpoints)
    strike(replace(leg.strike("truncate"), leg=elsewhere))
    assert leg.note().problem is None
    assert leg.note().path == "checkpoints/step-00000020/model.safetensors"


def test_a_folder_left_behind_is_cleared_at_the_next_start(leg: Leg) -> None:
    strike(leg.strike("stale_staging"))
    note = leg.note("stale_staging")
    assert note.staged == "step-00000020.attempt-2"
    assert sorted(os.listdir(leg.layout.staging / note.staged)) == ["chaosrun-rank-0.pt", "model.safetensors"]
    # The attempt that goes on meanwhile is not in its way.
    leg.save(30)
    assert leg.store.clear_staging() == ["step-00000020.attempt-2"]
    assert leg.store.clear_staging() == []
    strike(leg.strike("stale_staging"))
    strike(leg.strike("stale_staging"))
    assert "no folder was left behind" in leg.note("stale_staging").problem


# Writes that fail


def test_no_space_is_the_kernels_own_with_the_file_half_written(leg: Leg, tmp_path: Path) -> None:
    path = tmp_path / "file.bin"
    with pytest.raises(OSError) as caught, path.open("wb") as file:
        file.write(b"first half")
        file.flush()
        storage.no_space(leg.strike("no_space", {"path": path, "descriptor": file.fileno()}))
        file.write(b"second half")
    assert caught.value.errno == errno.ENOSPC
    assert path.read_bytes() == b"first half"
    with pytest.raises(OSError) as caught:
        storage.no_space(leg.strike("no_space", {"path": path}))
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, str(path))


@pytest.mark.parametrize("kind", ["io_error", "failed_rename"])
def test_errors_of_the_device_name_the_path(leg: Leg, kind: str) -> None:
    with pytest.raises(OSError) as caught:
        strike(leg.strike(kind, {"path": Path("/run/file")}))
    assert (caught.value.errno, caught.value.filename) == (errno.EIO, "/run/file")


# The points inside the store


def points_of(leg: Leg, *faults: Fault) -> tuple[FaultPoints, DiskPoints]:
    own = order(leg.layout, survey=True, faults=[fault.to_json() for fault in faults])
    points = FaultPoints(own, leg.layout)
    disk_points = DiskPoints(points, leg.layout)
    leg.disk.listeners.append(disk_points)
    return points, disk_points


def test_a_save_comes_by_every_fsync_and_the_rename_in_order(leg: Leg) -> None:
    _, disk_points = points_of(leg)
    leg.store = CheckpointStore(leg.layout, 2, leg.disk)
    with disk_points.saving(30):
        leg.save(30)
        leg.store.retain()
    leg.save(40)
    seen = [(each["phase"], each["target"]) for each in read_lines(leg.layout.attempt(3).points(1))]
    targets = [target for phase, target in seen if phase == "checkpoint.fsync.before"]
    assert targets == [target for phase, target in seen if phase == "checkpoint.fsync.after"]
    files = ["chaosrun-rank-0.pt", "chaosrun-rank-1.pt", "model.safetensors"]
    # The directories above "storage" are synced too, but no plan can name them.
    assert targets == [*files, ".", MANIFEST_NAME, ".", "storage", "checkpoints", "staging", "checkpoints"]
    before, after = (index for index, (phase, _) in enumerate(seen) if phase.startswith("checkpoint.rename"))
    assert (seen[before][0], seen[after][0], after) == ("checkpoint.rename.before", "checkpoint.rename.after", before + 1)
    assert seen[after + 1] == ("checkpoint.fsync.before", "checkpoints")
    assert {each["step"] for each in read_lines(leg.layout.attempt(3).points(1))} == {30}


def test_a_rename_that_fails_commits_nothing(leg: Leg) -> None:
    fault = Fault(id="F1", kind="failed_rename", rank=1, phase="checkpoint.rename.before", at_step=30, source="test")
    _, disk_points = points_of(leg, fault)
    with disk_points.saving(30), pytest.raises(ResourcesError, match="Input/output error"):
        leg.save(30)
    assert leg.store.newest_valid().name == "step-00000020"
    assert leg.store.clear_staging() == ["step-00000030.attempt-3"]
    leg.save(30)
    assert leg.store.newest_valid().name == "step-00000030"


@pytest.mark.parametrize(("occurrence", "entries"), [(1, 0), (2, 1)])
def test_the_second_fsync_of_the_same_directory_can_be_meant(leg: Leg, occurrence: int, entries: int) -> None:
    where: dict[str, Any] = {"phase": "checkpoint.fsync.before", "target": ".", "at_step": 30, "occurrence": occurrence}
    fault = Fault(id="F1", kind="io_error", rank=1, source="test", **where)
    _, disk_points = points_of(leg, fault)
    with disk_points.saving(30), pytest.raises(ResourcesError):
        leg.save(30)
    staged = os.listdir(leg.layout.staging / "step-00000030.attempt-3")
    assert staged.count(MANIFEST_NAME) == entries


def test_slow_storage_waits_at_each_fsync_of_one_checkpoint(leg: Leg) -> None:
    with ExitStack() as until_saved:
        storage.slow_storage(leg.strike("slow_storage", {"disk": leg.disk, "until_saved": until_saved}, duration_s=0.001))
        assert leg.note("slow_storage").final is False
        assert leg.note("slow_storage").problem == "nothing was synced meanwhile"
        leg.save(30)
    note = leg.note("slow_storage")
    assert note.final is True and note.problem is None
    assert note.waits >= len(FILES) + 4
    assert note.waited_s >= 0.001 * note.waits
    leg.save(40)
    assert leg.disk.listeners == [] and leg.note("slow_storage").waits == note.waits


@pytest.fixture
def remote(tmp_path: Path) -> Leg:
    return Leg(tmp_path / "run" / "chaos", ObjectPlace(f"file://{tmp_path}/bucket"))


@contextmanager
def struck(remote: Leg, kind: str, **options: Any) -> Iterator[None]:
    """The object store, until a checkpoint is saved."""
    with ExitStack() as until_saved:
        strike(remote.strike(kind, {"objects": remote.store.objects, "until_saved": until_saved}, **options))
        yield


def test_a_lost_reply_is_withheld_once_and_the_checkpoint_is_saved(remote: Leg) -> None:
    with struck(remote, "lost_reply"):
        assert remote.note("lost_reply").problem == "no request was made to the store"
        remote.save(30)
        # Whatever ends the rank before the save is over: this was shown already.
        assert (remote.note("lost_reply").final, remote.note("lost_reply").accepted) == (True, 1)
        remote.save(40)
    note = remote.note("lost_reply")
    assert (note.final, note.problem, note.requests) == (True, None, 1) and note.accepted
    assert remote.store.newest_valid().name == "step-00000040"
    assert KINDS["lost_reply"].shows(seen_of(note)) is None  # type: ignore[misc]


def test_a_reply_that_nobody_asked_after_is_not_shown(remote: Leg) -> None:
    found = KINDS["lost_reply"].shows(seen_of(RequestNote(requests=1)))  # type: ignore[misc]
    assert found is not None and found.code == "not_accepted"


def test_a_late_listing_keeps_one_too_many_and_loses_none(remote: Leg, tmp_path: Path) -> None:
    remote.save(30)
    with struck(remote, "late_listing"):
        assert remote.note("late_listing").problem == "the checkpoint was never saved"
        remote.save(40)
        assert remote.store.retain() == ["step-00000010"], "of its own folder, where nothing is late"
    note = remote.note("late_listing")
    assert (note.final, note.problem, note.requests, note.accepted) == (True, None, 1, 1)
    assert KINDS["late_listing"].shows(seen_of(note)) is None  # type: ignore[misc]
    manifests = tmp_path / "bucket/checkpoints"
    assert sorted(path.name[:13] for path in manifests.iterdir()) == [f"step-000000{step}" for step in (10, 20, 30, 40)]
    remote.store.retain()
    assert sorted(path.name[:13] for path in manifests.iterdir()) == [f"step-000000{step}" for step in (20, 30, 40)]


def test_a_listing_in_which_nothing_was_late_is_not_shown(remote: Leg) -> None:
    with struck(remote, "late_listing"):
        remote.store.retain()
    assert remote.note("late_listing").problem == "no listing had a new object to leave out"
    found = KINDS["late_listing"].shows(seen_of(RequestNote(requests=1)))  # type: ignore[misc]
    assert found is not None, "what it left out is gone: that is a loss, and no late listing"


def test_a_throttled_store_refuses_for_a_while(remote: Leg) -> None:
    with struck(remote, "throttled_store", duration_s=0.3):
        remote.save(30)
    note = remote.note("throttled_store")
    assert note.problem is None and note.requests in (1, 2) and note.accepted == 1
    assert remote.store.newest_valid().name == "step-00000030"


def test_a_store_that_is_throttled_for_too_long_is_told(remote: Leg, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("chaosrun.checkpoint.object_storage.WAITS_S", (0.01,))
    with struck(remote, "throttled_store", duration_s=30.0), pytest.raises(ResourcesError, match="reduce your request rate"):
        remote.save(30)
    assert KINDS["throttled_store"].shows(seen_of(remote.note("throttled_store"))) is not None  # type: ignore[misc]
    assert remote.store.newest_valid().name == "step-00000020"


def test_a_put_that_fails_half_way_is_no_checkpoint(remote: Leg, tmp_path: Path) -> None:
    storage.failed_put(remote.strike("failed_put", {"objects": remote.store.objects}))
    with pytest.raises(ResourcesError, match="Input/output error") as error:
        remote.save(30)
    assert isinstance(error.value.__cause__, OSError) and error.value.__cause__.errno == errno.EIO
    (half,) = (tmp_path / "bucket/data/step-00000030.attempt-3").iterdir()
    assert 0 < half.stat().st_size == len(FILES[half.name]) // 2
    remote.store.clear_staging()
    assert not half.exists()
    assert remote.store.newest_valid().name == "step-00000020"


def seen_of(note: RequestNote) -> Any:
    return SimpleNamespace(note=note)


def test_temporary_files_have_the_name_of_what_they_become() -> None:
    assert written_for(Path("/a/.MANIFEST.json.123.tmp")) == Path("/a/MANIFEST.json")
    assert written_for(Path("/a/.hidden")) == Path("/a/.hidden")


SEEN = event("fault.observed", how="note", found={"checkpoint": "step-00000020", "staged": "step-00000020.attempt-0"})


def aftermath(kind: str, leg: LegHistory) -> Disproof | None:
    fault = Fault(id="F1", kind=kind, rank=0, at_step=20, source="test")
    judge = fault.facts.aftermath
    assert judge is not None
    return judge(Observation.of(fault, SEEN), event("fault.requested", step=20, seq=11), leg)


def attempt(number: int, resume: int, *quarantined: str) -> Attempt:
    nothing: dict[str, Any] = {"pids": {}, "exits": (), "unplanned": (), "stopped": None, "traces": {}}
    name = f"step-{resume:08}" if resume else None
    return Attempt(number=number, resume=name, resume_step=resume, quarantined=quarantined, **nothing)


def history(*attempts: Attempt, records: tuple[Any, ...] = ()) -> LegHistory:
    starts = tuple(event("attempt.starting", attempt=each.number, seq=10 * each.number) for each in attempts)
    asked = (event("fault.requested", step=20, seq=11),)
    return LegHistory(name="chaos", layout=LegLayout(Path("/run")), journal=(*starts, *asked, *records), attempts=attempts)


@pytest.mark.parametrize("kind", REASONS)
def test_a_damage_counts_once_a_later_start_has_met_it(kind: str) -> None:
    first = attempt(1, 0)
    assert aftermath(kind, history(first, attempt(2, 10, "step-00000020"))) is None
    met_late = history(first, attempt(2, 30), attempt(3, 10, "step-00000030", "step-00000020"))
    assert aftermath(kind, met_late) is None


@pytest.mark.parametrize(
    ("later", "told"),
    [
        ((), "no attempt started after that"),
        ((attempt(2, 30),), "resumed from newer checkpoints"),
        ((attempt(2, 20),), "an attempt resumed from it"),
        ((attempt(2, 10, "step-00000030"),), "resumed from newer checkpoints"),
    ],
)
def test_a_damage_that_nobody_met_proves_nothing(later: tuple[Attempt, ...], told: str) -> None:
    problem = aftermath("truncate", history(attempt(1, 0, "step-00000020"), *later))
    assert problem is not None and told in problem.words


def test_a_folder_left_behind_has_to_be_cleared_away() -> None:
    both = (attempt(1, 0), attempt(2, 10))

    def cleared(seq: int, *names: str) -> tuple[Any, ...]:
        return (event("staging.cleared", names=names, seq=seq),)

    found = history(*both, records=cleared(15, "step-00000020.attempt-0"))
    assert aftermath("stale_staging", found) is None
    for records in ((), cleared(15, "step-00000030.attempt-1"), cleared(5, "step-00000020.attempt-0")):
        problem = aftermath("stale_staging", history(*both, records=records))
        assert problem is not None and "it was not there at the next start" in problem.words
    problem = aftermath("stale_staging", history(attempt(1, 0)))
    assert problem is not None and "no attempt came after it" in problem.words


def test_a_commit_that_failed_left_no_checkpoint() -> None:
    assert aftermath("failed_rename", history(attempt(1, 0), attempt(2, 10))) is None
    problem = aftermath("failed_rename", history(attempt(1, 0), attempt(2, 20)))
    assert problem == ("committed", "the checkpoint of step 20 was committed all the same")
