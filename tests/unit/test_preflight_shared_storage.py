"""What the check of shared storage says of good and of bad facts."""

from collections.abc import Mapping
from typing import Any

import pytest

from chaosrun.preflight.checks.shared_storage import CHECK as SHARED_STORAGE
from chaosrun.preflight.checks.shared_storage import PATIENT_S, Shared, Written, judge
from chaosrun.preflight.model import Finding, Level, Status
from chaosrun.preflight.probes.seen import SeenFiles
from chaosrun.spec.job_file import Job
from tests.preflight_answers import Answering, job_of, nodes_of, told
from tests.unit.test_preflight_storage import MOUNT, setting_of

Changes = dict[str, Any]


def path(name: str) -> str:
    return f"/data/{name}/here"


def shared_of(sees: Mapping[str, str], silent: Changes | None = None, **changes: Changes) -> Shared:
    """`sees`: the names of the nodes that each saw, itself among them; `changes`: of its mount, of what it saw."""
    written: Changes = {}
    looked: Changes = {}
    for name, others in sees.items():
        own = dict(changes.get(name, {}))
        written[name] = {"mount": {**MOUNT, **own.pop("mount", {})}} if "failed" not in own else own
        after_s = {path(other): 0.1 for other in others}
        missing = {path(other): "/data: No such file or directory" for other in sees if other not in others}
        looked[name] = {"after_s": {**after_s, **own.pop("after_s", {})}, "missing": missing, **own}
    for name in [name for name in sees if "failed" in written[name] or name in (silent or {})]:
        del looked[name]
    return Shared(
        files={name: f"{name}/here" for name in sees}, written=told(Written, written), looked=told(SeenFiles, looked, silent)
    )


def rows(shared: Shared, job: Job | None = None, level: Level = Level.QUICK) -> list[Finding]:
    return judge(setting_of(job, level=level), nodes_of(*shared.files), shared)


def odd(shared: Shared, job: Job | None = None, level: Level = Level.QUICK) -> list[Finding]:
    return [row for row in rows(shared, job, level) if row.status is not Status.PASS]


ALL = {"a": "abc", "b": "abc", "c": "abc"}
APART = {"a": "ab", "b": "ab", "c": "c"}


def test_a_shared_storage_passes() -> None:
    findings = rows(shared_of(ALL), job_of(3))
    assert [(row.node, row.status) for row in findings] == [(name, Status.PASS) for name in "abc"]
    assert findings[0].measured == "sees 2 other nodes, the last after 100 ms"


@pytest.mark.parametrize("workers", [5, 2, None])
def test_a_node_outside_of_what_the_others_share_fails(workers: int | None) -> None:
    (row,) = odd(shared_of(APART), None if workers is None else job_of(workers))
    assert (row.node, row.status) == ("c", Status.FAIL)
    assert row.measured == "not shared: a, b not seen within 3 s, at /data (ext4 of /dev/sda)"


@pytest.mark.parametrize(
    ("mount", "level", "status"),
    [
        ({}, Level.QUICK, Status.WARN),
        ({}, Level.DEEP, Status.FAIL),  # no client keeps what it knows for so long
        ({"source": "server:/y"}, Level.QUICK, Status.FAIL),
        ({"source": "/dev/sda"}, Level.QUICK, Status.FAIL),
    ],
)
def test_of_a_server_that_all_have_mounted_a_file_may_come_late(mount: Changes, level: Level, status: Status) -> None:
    served = {"type": "nfs4", "source": "server:/x"}
    shared = shared_of(APART, a={"mount": served}, b={"mount": served}, c={"mount": {**served, **mount}})
    (row,) = odd(shared, job_of(5), level)
    assert (row.node, row.status) == ("c", status)
    assert PATIENT_S == 60.0


def test_of_two_groups_of_one_size_both_are_named() -> None:
    shared = shared_of({"a": "ab", "b": "ab", "c": "cd", "d": "cd"})
    found = rows(shared)
    assert [(row.node, row.status) for row in found] == [(name, Status.FAIL) for name in "abcd"]
    assert "c, d not seen" in found[0].measured and "shared with b" in found[0].measured


def test_nobody_shares_anything() -> None:
    findings = rows(shared_of({"a": "a", "b": "b", "c": "c"}), job_of(5))
    assert [(row.node, row.status) for row in findings] == [(name, Status.FAIL) for name in "abc"]


@pytest.mark.parametrize(
    ("sees", "name", "status", "words", "changes"),
    [
        ({**ALL, "a": "ab"}, "same storage", Status.WARN, "c not seen within 3 s", {}),
        (ALL, "whole files", Status.FAIL, "seen in part: 0 bytes", {"torn": {path("c"): "0 bytes"}}),
        (ALL, "same storage", Status.WARN, "the last after 2 s", {"after_s": {path("b"): 2.0}}),
    ],
)
def test_what_nodes_see_of_each_other(sees: Changes, name: str, status: Status, words: str, changes: Changes) -> None:
    (row,) = odd(shared_of(sees, a=changes), job_of(5))
    assert (row.name, row.node, row.status) == (name, "a", status) and words in row.measured, row


def test_nodes_that_did_not_come_so_far() -> None:
    silent = {"b": {"ended": "limit", "error": "no answer within 33 s"}, "c": {"ended": "lost", "error": "it is gone"}}
    findings = rows(shared_of({**ALL, "a": "a"}, silent), job_of(5))
    assert {(row.node, row.status) for row in findings} == {("c", Status.ERROR), ("b", Status.FAIL), ("a", Status.SKIP)}
    full = shared_of(ALL, c={"failed": {"error": "No space left on device", "remedy": "make room"}})
    assert [(row.node, row.status, row.remedy) for row in odd(full)] == [("c", Status.FAIL, "make room")]


def test_a_node_alone_is_asked_nothing() -> None:
    class Alone(Answering):
        nodes = nodes_of("a")

    assert SHARED_STORAGE.gather is not None
    (finding,) = judge(setting_of(), Alone.nodes, SHARED_STORAGE.gather(setting_of(), Alone()))
    assert finding.status is Status.SKIP
