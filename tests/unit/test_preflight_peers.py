"""Numbers beside those of peers and of a baseline."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from chaosrun.cluster.probing import Node
from chaosrun.preflight import peers
from chaosrun.preflight.model import Finding, Level, Measure, Status
from chaosrun.preflight.result import Result

PASS, WARN, FAIL, SKIP, ERROR = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP, Status.ERROR


def node(name: str, *, cpus: float = 8.0, gpus: int = 0, host: str = "") -> Node:
    return Node(name=name, node_id=name, address="10.0.0.1", hostname=host or name, cpus=cpus, gpus=gpus)


def against_peers(findings: list[Finding], nodes: Sequence[Node] = ()) -> list[Finding]:
    return peers.against_peers(findings, nodes)


def baseline(findings: Sequence[Finding] = (), nodes: Sequence[Node] = ()) -> peers.Baseline:
    earlier = Result(
        level=Level.QUICK, started_s=0.0, seconds=1.0, nodes=tuple(nodes), checks=(), findings=tuple(findings), facts={}
    )
    return peers.Baseline(earlier)


def speed(number: float, node: str = "a", *, device: str | None = None, name: str = "copy", better: str = "higher") -> Finding:
    measure = Measure(number=number, unit="GB/s", better=better, warn=0.5, fail=0.25)  # type: ignore[arg-type]
    return Finding(check="c", name=name, status=PASS, node=node, device=device, measure=measure)


@pytest.mark.parametrize(
    ("numbers", "better", "statuses"),
    [
        ([10, 11, 12], "higher", [PASS, PASS, PASS]),
        ([10, 4.9, 10], "higher", [PASS, WARN, PASS]),
        ([10, 5.0, 10], "higher", [PASS, PASS, PASS]),
        ([10, 2.4, 10, 11], "higher", [PASS, FAIL, PASS, PASS]),
        ([10, 0, 10], "higher", [PASS, FAIL, PASS]),
        ([10, 1000, 10], "higher", [PASS, PASS, PASS]),
        ([10, 1000, 10], "lower", [PASS, FAIL, PASS]),
        ([10, 21, 10], "lower", [PASS, WARN, PASS]),
        ([10, 0, 10], "lower", [PASS, PASS, PASS]),
        # Two have no median that could say which of them is wrong.
        ([10, 1], "higher", [PASS, PASS]),
        ([0, 0, 0], "higher", [PASS, PASS, PASS]),
        ([10, math.nan, 10, 10], "higher", [PASS, PASS, PASS, PASS]),
        ([10, math.inf, 1, 10, 10], "higher", [PASS, PASS, FAIL, PASS, PASS]),
    ],
)
def test_peers(numbers: list[float], better: str, statuses: list[Status]) -> None:
    found = against_peers([speed(number, f"n{index}", better=better) for index, number in enumerate(numbers)])
    assert [finding.status for finding in found] == statuses


def test_what_is_said() -> None:
    _, slow, _ = against_peers([speed(10), speed(2), speed(10)])
    assert (slow.measured, slow.threshold) == ("2 GB/s", "at least 25% of the median of 3, 10 GB/s") and slow.remedy
    told = replace(speed(30, better="lower"), measured="30 of them", threshold="below 100")
    *_, late = against_peers([speed(10, better="lower"), speed(10, better="lower"), told])
    assert (late.measured, late.threshold) == ("30 of them", "below 100; at most 2 times the median of 3, 10 GB/s")


def test_numbers_are_told_as_people_read_them() -> None:
    def told(number: float, unit: str) -> str:
        fast = Finding(
            check="c", name="x", status=PASS, measure=Measure(number=8 * number, unit=unit, better="higher", warn=0.5)
        )
        slow = replace(fast, measure=Measure(number=number, unit=unit, better="higher", warn=0.5))
        found = against_peers([fast, fast, slow])[-1]
        return f"{found.measured} of {found.threshold.rpartition(', ')[2]}"

    assert told(1 << 30, "B/s") == "1 GiB/s of 8 GiB/s"
    assert told(0.002, "s") == "2 ms of 16 ms"
    assert told(2.5, "GFLOP/s") == "2.5 GFLOP/s of 20 GFLOP/s"


def test_who_is_a_peer() -> None:
    of_gpus = [speed(10, device="cuda:0"), speed(10, device="cuda:1"), speed(10, "b", device="cuda:0")]
    of_cpus = [speed(1, node, device="cpu") for node in "abc"]
    others = [speed(1, name="write"), replace(speed(1), check="d")]
    assert {finding.status for finding in against_peers([*of_gpus, *of_cpus, *others])} == {PASS}
    other_unit = Measure(number=1, unit="ms", better="higher", warn=0.5)
    assert against_peers([*of_gpus, replace(of_gpus[0], measure=other_unit)])[-1].status is PASS
    assert against_peers([*of_gpus, speed(1, "b", device="cuda:1")])[-1].status is FAIL
    # The device of a pair is the other node's name, of a file system a path: no kind.
    pairs = [speed(10, "a", device="node-1"), speed(10, "b", device="/mnt/x"), speed(1, "b", device="node-3")]
    assert against_peers(pairs)[-1].status is FAIL


def test_what_is_left_as_it_is() -> None:
    fast = [speed(10), speed(10), speed(10)]
    for status in (Status.SKIP, Status.ERROR):
        assert against_peers([*fast, replace(speed(1), status=status, reason="no")])[-1].status is status
    failed = replace(speed(4), status=FAIL, measured="m", threshold="t", remedy="r")
    found = against_peers([*fast, failed])[-1]
    assert found.status is FAIL and found.remedy == "r" and found.threshold.startswith("t; ")
    assert against_peers([*fast, Finding(check="c", name="copy", status=PASS)])[-1].status is PASS
    unbounded = Measure(number=0.001, unit="GB/s", better="higher")
    assert against_peers([*fast, replace(speed(1), measure=unbounded)])[-1].status is PASS


def test_a_baseline() -> None:
    earlier = [speed(10, "a"), speed(1, "b"), speed(10, "c"), speed(math.nan, "d")]
    now = [speed(4, "a"), speed(0.9, "b"), speed(2, "new"), speed(2, "d"), speed(1, name="other")]
    found = baseline(earlier).compare(now, [])
    assert [finding.status for finding in found] == [WARN, PASS, FAIL, FAIL, PASS]
    assert found[0].threshold == "at least 50% of the baseline, 10 GB/s"
    assert found[2].threshold == "at least 25% of the baseline's median, 10 GB/s"


def test_a_head_that_trains_nothing_is_nobodys_peer() -> None:
    gpus, head = [node(name, gpus=8) for name in "abc"], node("head")
    found = against_peers([speed(10, "a"), speed(10, "b"), speed(1, "head"), speed(10, "c")], [*gpus, head])
    assert [finding.status for finding in found] == [PASS] * 4
    # Among its like a slow one is still found, and in a cluster without GPUs too, where the head has no CPUs.
    slow = [speed(10, "a"), speed(10, "b"), speed(1, "c"), speed(1, "head")]
    assert [finding.status for finding in against_peers(slow, [*gpus, head])] == [PASS, PASS, FAIL, PASS]
    idle = [*(node(name) for name in "abc"), node("head", cpus=0.0)]
    assert [finding.status for finding in against_peers(slow, idle)] == [PASS, PASS, FAIL, PASS]
    assert baseline(slow[:2], gpus).compare([speed(1, "head")], [head])[0].status is PASS


def test_how_much_there_was_to_compare() -> None:
    now = [speed(10, "a"), speed(10, "a", name="other"), replace(speed(10, "b"), status=SKIP, reason="no")]
    unbounded = replace(speed(1), measure=Measure(number=1.0, unit="s", better="lower"))
    row = baseline([speed(10, "a")]).compared([*now, unbounded], [])
    assert (row.status, row.measured, row.node) == (PASS, "1 of 2", None)
    none = baseline([speed(10, name="yet another")]).compared(now, [])
    assert none.status is ERROR and none.reason.startswith("the baseline has none of the 2 numbers") and none.remedy
    nothing = baseline([speed(10)]).compared([unbounded], [])
    assert nothing.status is SKIP
