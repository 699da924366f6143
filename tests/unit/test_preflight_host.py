"""The check "host": what is missing is named with its node; a laptop, a container, a busy machine that can train never fail."""

import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from chaosrun.observe.limits import memory_room, process_room
from chaosrun.preflight.checks.host import CHECK as HOST
from chaosrun.preflight.earlier_run import EarlierRun
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.preflight.probes import host
from chaosrun.preflight.probes.host import KernelLog, kernel_log, told_by
from chaosrun.records.order import ASYNC_FROM_BYTES
from chaosrun.spec.job_file import Job
from chaosrun.wording import GIB, MIB
from tests.local_pool import LocalPool
from tests.preflight_answers import job_of, judged, node_of

FAULTY = Path(__file__).parents[1] / "integration" / "faulty"
PLACE: dict[str, Any] = {
    **{"path": "/runs", "there": "/runs", "total": 100 * GIB, "free": 50 * GIB},
    **{"read_only": False, "writable": True},
}
GOOD: dict[str, Any] = {
    "cpus": {"machine": 8, "usable": 8.0},
    "memory": {"total": 64 * GIB, "available": 60 * GIB, "limited": False},
    "places": {"storage": PLACE, "temporary files": {**PLACE, "path": "/tmp"}},
    "shared_memory": {"path": "/dev/shm", "total": 32 * GIB, "free": 32 * GIB},
    "limits": {"open_files": 65536, "process_room": 9700},
    "busy": {"cores": 0.6, "ours": 0.4, "others": 0.2, "heavy": [], "hidden": False},
    "left_over": [],
    "kernel_log": {"messages": []},
}
PROCESS = {"pid": 77, "name": "python train.py", "cores": 3.0, "created_s": 0.0}


def judge(
    changes: Mapping[str, Any], *, with_job: Job | None = None, every_node: bool = False, last_run: EarlierRun | None = None
) -> list[Finding]:
    """What is said when node b has these values, by "memory/total"-like keys."""
    nodes = [node_of(name, cpus=8) for name in "abc"]
    answered = {each.name: copy.deepcopy(GOOD) for each in nodes}
    for name in "abc" if every_node else "b":
        for place, value in changes.items():
            facts = answered[name]
            *groups, last = place.split("/")
            for group in groups:
                facts = facts[group]
            facts[last] = value
    setting = Setting(level=Level.QUICK, root=Path("/runs"), storage=Path("/runs"), job=with_job, last_run=last_run)
    return judged(HOST, setting, nodes, answered)


def bad(found: list[Finding]) -> set[tuple[str, str | None, Status]]:
    return {(row.name, row.node, row.status) for row in found if row.status not in (Status.PASS, Status.SKIP)}


def xid(code: int, age_s: float = 60.0) -> dict[str, Any]:
    text = f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1"
    return {"kind": "gpu", "device": "0000:3b:00", "code": code, "age_s": age_s, "text": text}


def disk(name: str) -> dict[str, Any]:
    return {"kind": "disk", "device": name, "code": None, "age_s": 5.0, "text": f"I/O error, dev {name}, sector 1"}


def test_sound_nodes_pass() -> None:
    found = judge({})
    assert {row.status for row in found} == {Status.PASS}


