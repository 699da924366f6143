"""What the check of shared storage says of good and of bad facts."""

from typing import Any

import pytest

from chaosrun.preflight.checks.shared_storage import CHECK as SHARED_STORAGE
from chaosrun.preflight.checks.shared_storage import Meet, judge
from chaosrun.preflight.model import Finding, Status
from chaosrun.preflight.probes.shared_storage import SharedFacts
from chaosrun.spec.source import Job
from tests.preflight_answers import Answering, job_of, nodes_of, told
from tests.unit.test_preflight_storage import MOUNT, setting_of

Changes = dict[str, Any]
SEEN = "files of one seen by the other"


def facts_of(peer: int, **changes: Any) -> Changes:
    """Of a node that shares with two others, but for what is given; None: it did not come so far."""
    found: Changes = {
        "mount": MOUNT,
        "meeting": {"met": [0, 1, 2], "arrived_s": 100.0, "left_s": 103.0},
        "ring": {"peer": peer, "there_and_back_s": [0.002, 0.004], "torn": [], "answered": True, "waited_s": 0.0},
    }
    steps = {step: None if changes.get(step, {}) is None else {**good, **changes.get(step, {})} for step, good in found.items()}
    return {
        **steps,
        "gathered_s": changes.get("gathered_s", 0.0),
        "stopped": changes.get("stopped", ""),
        "patience_s": 8.0,
        "limit_s": 20.0,
    }


def meet_of(unanswered: Changes | None = None, **changes: Changes) -> Meet:
    """Nodes a, b and c that share a storage, but for what is given."""
    names = ["a", "b", "c"]
    answered = {name: facts_of((number + 1) % 3, **changes.get(name, {})) for number, name in enumerate(names)}
    asked = {name: facts for name, facts in answered.items() if name not in (unanswered or {})}
    return Meet(names, told(SharedFacts, asked, unanswered))


APART: Changes = {"gathered_s": None, "ring": None}


def shared_rows(meet: Meet, job: Job | None = None) -> list[Finding]:
    return judge(setting_of(job), nodes_of("a", "b", "c"), meet)


def odd(meet: Meet, job: Job | None = None) -> list[Finding]:
    return [row for row in shared_rows(meet, job) if row.status is not Status.PASS]


def test_a_shared_storage_passes() -> None:
    findings = shared_rows(meet_of(), job_of(3))
    assert {row.status for row in findings} == {Status.PASS} and len(findings) == 6
    assert "p50 1 ms, p99 2 ms" in findings[3].measured


def apart(mount: Changes | None = None, c_mount: Changes | None = None, **meeting: Any) -> Meet:
    """Of a and b that share one, and c that has its own."""
    met = {"mount": mount or {}, "meeting": {"met": [0, 1]}}
    return meet_of(
        a={**met, "ring": {"peer": 1}},
        b={**met, "ring": {"peer": 0}},
        c={"mount": {**(mount or {}), **(c_mount or {})}, "meeting": {"met": [2], **meeting}, **APART},
    )


@pytest.mark.parametrize("workers", [5, 2, None])
def test_a_node_outside_of_what_the_others_share_fails(workers: int | None) -> None:
    (row,) = odd(apart(), None if workers is None else job_of(workers))
    assert (row.node, row.status) == ("c", Status.FAIL)
    assert row.measured == "not shared: a, b not seen within 3 s, at /data (ext4 of /dev/sda)"


@pytest.mark.parametrize(
    ("c_mount", "left_s", "status"),
    [
        ({}, 103.0, Status.WARN),
        ({}, 165.0, Status.FAIL),  # no client keeps what it knows for so long
        ({"source": "server:/y"}, 103.0, Status.FAIL),
        ({"base": "/", "source": "/dev/sda"}, 103.0, Status.FAIL),
    ],
)
def test_of_a_server_that_all_have_mounted_a_file_may_come_late(c_mount: Changes, left_s: float, status: Status) -> None:
    (row,) = odd(apart({"type": "nfs4", "source": "server:/x"}, c_mount, left_s=left_s), job_of(5))
    assert (row.node, row.status) == ("c", status)


