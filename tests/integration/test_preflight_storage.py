"""The checks of storage with real processes on real file systems, and with storages that break one promise each.

A layer below `faulty/` lies under the probes of one node only, as a bad mount would.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.probe_guard import PREFIX
from chaosrun.cluster.probing import Call, ProbeOutcome
from chaosrun.preflight.checks import shared_storage
from chaosrun.preflight.checks.shared_storage import CHECK as SHARED_STORAGE
from chaosrun.preflight.checks.storage import CHECK as STORAGE
from chaosrun.preflight.earlier_run import Costs, EarlierRun
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.spec.job_file import Job
from tests.integration.ranks import eventually
from tests.local_pool import LocalPool
from tests.preflight_answers import Answering, job_of, judged

FAULTY = Path(__file__).parent / "faulty"
OLD, YOUNG = f"{PREFIX}old", f"{PREFIX}young"
PATIENT_S = 120.0
"""However busy this machine is, a sound storage has the time that it needs."""
LAYERS = ("loses_renamed", "fsync_does_nothing", "copies", "full")


def layer(name: str, **env: str) -> dict[str, str]:
    return {"PYTHONPATH": str(FAULTY / f"storage_{name}"), **env}


def setting_of(storage: Path, job: Job | None = None) -> Setting:
    return Setting(level=Level.QUICK, root=storage.parent, storage=storage, job=job)


class Asking(Answering):
    """A pool that is asked with other parameters."""

    def __init__(self, pool: LocalPool, **changes: Any) -> None:
        self._crew, self._changes = pool, changes
        self.nodes = pool.nodes

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        changed = {
            name: replace(call, parameters={**call.parameters, **self._changes}, limit_s=PATIENT_S)
            for name, call in calls.items()
        }
        return self._crew.probe(changed)


def found_on(pool: LocalPool | Asking, setting: Setting) -> list[Finding]:
    assert STORAGE.call is not None
    outcomes = pool.probe({node.name: STORAGE.call(setting, node) for node in pool.nodes})
    assert not [outcome.error for outcome in outcomes.values() if outcome.error]
    answered = {name: outcome.facts for name, outcome in outcomes.items()}
    return judged(STORAGE, setting, pool.nodes, answered)


def shared_on(pool: LocalPool | Asking, setting: Setting) -> list[Finding]:
    assert SHARED_STORAGE.gather is not None
    return list(SHARED_STORAGE.judge(setting, pool.nodes, SHARED_STORAGE.gather(setting, pool)))


def by_name(findings: Sequence[Finding], node: str | None) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings if finding.node == node}


def bad(findings: Sequence[Finding]) -> list[tuple[str | None, str]]:
    return [(finding.node, finding.name) for finding in findings if finding.status in (Status.FAIL, Status.ERROR)]


def left_in(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.startswith(PREFIX)]


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It is not there yet. Beside it: what a node left when it went down, and what a preflight works in just now."""
    folder = tmp_path_factory.mktemp("storage")
    for name in (OLD, YOUNG):
        (folder / name / "latest").mkdir(parents=True)
    two_hours_ago_s = time.time() - 7200
    os.utime(folder / OLD, (two_hours_ago_s, two_hours_ago_s))
    return folder / "checkpoints"


@pytest.fixture(scope="module")
def findings(storage: Path) -> list[Finding]:
    """Of a sound node and of one with each layer, all at once."""
    return found_on(Asking(LocalPool({"sound": {}, **{name: layer(name) for name in LAYERS}})), setting_of(storage))


def test_a_sound_storage_passes_and_nothing_is_left(findings: list[Finding], storage: Path) -> None:
    rows = by_name(findings, "sound")
    assert {row.status for row in rows.values()} <= {Status.PASS, Status.SKIP, Status.WARN}
    assert rows["saves"].status is Status.PASS
    assert rows["write speed"].measure is not None and rows["write speed"].measure.number > 0
    assert f"at {storage.parent}" in rows["file system"].measured, "the folder above is tested"
    assert os.listdir(storage.parent) == [YOUNG]