@pytest.mark.parametrize(
    ("changes", "name", "status"),
    [
        ({"cpus/usable": 1}, "CPUs", Status.FAIL),
        ({"cpus/usable": 6.0}, "CPUs", Status.WARN),
        ({"memory/available": 3 * GIB}, "memory", Status.FAIL),
        ({"memory/available": 4 * GIB}, "memory", Status.WARN),
        ({"memory/total": 2 * GIB, "memory/available": 100 * MIB}, "memory", Status.FAIL),
        ({"places/storage": {**PLACE, "free": 100 * MIB}}, "room for storage", Status.FAIL),
        ({"places/storage": {**PLACE, "free": GIB}}, "room for storage", Status.WARN),
        ({"places/storage": {**PLACE, "read_only": True}}, "room for storage", Status.FAIL),
        ({"places/storage": {**PLACE, "writable": False}}, "room for storage", Status.FAIL),
        ({"places/storage": {"path": "/x", "error": "stale file handle"}}, "room for storage", Status.ERROR),
        ({"places/temporary files": {**PLACE, "free": 100 * MIB}}, "room for temporary files", Status.WARN),
        ({"places/temporary files": {**PLACE, "free": 0}}, "room for temporary files", Status.FAIL),
        ({"shared_memory": {"path": "/dev/shm", "error": "No such file or directory"}}, "/dev/shm", Status.WARN),
        ({"shared_memory": {"path": "/dev/shm", "total": 64 * MIB, "free": 64 * MIB}}, "/dev/shm", Status.WARN),
        ({"shared_memory": {"path": "/dev/shm", "total": MIB, "free": 1000}}, "/dev/shm", Status.FAIL),
        ({"limits/open_files": 128}, "open files", Status.FAIL),
        ({"limits/open_files": 512}, "open files", Status.WARN),
        ({"limits/process_room": 20}, "processes and threads", Status.FAIL),
        ({"limits/process_room": 50}, "processes and threads", Status.WARN),
        ({"busy/others": 4.0, "busy/cores": 4.5, "busy/heavy": [PROCESS]}, "other processes", Status.WARN),
        ({"busy/cores": 6.0}, "other processes", Status.WARN),
        ({"left_over": [PROCESS]}, "left over of earlier runs", Status.WARN),
        # It may have been reset since, or be another container's: the check "devices" tells whether it works.
        ({"kernel_log/messages": [xid(79)]}, "kernel's messages of a GPU", Status.WARN),
        ({"kernel_log": {"messages": [xid(79)], "error": "there is more"}}, "kernel's messages of a GPU", Status.WARN),
        ({"kernel_log/messages": [xid(74)]}, "kernel's messages of a GPU", Status.WARN),
        ({"kernel_log/messages": [disk("sdz")]}, "kernel's messages of a disk", Status.WARN),
    ],
)
def test_what_is_wrong_is_named_with_its_node(changes: dict[str, Any], name: str, status: Status) -> None:
    found = judge(changes)
    assert bad(found) == {(name, "b", status)}


@pytest.mark.parametrize(
    "changes",
    [
        {"limits/open_files": None, "limits/process_room": None},
        {"limits/open_files": 1024},
        {"kernel_log": {"error": "/dev/kmsg: Operation not permitted"}},
        {"kernel_log/messages": [xid(13), xid(31), xid(43), xid(45)]},  # programs that were wrong, or killed
        {"kernel_log/messages": [xid(79, age_s=1e6)]},
        {"busy/cores": 1.0, "busy/others": 0.7},
    ],
)
def test_what_does_no_harm(changes: dict[str, Any]) -> None:
    assert bad(judge(changes)) == set()


def test_a_container_that_is_made_to_look_large_trains_slowly() -> None:
    assert {row[2] for row in bad(judge({"cpus/usable": 1.0}, every_node=True))} == {Status.WARN}


def test_what_cannot_be_seen_is_not_said_to_be_right() -> None:
    (hidden,) = [row for row in judge({"busy/hidden": True}) if row.status is Status.SKIP]
    assert hidden.name == "left over of earlier runs" and "hidepid" in hidden.reason
    log = {"kernel_log": {"messages": [], "error": "there is more of /dev/kmsg"}}
    (row,) = [row for row in judge(log) if row.node == "b" and row.name.startswith("kernel")]
    assert row.status is Status.SKIP and "there is more" in row.reason


@pytest.mark.parametrize(
    ("mode", "held", "status"),
    [
        ("async", 10 * GIB, Status.PASS),
        ("async", 30 * GIB, Status.WARN),
        ("auto", 30 * GIB, Status.WARN),
        ("auto", ASYNC_FROM_BYTES - 1, None),
        ("sync", 30 * GIB, None),
        ("async", None, None),
    ],
)
def test_a_copy_of_the_state_needs_memory(mode: Any, held: int | None, status: Status | None) -> None:
    its = job_of(2, per_worker={"cpu": 1, "gpu": 0}, checkpoint={"every_steps": 5, "mode": mode})
    found = judge({}, with_job=its, last_run=EarlierRun(run="probe-1", bytes=held))
    assert {row.status for row in found if row.name == "memory for a copy of the state"} == ({status} if status else set())


