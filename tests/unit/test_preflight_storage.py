"""What the check of storage says of good and of bad facts; what a probe reads of mounts and of earlier runs."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from chaosrun.checkpoint.object_storage import ObjectStorage
from chaosrun.preflight.checks.storage import CHECK, ROOM, SAVE, call
from chaosrun.preflight.earlier_run import Costs, EarlierRun
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.preflight.peers import against_peers
from chaosrun.preflight.probes.storage import try_objects
from chaosrun.spec.job_file import Job
from tests.preflight_answers import job_of, judged, nodes_of

MIB, GIB = 1 << 20, 1 << 30
MOUNT = {"base": "/data", "type": "ext4", "source": "/dev/sda", "options": "rw", "free_bytes": 100 * GIB}
WRITTEN = {"bytes": 64 * MIB, "write_s": 0.5, "fsync_s": 0.2}
READ = {"read_bytes": 64 * MIB, "read_s": 0.1, "changed": 0}
GOOD: Mapping[str, Any] = {"mount": MOUNT, "saves": {"kills": 8, "saves": 30, "wrong": []}, "speed": {**WRITTEN, **READ}}
LAST, LONGER = (EarlierRun(run="probe-1", costs=Costs(step_s=1.0, save_s=save), bytes=4 * GIB) for save in (30.0, 40.0))


def setting_of(job: Job | None = None, *, last_run: EarlierRun | None = None, level: Level = Level.QUICK) -> Setting:
    return Setting(level=level, root=Path("/data"), storage=Path("/data"), job=job, last_run=last_run)


def facts_of(*, failed: str = "", **found: Any) -> dict[str, Any]:
    """Good facts, but for what is given: changes of a step's facts, and the step that failed, after which nothing was done."""
    steps = {name: {**good, **found.get(name, {})} for name, good in GOOD.items()}
    if not failed:
        return steps
    done = {name: steps[name] for name in list(steps)[: list(steps).index(failed)]}
    return {**done, "failed": {"error": "/data: it failed", "remedy": "mend it"}}


def rows_of(facts: dict[str, Any], setting: Setting | None = None) -> dict[str, Finding]:
    findings = judged(CHECK, setting or setting_of(), nodes_of("a"), {"a": facts})
    return {finding.name: finding for finding in findings}


def test_good_facts_pass() -> None:
    rows = rows_of(facts_of(), setting_of(job_of(checkpoint={"every_steps": 1000}), last_run=LAST))
    assert {row.status for row in rows.values()} == {Status.PASS}
    assert all(row.node == "a" and row.device == "/data" for row in rows.values())
    assert "cannot be seen from here" in rows["saves"].reason, "a PASS says no more than it can"
    assert "cannot be seen from here" in rows["fsync"].reason


@pytest.mark.parametrize(
    ("row", "status", "words", "changes"),
    [
        ("file system", Status.WARN, "tmpfs", {"mount": {"type": "tmpfs"}}),
        ("fsync", Status.SKIP, "in memory", {"mount": {"type": "tmpfs"}}),
        ("file system", Status.WARN, "with the container", {"mount": {"type": "overlay"}}),
        ("file system", Status.WARN, "nobarrier", {"mount": {"options": "rw,nobarrier"}}),
        ("file system", Status.PASS, "nfs4 of server:/x", {"mount": {"type": "nfs4", "source": "server:/x"}}),
        ("saves", Status.FAIL, "latest: torn (and 2 more)", {"saves": {"wrong": ["latest: torn", "b", "c"]}}),
        ("saves", Status.FAIL, "/data: it failed", {"failed": "saves"}),
        ("fsync", Status.FAIL, "not what was written", {"speed": {"changed": MIB}}),
        ("fsync", Status.WARN, "2 µs", {"speed": {"fsync_s": 2e-6}}),
        ("fsync", Status.PASS, "2 µs", {"speed": {"fsync_s": 2e-6}, "mount": {"options": "rw,sync"}}),
        ("read speed", Status.SKIP, "past the kernel", {"speed": {"read_bytes": 0, "read_s": 0.0}}),
        ("write speed", Status.FAIL, "it failed", {"failed": "speed"}),
    ],
)
def test_a_fact_and_its_finding(row: str, status: Status, words: str, changes: dict[str, Any]) -> None:
    finding = rows_of(facts_of(**changes))[row]
    assert finding.status is status and words in f"{finding.measured} {finding.reason}", finding


def test_what_was_not_tried_is_never_a_pass() -> None:
    full = {name: row.status for name, row in rows_of(facts_of(failed="saves")).items() if name not in (SAVE, ROOM)}
    assert full == {"file system": Status.PASS, "saves": Status.FAIL}
    silent = {"a": {"ended": "limit", "error": "no answer within 45 s: it was at: saves"}}
    (hung,) = judged(CHECK, setting_of(), nodes_of("a"), {}, silent)
    assert hung.status is Status.FAIL and hung.measured.endswith("saves") and hung.remedy
    # Of a process that died the engine says it; the storage is not to blame.
    assert not judged(CHECK, setting_of(), nodes_of("a"), {}, {"a": {"error": "killed"}})


def test_a_node_whose_disk_is_far_slower_than_its_peers() -> None:
    def slow(level: Level, **speed: Any) -> Status:
        answered = {"a": facts_of(), "b": facts_of(), "c": facts_of(speed={"write_s": 50.0, **speed})}
        findings = judged(CHECK, setting_of(level=level), nodes_of(*answered), answered)
        (odd,) = [row for row in against_peers(findings, nodes_of(*answered)) if row.status in (Status.WARN, Status.FAIL)]
        assert (odd.node, odd.name) == ("c", "write speed")
        return odd.status

    assert slow(Level.STANDARD) is Status.FAIL
    assert slow(Level.QUICK) is slow(Level.STANDARD, bytes=16 * MIB) is Status.WARN, "what little was written says little"