@pytest.mark.parametrize(
    ("node", "row", "words"),
    [("loses_renamed", "saves", "torn"), ("copies", "saves", "torn"), ("full", "saves", "No space left on device")],
)
def test_a_broken_promise_fails_its_node(findings: list[Finding], storage: Path, node: str, row: str, words: str) -> None:
    finding = by_name(findings, node)[row]
    assert finding.status is Status.FAIL and words in finding.measured, finding
    assert finding.node == node and finding.device == str(storage) and finding.threshold and finding.remedy
    assert [name for where, name in bad(findings) if where == node] == [row]


def test_an_fsync_that_does_nothing_is_a_warning(findings: list[Finding]) -> None:
    fsync = by_name(findings, "fsync_does_nothing")["fsync"]
    assert fsync.status in (Status.WARN, Status.SKIP) and (fsync.remedy or "in memory" in fsync.reason), fsync


def guarded(
    storage: Path, env: Mapping[str, str], *, limit_s: float, **changes: Any
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The probe as a node's agent runs it."""
    assert STORAGE.call is not None
    ours, theirs = socket.socketpair()
    call = STORAGE.call(setting_of(storage), LocalPool({"a": {}}).nodes[0])
    probe = [sys.executable, "-m", "chaosrun.cluster.probing", "chaosrun.preflight.probes.storage"]
    with theirs:
        guard = subprocess.Popen(
            [sys.executable, "-m", "chaosrun.cluster.probe_guard", str(theirs.fileno()), str(limit_s), *probe],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )
    assert guard.stdin is not None
    guard.stdin.write(json.dumps({**call.parameters, **changes}).encode())
    guard.stdin.close()
    return guard, ours


def test_a_storage_that_hangs_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    pool, setting = LocalPool({"a": layer("hangs")}), setting_of(tmp_path)
    assert STORAGE.call is not None
    outcome = pool.probe({"a": replace(STORAGE.call(setting, pool.nodes[0]), limit_s=4.0)})["a"]
    silent = {"a": {"ended": outcome.ended, "error": outcome.error}}
    (hung,) = judged(STORAGE, setting, pool.nodes, {}, silent)
    assert hung.status is Status.FAIL and hung.device == str(tmp_path)
    assert hung.measured == "no answer within 4 s: it was at: saves"
    assert not left_in(tmp_path)


def test_a_probe_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    guard, ours = guarded(tmp_path, layer("hangs"), limit_s=60.0)
    eventually(lambda: left_in(tmp_path))
    with guard:
        # As when the agent goes.
        ours.close()
    assert not left_in(tmp_path)


def own_mounts() -> bool:
    """Whether this user may mount a file system where nobody else sees it."""
    env = {**os.environ, **layer("of_its_own", CHAOSRUN_TEST_STORAGE="/mnt")}
    answer = subprocess.run([sys.executable, "-c", "import sitecustomize"], env=env, capture_output=True)
    return answer.returncode == 0


mounting = pytest.mark.skipif(not own_mounts(), reason="needs root: file systems are mounted")


@mounting
def test_a_full_and_a_read_only_file_system_and_one_in_memory(tmp_path: Path) -> None:
    def mounted(options: str) -> dict[str, str]:
        return layer("of_its_own", CHAOSRUN_TEST_STORAGE=str(tmp_path), CHAOSRUN_TEST_MOUNT=options)

    pool = LocalPool({"full": mounted("size=16k"), "read-only": mounted("ro"), "memory": mounted("size=64m")})
    findings = found_on(Asking(pool), setting_of(tmp_path))
    full, read_only, memory = (by_name(findings, node.name) for node in pool.nodes)
    assert bad(findings)[-1] == ("read-only", "saves")
    no_room = [full[name].measured for node, name in bad(findings) if node == "full"]
    assert no_room and all(str(tmp_path) in told and "No space left" in told for told in no_room)
    assert "Read-only file system" in read_only["saves"].measured
    assert memory["file system"].status is Status.WARN and "restarts" in memory["file system"].reason
    assert memory["fsync"].status is Status.SKIP


def test_a_storage_too_slow_for_the_job(tmp_path: Path) -> None:
    size = 2 << 30
    last = EarlierRun(run="probe-1", costs=Costs(step_s=0.1), bytes=size)
    job = job_of(checkpoint={"every_steps": 50}, recovery={"hang_timeout": 4.0})
    setting = replace(setting_of(tmp_path / "checkpoints", job), last_run=last)
    # However slow this machine is: as much is written as it takes to be sure.
    pool = Asking(LocalPool({"slow": layer("slow")}), kills=1, speed_s=20.0, speed_bytes=64 << 20)
    save = by_name(found_on(pool, setting), "slow")["a save of the job"]
    assert save.status is Status.FAIL and "of the interval of 5 s" in save.measured and "counts as hung" in save.threshold
    assert save.node == "slow" and save.device == str(tmp_path / "checkpoints")


def test_one_stall_is_not_the_speed_of_a_storage(tmp_path: Path) -> None:
    pool = Asking(LocalPool({"a": layer("stalls", CHAOSRUN_TEST_STALL="once")}), kills=1)
    speed = by_name(found_on(pool, setting_of(tmp_path)), "a")["write speed"].measure
    # The first MiB and the stall would be less than a MiB in a second.
    assert speed is not None and speed.number > 1 << 20


@pytest.mark.nightly
def test_a_storage_that_is_slow_all_the_time_is_not_dead(tmp_path: Path) -> None:
    findings = found_on(Asking(LocalPool({"a": layer("stalls", CHAOSRUN_TEST_STALL="always")})), setting_of(tmp_path))
    assert not bad(findings)
    assert by_name(findings, "a")["saves"].status is Status.PASS


def test_nodes_that_share_a_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_storage, "LATEST_SEEN_S", PATIENT_S)
    findings = shared_on(LocalPool({"a": {}, "b": {}, "c": {}}), setting_of(tmp_path))
    assert [(row.node, row.status) for row in findings] == [(name, Status.PASS) for name in "abc"]
    assert not left_in(tmp_path)