def test_the_need_grows_with_the_job() -> None:
    its = job_of(16, per_worker={"cpu": 1, "gpu": 0})
    enough = {"memory/available": 5 * GIB, "limits/open_files": 300, "limits/process_room": 300}
    assert {row[2] for row in bad(judge(enough)) if row[0] != "open files"} == set()
    short = {("memory", "b", Status.FAIL), ("open files", "b", Status.FAIL), ("processes and threads", "b", Status.WARN)}
    assert bad(judge(enough, with_job=its)) == short


def test_bad_nodes_are_named_by_real_probes(tmp_path: Path) -> None:
    its = job_of(1, per_worker={"gpu": 0})
    cpus = len(os.sched_getaffinity(0))
    names = ["small_shm", "full_disk", "few_files", "few_cpus"]
    pool = LocalPool({"good": {}, **{name: {"PYTHONPATH": str(FAULTY / name)} for name in names}})
    nodes = [replace(each, cpus=float(cpus)) for each in pool.nodes]
    setting = Setting(level=Level.QUICK, root=tmp_path, storage=tmp_path / "storage", job=its)
    assert HOST.call is not None
    outcomes = pool.probe({each.name: HOST.call(setting, each) for each in nodes})
    assert {name: outcome.error for name, outcome in outcomes.items() if outcome.facts is None} == {}
    answered = {name: outcome.facts for name, outcome in outcomes.items()}
    found = judged(HOST, setting, nodes, answered)
    expected = {("/dev/shm", "small_shm"), ("open files", "few_files")}
    expected |= {("room for storage", "full_disk"), ("room for temporary files", "full_disk")}
    if cpus > 1:
        expected.add(("CPUs", "few_cpus"))
    assert {(row.name, row.node) for row in found if row.status is Status.FAIL} == expected
    assert not [row for row in found if row.status is Status.ERROR]


class TestProcesses:
    @pytest.fixture
    def started(self) -> Iterator[list[subprocess.Popen[bytes]]]:
        started: list[subprocess.Popen[bytes]] = []
        yield started
        for process in started:
            for child in psutil.Process(process.pid).children():
                child.kill()
            process.kill()
            process.wait()

    def test_who_uses_the_machine_is_named(self, started: list[subprocess.Popen[bytes]]) -> None:
        spin = "while True: pass"
        below = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {spin!r}])"
        started.append(subprocess.Popen([sys.executable, "-c", spin]))
        # Of Ray itself, and what a probe has started.
        started.append(subprocess.Popen(["ray::DashboardAgent", "-c", spin], executable=sys.executable))
        started.append(subprocess.Popen([sys.executable, "-c", below, "chaosrun.preflight.probe"]))
        probe = psutil.Process(started[2].pid)
        deadline = time.monotonic() + 300
        while True:
            found = host.busy()
            if probe.children() and started[0].pid in {process.pid for process in found.heavy}:
                break
            assert time.monotonic() < deadline, found
        assert found.others >= host.LEAST_CORES
        foreign = {process.pid for process in found.heavy}
        assert not foreign & {os.getpid(), started[1].pid, probe.pid, *(child.pid for child in probe.children())}

    def test_what_has_lost_its_supervisor(
        self, started: list[subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(host, "ENDING_S", 0.0)
        env = {**os.environ, "CHAOSRUN_SESSION": "chaosrun#test"}
        sleep = "import time; time.sleep(300)"
        forsaken = subprocess.Popen([sys.executable, "-c", sleep], env=env)
        held = subprocess.Popen([sys.executable, "-c", sleep, "chaosrun.cluster.forkserver"], env=env)
        started += [forsaken, held]
        time.sleep(0.1)
        found = host.left_over()
        left = {process.pid: process for process in found}
        assert forsaken.pid in left and held.pid not in left
        assert abs(left[forsaken.pid].created_s - time.time()) < 60


class TestKernelLog:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1234, GPU has fallen off the bus.", ("gpu", "0000:3b:00", 79)),
            ("blk_update_request: I/O error, dev sda, sector 123 op 0x0:(READ)", ("disk", "sda", None)),
            ("EXT4-fs error (device nvme0n1p1): ext4_find_entry:1455: inode #2: comm ls", ("disk", "nvme0n1p1", None)),
            ("XFS (dm-0): Metadata I/O Error (0x1) detected at xfs_trans_read_buf", ("disk", "dm-0", None)),
            ("BTRFS critical (device sdb1: state EA): corrupt leaf", ("disk", "sdb1", None)),
            ("Buffer I/O error on dev sdc1, logical block 0", ("disk", "sdc1", None)),
            ("nvme nvme1: controller is down; will reset: CSTS=0xffffffff", ("disk", "nvme1", None)),
            ("nfs: server filer not responding, timed out", ("disk", "filer", None)),
            ("Out of memory: Killed process 42 (python) total-vm:1kB", ("out of memory", "python", None)),
            ("Memory cgroup out of memory: Killed process 42 (python) total-vm:1kB", ("out of memory", "python", None)),
            ("mce: [Hardware Error]: Machine check events logged", ("hardware", "", None)),
            ("EXT4-fs (vda): mounted filesystem with ordered data mode", None),
            ("hrtimer: interrupt took 42323 ns", None),
        ],
    )
    def test_records(self, text: str, expected: tuple[str, str, int | None] | None) -> None:
        told = told_by(f"3,100,2000000,-;{text}\n SUBSYSTEM=x\n", now_s=10.0)
        assert (told and (told.kind, told.device, told.code)) == expected
        assert told is None or told.age_s == 8.0

    def test_what_programs_write_there_is_not_the_kernels(self) -> None:
        assert told_by("12,100,2000000,-;NVRM: Xid (PCI:0000:3b:00): 79\n", now_s=10.0) is None

    def test_it_is_read_or_said_not_to_be(self, tmp_path: Path) -> None:
        # Packets, as the kernel gives its records.
        reading, writing = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
        try:
            records = [f"3,{number},2000000,-;NVRM: Xid (PCI:0000:3b:00): {number}, pid=1\n" for number in range(5)]
            path = f"/proc/self/fd/{reading}"
            for record in records:
                os.write(writing, record.encode())
            assert kernel_log(path, 0).error == f"there is more of {path} than could be read in 0 s"
            found = kernel_log(path)
            assert [message.code for message in found.messages] == list(range(5)) and not found.error
        finally:
            os.close(reading)
            os.close(writing)
        assert kernel_log(str(tmp_path / "none")) == KernelLog(error=f"{tmp_path}/none: No such file or directory")


