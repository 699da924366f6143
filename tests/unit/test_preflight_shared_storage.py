"""What the check of shared storage says of good and of bad facts."""

import json
from typing import Any

import pytest

from chaosrun.preflight.checks.shared_storage import CHECK as SHARED_STORAGE
from chaosrun.preflight.checks.shared_storage import judge
from chaosrun.preflight.model import Finding, Status
from chaosrun.spec.source import Job
from tests.preflight_answers import Answering
from tests.unit.test_preflight_storage import PLACE, job_of, nodes_of, setting_of


def shared_of(**changes: dict[str, Any]) -> dict[str, Any]:
    """Nodes a, b and c that share a storage, but for what is given."""
    names = ["a", "b", "c"]
    answered: dict[str, Any] = {}
    for number, name in enumerate(names):
        change = changes.get(name, {})
        found = {
            "place": PLACE,
            "meet": {"met": [0, 1, 2], "arrived_s": 100.0, "left_s": 103.0},
            "compete": {"won": [], "again": [], "names": 3, "refused": bool(number) or None},
            "ring": {
                "peer": (number + 1) % 3,
                "there_and_back_s": [0.002, 0.004],
                "torn": [],
                "answered": True,
                "waited_s": 0.0,
            },
        }
        found["compete"]["won"] = [number]
        steps = {step: {"found": {**good, **change.get(step, {})}} for step, good in found.items() if change.get(step) != {}}
        answered[name] = {"steps": steps, "hung": change.get("hung"), "slow": None, "patience_s": 8.0, "limit_s": 20.0}
    return {"names": names, "answered": answered, "unanswered": {}}


APART = {"compete": {}, "ring": {}}


def shared_rows(facts: dict[str, Any], job: Job | None = None) -> list[Finding]:
    return judge(setting_of(job), nodes_of("a", "b", "c"), facts)


def test_a_shared_storage_passes() -> None:
    findings = shared_rows(shared_of(), job_of(3))
    assert {row.status for row in findings} == {Status.PASS} and len(findings) == 8
    assert "p50 1 ms, p99 2 ms" in findings[3].measured


def apart(**changes: Any) -> dict[str, Any]:
    """Of a and b that share one, and c that has its own."""
    together = {"meet": {"met": [0, 1]}}
    facts = shared_of(a=together, b=together, c={"meet": {"met": [2], **changes}, **APART})
    for number, name in enumerate("ab"):
        facts["answered"][name]["steps"]["ring"]["found"]["peer"] = 1 - number
        facts["answered"][name]["steps"]["compete"]["found"]["won"] = [[0, 2], [1]][number]
    return facts


@pytest.mark.parametrize("workers", [5, 2, None])
def test_a_node_outside_of_what_the_others_share_fails(workers: int | None) -> None:
    findings = shared_rows(apart(), None if workers is None else job_of(workers))
    unshared = [row for row in findings if row.status is not Status.PASS]
    assert [(row.node, row.status) for row in unshared] == [("c", Status.FAIL)]
    assert unshared[0].measured == "not shared: a, b not seen within 3 s, at /data (ext4 of /dev/sda)"


def test_of_a_server_that_all_have_mounted_a_file_may_come_late() -> None:
    def status(c_left_s: float = 103.0, **place: str) -> Status:
        facts = apart(left_s=c_left_s)
        for name in "abc":
            facts["answered"][name]["steps"]["place"] = {"found": {**PLACE, "type": "nfs4", "source": "server:/x"}}
        facts["answered"]["c"]["steps"]["place"]["found"].update(place)
        (odd,) = [row for row in shared_rows(facts, job_of(5)) if row.status is not Status.PASS]
        assert odd.node == "c"
        return odd.status

    assert status() is Status.WARN
    assert status(c_left_s=165.0) is Status.FAIL, "no client keeps what it knows for so long"
    assert status(source="server:/y") is status(base="/", source="/dev/sda") is Status.FAIL


def test_of_two_groups_of_one_size_both_are_named() -> None:
    facts = shared_of()
    facts["names"] = [*"abcd"]
    facts["answered"]["d"] = json.loads(json.dumps(facts["answered"]["a"]))
    for name, met in zip("abcd", ([0, 1], [0, 1], [2, 3], [2, 3]), strict=True):
        facts["answered"][name]["steps"]["meet"]["found"]["met"] = met
    findings = judge(setting_of(), nodes_of(*"abcd"), facts)
    same = [row for row in findings if row.name == "same storage"]
    assert [(row.node, row.status) for row in same] == [(name, Status.FAIL) for name in "abcd"]
    assert "c, d not seen" in same[0].measured and "shared with b" in same[0].measured