@pytest.fixture
def short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is not seen at once will never be."""
    monkeypatch.setitem(shared_storage.WAIT_S, Level.QUICK, 0.1)


@pytest.mark.usefixtures("short_looks")
def test_who_reads_other_bytes_than_were_written_is_named(tmp_path: Path) -> None:
    findings = shared_on(LocalPool({"a": {}, "b": {}, "c": layer("reads_zeros")}), setting_of(tmp_path))
    torn = [row for row in findings if row.name == "whole files"]
    assert {(row.node, row.device, row.status) for row in torn} == {("c", name, Status.FAIL) for name in "abc"}
    assert all("seen in part" in row.measured for row in torn)


@mounting
@pytest.mark.usefixtures("short_looks")
def test_nodes_that_do_not_share_a_storage(tmp_path: Path) -> None:
    own = layer("of_its_own", CHAOSRUN_TEST_STORAGE=str(tmp_path))
    findings = shared_on(LocalPool({"a": {}, "b": {}, "c": own}), setting_of(tmp_path))
    # Its own file is gone with its mount, which each of its processes has anew.
    assert bad(findings) == [("c", "same storage")]
    apart = by_name(findings, "c")["same storage"]
    assert "not shared" in apart.measured and str(tmp_path) in apart.measured and "tmpfs" in apart.measured
    assert not left_in(tmp_path)


def test_a_node_alone_shares_nothing(tmp_path: Path) -> None:
    (finding,) = shared_on(LocalPool({"a": {}}), setting_of(tmp_path))
    assert finding.status is Status.SKIP and "two nodes" in finding.reason