def test_of_the_machine_and_the_control_group_the_smaller_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(cpu: float | None, limit: int | None, room: int | None) -> tuple[str, bool]:
        for name, value in (("cpu_limit", cpu), ("memory_limit", limit), ("memory_room", room), ("process_room", 7)):
            monkeypatch.setattr(host, name, lambda value=value: value)
        facts = host.probe(places={})
        assert facts.cpus.usable == (cpu or len(os.sched_getaffinity(0))) and facts.limits.process_room == 7
        assert facts.memory.total == (limit or psutil.virtual_memory().total)
        assert facts.memory.available <= (room or limit or 1 << 60)
        return facts.cpus.limited_by, facts.memory.limited

    monkeypatch.setattr(host, "APART_S", 0.0)
    assert seen(0.5, MIB, 1000) == ("control group", True)
    assert not seen(None, None, None)[1]


def test_room_of_control_groups(tmp_path: Path) -> None:
    membership = tmp_path / "membership"
    membership.write_text("0::/jobs/mine\n")
    stat = "anon 5\nactive_file 60\ninactive_file 30\nslab_reclaimable 10\nslab_unreclaimable 7"
    for group, files in {
        "jobs": {"memory.max": "1000", "memory.current": "400", "memory.stat": stat, "pids.max": "max"},
        "jobs/mine": {"memory.max": "max", "memory.current": "300", "pids.max": "50", "pids.current": "20"},
    }.items():
        (tmp_path / group).mkdir()
        for name, content in files.items():
            (tmp_path / group / name).write_text(content)
    assert (memory_room(tmp_path, membership), process_room(tmp_path, membership)) == (700, 30)
    membership.write_text("4:memory:/\n")
    older = "total_inactive_file 20\ntotal_active_file 30\nactive_file 9"
    (tmp_path / "memory").mkdir()
    for name, content in {"limit_in_bytes": "500", "usage_in_bytes": "450", "stat": older}.items():
        (tmp_path / "memory" / f"memory.{name}").write_text(content)
    assert (memory_room(tmp_path, membership), process_room(tmp_path, membership)) == (100, None)