def test_who_came_when_the_others_had_gone_is_not_judged() -> None:
    (late,) = [row for row in shared_rows(apart(arrived_s=102.9, left_s=106.0), job_of(5)) if row.node == "c"]
    assert late.status is Status.ERROR and late.remedy


def test_who_came_late_and_saw_the_others_is_seen_from_there() -> None:
    facts = shared_of(a={"meet": {"met": [0]}, **APART}, b={"meet": {"met": [0, 1], "arrived_s": 102.9}, "ring": {}})
    facts["answered"]["b"]["steps"]["compete"] = {"found": {"left": True}}
    facts["names"] = [*"ab"]
    del facts["answered"]["c"]
    assert {(row.name, row.node, row.status) for row in shared_rows(facts, job_of(5))} == {
        ("same storage", "a", Status.WARN),
        ("same storage", "b", Status.PASS),
        ("files of one seen by the other", "a", Status.SKIP),
        ("files of one seen by the other", "b", Status.SKIP),
        ("exclusive create between nodes", None, Status.SKIP),
    }


def test_nobody_shares_anything() -> None:
    facts = shared_of(**{name: {"meet": {"met": [number]}, **APART} for number, name in enumerate("abc")})
    findings = shared_rows(facts, job_of(5))
    assert [(row.node, row.status) for row in findings] == [(name, Status.FAIL) for name in "abc"]


@pytest.mark.parametrize(
    ("name", "node", "status", "words", "changes"),
    [
        ("same storage", "a", Status.WARN, "though seen from there", {"a": {"meet": {"met": [0, 1]}}}),
        (
            "files of one seen by the other",
            "b",
            Status.FAIL,
            "seen in part",
            {"b": {"ring": {"torn": [[2, "ask-1: 0 bytes"]]}}},
        ),
        ("files of one seen by the other", "b", Status.WARN, "p99 2 s", {"b": {"ring": {"there_and_back_s": [0.1, 4.0]}}}),
        (
            "files of one seen by the other",
            "b",
            Status.WARN,
            "nothing came back from c within 3 s",
            {"b": {"ring": {"there_and_back_s": [], "answered": False, "waited_s": 3.0}}},
        ),
        (
            "files of one seen by the other",
            "b",
            Status.FAIL,
            "nothing came back from c within 1 min 5 s",
            {"b": {"ring": {"there_and_back_s": [], "answered": False, "waited_s": 65.0}}},
        ),
        (
            "files of one seen by the other",
            "b",
            Status.WARN,
            "were not seen within 3 s",
            {"b": {"compete": {"waited_s": 3.0}, "ring": {}}},
        ),
        ("exclusive create between nodes", None, Status.FAIL, "1 created twice, by a, b", {"b": {"compete": {"won": [0, 1]}}}),
        ("exclusive create between nodes", None, Status.FAIL, "by c", {"c": {"compete": {"again": [0]}}}),
        ("exclusive create between nodes", None, Status.FAIL, "1 by nobody", {"b": {"compete": {"won": []}}}),
        ("lock between nodes", None, Status.WARN, "c could take", {"c": {"compete": {"refused": False}}}),
    ],
)
def test_what_nodes_see_of_each_other(
    name: str, node: str | None, status: Status, words: str, changes: dict[str, dict[str, Any]]
) -> None:
    odd = [row for row in shared_rows(shared_of(**changes), job_of(5)) if row.status is not Status.PASS]
    assert [(row.name, row.node, row.status) for row in odd] == [(name, node, status)] and words in odd[0].measured, odd


def test_a_client_that_makes_what_is_there_is_left_out_and_the_others_are_not() -> None:
    (row,) = [row for row in shared_rows(shared_of(c={"compete": {"again": [0]}}), job_of(5)) if row.status is Status.FAIL]
    assert row.blames == ("c",)


def test_nodes_that_did_not_come_so_far() -> None:
    facts = shared_of(b={"hung": "meet", "meet": {}, **APART})
    facts["unanswered"] = {"c": {"ended": "lost", "error": "it is gone", "limit_s": 20.0}}
    del facts["answered"]["c"]
    facts["answered"]["a"]["steps"]["meet"]["found"]["met"] = [0]
    statuses = {(row.node, row.status) for row in shared_rows(facts, job_of(5))}
    assert statuses == {("c", Status.ERROR), ("b", Status.FAIL), ("a", Status.SKIP)}
    assert all(row.remedy for row in shared_rows(facts) if row.status is Status.ERROR)


def test_a_node_alone_is_asked_nothing() -> None:
    class Alone(Answering):
        nodes = nodes_of("a")

    assert SHARED_STORAGE.gather is not None
    facts = SHARED_STORAGE.gather(setting_of(), Alone())
    (finding,) = judge(setting_of(), Alone.nodes, facts)
    assert finding.status is Status.SKIP
