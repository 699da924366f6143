"""The network check with real probes on this machine: all well, a closed port, a node that nobody hears, wrong sums, a hang."""

import os
import selectors
import socket
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from chaosrun.preflight.checks import network
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.preflight.probes import allreduce
from tests.local_pool import FAULTY, LocalPool

SETTING = Setting(level=Level.QUICK, root=Path("/nowhere"), storage=Path("/nowhere"))


def layer(name: str) -> dict[str, str]:
    return {"PYTHONPATH": str(FAULTY / name)}


def check(pool: LocalPool) -> list[Finding]:
    return network.judge(SETTING, pool.nodes, network.gather(SETTING, pool))


def failed(findings: Sequence[Finding]) -> list[tuple[str, str | None, str | None]]:
    return [(finding.name, finding.node, finding.device) for finding in findings if finding.status is Status.FAIL]


def passed(findings: Sequence[Finding], name: str) -> list[str | None]:
    return [finding.node for finding in findings if finding.name == name and finding.status is Status.PASS]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is, a sound node has the time that it needs."""
    for limits in (network.START_S, network.JOIN_S, network.COLLECTIVE_S):
        monkeypatch.setitem(limits, Level.QUICK, 120.0)


@pytest.fixture
def no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "backends", lambda setting, nodes: [])


@pytest.fixture
def listening() -> Iterator[list[int]]:
    with socket.create_server(("0.0.0.0", 0)) as one, socket.create_server(("0.0.0.0", 0)) as other:
        yield [each.getsockname()[1] for each in (one, other)]


def test_all_reach_all_and_a_closed_port_of_ray_is_named(no_sums: None, listening: list[int]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.3", 0))
        port = closed.getsockname()[1]
        ports = {"a": {"node manager": listening[0]}, "b": {"node manager": listening[1], "object manager": port}, "c": {}}
        findings = check(LocalPool({"a": {}, "b": {}, "c": {}}, ports))
    assert failed(findings) == [("TCP connections", "b", f"port {port} (object manager)")]
    (finding,) = [each for each in findings if each.status is Status.FAIL]
    assert finding.measured == "not reached by a, b itself, c of 3 nodes: refused"
    assert passed(findings, "TCP connections") == ["a", "c"]
    assert passed(findings, "interface") == ["a", "b", "c"]


@pytest.mark.nightly
def test_a_node_that_listens_to_nobody_and_one_that_nobody_hears_are_named(
    no_sums: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(network.START_S, Level.QUICK, 6.0)
    findings = check(LocalPool({"a": {}, "b": layer("closed_port"), "c": {}, "d": layer("blackholed")}))
    assert {node for _, node, _ in failed(findings)} == {"b", "d"}
    assert passed(findings, "TCP connections") == ["a", "c"]
    (closed,) = [each for each in findings if each.status is Status.FAIL and each.node == "b"]
    assert closed.device and closed.device.startswith("port ") and "refused" in closed.measured
    assert all("no answer within 2 s" in each.measured for each in findings if each.status is Status.FAIL and each.node == "d")


@pytest.mark.nightly
def test_who_comes_late_gets_another_chance(no_sums: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(network.START_S, Level.QUICK, 4.0)
    once = tmp_path / "once"
    findings = check(LocalPool({"a": {}, "b": {**layer("late_once"), "LATE_ONCE": str(once)}}))
    assert once.exists()
    assert not failed(findings) and passed(findings, "TCP connections") == ["a", "b"]


def test_a_node_whose_sums_are_wrong_is_named() -> None:
    findings = check(LocalPool({"a": layer("wrong_addend")}))
    assert failed(findings) == [("all-reduce", "a", "gloo")]
    (finding,) = [each for each in findings if each.status is Status.FAIL]
    # Both ranks add one.
    assert finding.measured.startswith("sum 1 is wrong at 1 places, first 0: ")
    assert not passed(findings, "all-reduce")


def test_a_rank_that_dies_of_a_signal_without_a_name_is_told_like_any_other() -> None:
    ours, theirs = os.pipe()
    child = subprocess.Popen(["/bin/sh", "-c", "kill -40 $$"], pass_fds=[theirs])
    os.close(theirs)
    rank = allreduce.Rank(pid=child.pid)
    with selectors.DefaultSelector() as selector:
        selector.register(ours, selectors.EVENT_READ)
        allreduce.listen(selector, ours, rank)
    assert (rank.facts.ended, rank.facts.error) == ("died", "killed by signal 40")


@pytest.mark.nightly
def test_who_hangs_in_a_sum_is_named_and_the_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(network.COLLECTIVE_S, Level.QUICK, 15.0)
    findings = check(LocalPool({"a": {}, "b": layer("hangs_in_sum"), "c": {}}))
    assert failed(findings) == [("all-reduce", "b", "gloo")]
    (finding,) = [each for each in findings if each.status is Status.FAIL]
    sizes = [size for size, dtype in network.CASES[Level.QUICK] if dtype != network.OF_GPUS]
    assert f"hung and did not finish sum {sizes.index(1000) + 1}" in finding.measured
    assert passed(findings, "all-reduce") == ["a", "c"]


@pytest.mark.nightly
def test_a_standard_network_check_passes_here() -> None:
    standard = Setting(level=Level.STANDARD, root=Path("/nowhere"), storage=Path("/nowhere"))
    pool = LocalPool({"a": {}, "b": {}, "c": {}})
    findings = network.judge(standard, pool.nodes, network.gather(standard, pool))
    assert {finding.status for finding in findings} <= {Status.PASS, Status.SKIP}
    assert passed(findings, "all-reduce") == ["a", "b", "c"]