def test_of_two_groups_of_one_size_both_are_named() -> None:
    met = {"a": [0, 1], "b": [0, 1], "c": [2, 3], "d": [2, 3]}
    answered = {name: facts_of(0, meeting={"met": met[name]}) for name in met}
    meet = Meet([*met], told(SharedFacts, answered))
    same = [row for row in judge(setting_of(), nodes_of(*met), meet) if row.name == "same storage"]
    assert [(row.node, row.status) for row in same] == [(name, Status.FAIL) for name in met]
    assert "c, d not seen" in same[0].measured and "shared with b" in same[0].measured


def test_who_came_when_the_others_had_gone_is_not_judged() -> None:
    (late,) = [row for row in shared_rows(apart(arrived_s=102.9, left_s=106.0), job_of(5)) if row.node == "c"]
    assert late.status is Status.ERROR and late.remedy


def test_who_came_late_and_saw_the_others_is_seen_from_there() -> None:
    meet = meet_of(a={"meeting": {"met": [0]}, **APART}, b={"meeting": {"met": [0, 1], "arrived_s": 102.9}, **APART})
    meet = Meet(["a", "b"], told(SharedFacts, {name: facts for name, facts in meet.told.answered.items() if name != "c"}))
    assert {(row.name, row.node, row.status) for row in shared_rows(meet, job_of(5))} == {
        ("same storage", "a", Status.WARN),
        ("same storage", "b", Status.PASS),
        (SEEN, "a", Status.SKIP),
        (SEEN, "b", Status.SKIP),
    }


def test_nobody_shares_anything() -> None:
    meet = meet_of(**{name: {"meeting": {"met": [number]}, **APART} for number, name in enumerate("abc")})
    assert [(row.node, row.status) for row in shared_rows(meet, job_of(5))] == [(name, Status.FAIL) for name in "abc"]


def nothing_came(waited_s: float) -> Changes:
    return {"b": {"ring": {"there_and_back_s": [], "answered": False, "waited_s": waited_s}}}


@pytest.mark.parametrize(
    ("name", "node", "status", "words", "changes"),
    [
        ("same storage", "a", Status.WARN, "though seen from there", {"a": {"meeting": {"met": [0, 1]}}}),
        (SEEN, "b", Status.FAIL, "seen in part", {"b": {"ring": {"torn": [[2, "ask-1: 0 bytes"]]}}}),
        (SEEN, "b", Status.WARN, "p99 2 s", {"b": {"ring": {"there_and_back_s": [0.1, 4.0]}}}),
        (SEEN, "b", Status.WARN, "nothing came back from c within 3 s", nothing_came(3.0)),
        (SEEN, "b", Status.FAIL, "nothing came back from c within 1 min 5 s", nothing_came(65.0)),
        (SEEN, "b", Status.WARN, "were not seen within 3 s", {"b": {"gathered_s": 3.0, "ring": None}}),
    ],
)
def test_what_nodes_see_of_each_other(name: str, node: str | None, status: Status, words: str, changes: Changes) -> None:
    (row,) = odd(meet_of(**changes), job_of(5))
    assert (row.name, row.node, row.status) == (name, node, status) and words in row.measured, row


def test_nodes_that_did_not_come_so_far() -> None:
    meet = meet_of(
        {"c": {"ended": "lost", "error": "it is gone", "limit_s": 20.0}},
        a={"meeting": {"met": [0]}},
        b={"stopped": "hung", "meeting": None, **APART},
    )
    findings = shared_rows(meet, job_of(5))
    assert {(row.node, row.status) for row in findings} == {("c", Status.ERROR), ("b", Status.FAIL), ("a", Status.SKIP)}
    assert all(row.remedy for row in findings if row.status is Status.ERROR)


def test_a_node_alone_is_asked_nothing() -> None:
    class Alone(Answering):
        nodes = nodes_of("a")

    assert SHARED_STORAGE.gather is not None
    (finding,) = judge(setting_of(), Alone.nodes, SHARED_STORAGE.gather(setting_of(), Alone()))
    assert finding.status is Status.SKIP