@pytest.mark.parametrize(
    ("status", "words", "job", "last"),
    [
        (Status.WARN, "32 s to write 4 GiB: 64% of the interval of 50 s", {}, LAST),
        (Status.WARN, "40 s as in probe-1, 32 s to write 4 GiB: 80% of the interval", {}, LONGER),
        (Status.PASS, "3% of the interval", {"checkpoint": {"every_steps": 1000}}, LAST),
        (Status.PASS, "32 s to write 4 GiB", {}, EarlierRun(run="probe-1", bytes=4 * GIB)),
        (Status.PASS, "156% of the interval", {}, EarlierRun(run="probe-1", costs=Costs(step_s=0.01), bytes=100 * MIB)),
        (Status.FAIL, "32 s to write 4 GiB", {"recovery": {"hang_timeout": 20.0}}, LAST),
    ],
)
def test_a_save_beside_the_interval(status: Status, words: str, job: dict[str, Any], last: EarlierRun) -> None:
    save = rows_of(facts_of(), setting_of(job_of(**job), last_run=last))[SAVE]
    assert save.status is status and words in save.measured, save
    assert save.threshold.startswith("at most ")


def test_a_small_sample_is_not_enough_to_fail_a_save() -> None:
    setting = setting_of(job_of(recovery={"hang_timeout": 20.0}), last_run=LAST)
    save = rows_of(facts_of(speed={"bytes": MIB, "write_s": 0.3}), setting)[SAVE]
    assert save.status is Status.WARN and "only 1 MiB were written" in save.reason


def test_room_for_what_is_kept_and_two_more() -> None:
    setting = setting_of(job_of(checkpoint={"keep": 3}), last_run=LAST)
    enough, short = (rows_of(facts_of(mount={"free_bytes": free}), setting)[ROOM] for free in (20 * GIB, 20 * GIB - 1))
    assert enough.status is Status.PASS and short.status is Status.FAIL
    assert short.threshold.startswith("at least 20 GiB: 3 that are kept and 2 more")


def test_without_an_earlier_run_nothing_is_guessed() -> None:
    gone = EarlierRun(run="probe-1")
    for setting in (setting_of(), setting_of(job_of()), setting_of(job_of(), last_run=gone)):
        rows = rows_of(facts_of(), setting)
        assert rows[SAVE].status is rows[ROOM].status is Status.SKIP


def test_a_storage_that_the_job_names_and_that_is_not_on_every_node() -> None:
    answered = {"a": facts_of(), "b": facts_of(), "c": facts_of(mount={"base": "/"})}

    def statuses(job: Job | None) -> list[Status]:
        findings = judged(CHECK, setting_of(job), nodes_of(*answered), answered)
        return [row.status for row in findings if row.name == "file system"]

    assert statuses(job_of(checkpoint={"storage": "/data"})) == [Status.PASS, Status.PASS, Status.FAIL]
    # What nobody named is made where a run wants it.
    assert statuses(job_of()) == statuses(None) == [Status.PASS] * 3


STORE = "s3://bucket/prefix"


def store_row(objects: dict[str, Any]) -> Finding:
    facts = {**facts_of(), "objects": objects}
    return rows_of(facts, setting_of(job_of(checkpoint={"storage": f"{STORE}/"}, env={"AWS_PROFILE": "team"})))["object store"]


def test_a_job_s_object_store_is_asked_for_with_the_job_s_settings() -> None:
    asked = call(setting_of(job_of(checkpoint={"storage": f"{STORE}/"}, env={"AWS_PROFILE": "team"})), nodes_of("a")[0])
    assert asked.parameters["objects"] == STORE and asked.env == {"AWS_PROFILE": "team"}
    assert call(setting_of(), nodes_of("a")[0]).parameters["objects"] == ""
    assert "object store" not in rows_of(facts_of())


@pytest.mark.parametrize(
    ("objects", "status", "words"),
    [
        ({"took_s": 0.25}, Status.PASS, "not overwritten in 250 ms"),
        ({"took_s": 0.25, "late": True}, Status.WARN, "did not show an object"),
        ({"failed": {"error": "it does not keep its word", "remedy": "another"}}, Status.FAIL, "does not keep its word"),
    ],
)
def test_what_is_said_of_an_object_store(objects: dict[str, Any], status: Status, words: str) -> None:
    row = store_row(objects)
    assert (row.status, row.device) == (status, STORE) and words in str(row.measured)


def test_the_probe_sees_a_store_that_keeps_its_word_and_ones_that_do_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"file://{tmp_path}/bucket"
    found = try_objects(url)
    assert found.failed is None and not found.late
    assert [path for path in (tmp_path / "bucket").rglob("*") if path.is_file()] == []
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "listed", lambda self, prefix: [])
        assert try_objects(url).late
    with monkeypatch.context() as patched:
        patched.setattr(ObjectStorage, "_create", lambda self, key, data: self.fs.pipe_file(self._path(key), data))
        failed = try_objects(url).failed
    assert failed is not None and "ignores conditional puts" in failed.error
    (tmp_path / "file").write_bytes(b"")
    failed = try_objects(f"file://{tmp_path}/file/below").failed
    assert failed is not None and "Not a directory" in failed.error
