"""What is made of network facts, good and bad: names and interfaces, connections, sums, and whom a failure is put down to."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from chaosrun.cluster.probing import Call, Node, ProbeOutcome
from chaosrun.preflight.checks import network
from chaosrun.preflight.checks import network_sums as sums
from chaosrun.preflight.checks.network import judge_interfaces
from chaosrun.preflight.checks.network_connections import fewest_to_blame, judge_connections
from chaosrun.preflight.checks.network_sums import Backend, Run, judge_sums, sound, suspects
from chaosrun.preflight.model import Finding, Level, Setting, Status
from chaosrun.preflight.probes.allreduce import DONE, START, RankFacts, Sum, SumFacts, Wrong
from chaosrun.preflight.probes.interfaces import InterfaceFacts
from chaosrun.preflight.probes.mesh import MeshFacts, MeshFailure
from chaosrun.records.codec import changed, to_plain
from chaosrun.spec.job_file import Job
from chaosrun.spec.model import JobSpec
from tests.preflight_answers import Answering, told

SETTING = Setting(level=Level.QUICK, root=Path("/nowhere"), storage=Path("/nowhere"))
LO = ("127.0.0.1", "::1")
LOOPBACK = ("127.0.1.1",)


def nodes(count: int = 3) -> list[Node]:
    return [
        Node(name=name, node_id=name, address=f"10.0.0.{at}", hostname=f"host-{name}", cpus=1, gpus=0, head=at == 1)
        for at, name in enumerate("abcdefgh"[:count], start=1)
    ]


def job(gpu: Any) -> Job:
    spec = JobSpec.model_validate({"name": "probe", "script": "train.py", "workers": 2, "per_worker": {"gpu": gpu}})
    here = Path("/nowhere")
    return Job(spec=spec, path=here / "job.yaml", directory=here, script_path=here / "train.py", text="", tree=None)  # type: ignore[arg-type]


# Names and interfaces


def named(node: Node, **changes: Any) -> InterfaceFacts:
    """Facts of a node of its own machine where all is well."""
    its = {"lo": LO, "eth0": (node.address,), "eth1": (node.address.replace("10.", "192."),)}
    about: dict[str, Any] = {"hostname": node.hostname, "own": (node.address,), "own_error": "", "network": node.name}
    about |= {"interfaces": its, "environment": {}, "free_ports": (4001, 4002, 4003)}
    return InterfaceFacts(**{**about, **changes})


def interface(changes: Mapping[str, Any], backend: str = "gloo", count: int = 3) -> Finding:
    """Of node b (of a, where it is alone), where `changes` hold."""
    mine = "b" if count > 1 else "a"
    answered = {node.name: named(node, **(changes if node.name == mine else {})) for node in nodes(count)}
    found = judge_interfaces(nodes(count), told(InterfaceFacts, answered), [Backend(name=backend, nodes=(*answered,))])
    return next(finding for finding in found if finding.node == mine)


@pytest.mark.parametrize(
    ("changes", "backend", "status", "says"),
    [
        ({}, "gloo", Status.PASS, "gloo: eth0 10.0.0.2"),
        ({"own": LOOPBACK}, "gloo", Status.FAIL, "host-b resolves to 127.0.1.1: gloo would listen on the loop"),
        ({"own": LOOPBACK}, "nccl", Status.PASS, "eth0 10.0.0.2"),
        ({"own": (), "own_error": "Name not known"}, "gloo", Status.FAIL, "resolves to nothing (Name not known"),
        ({"own": ("10.9.9.9",)}, "gloo", Status.FAIL, "resolves to 10.9.9.9"),
        ({"own": ("10.9.9.9", "10.0.0.2")}, "gloo", Status.PASS, "gloo: eth0 10.0.0.2"),
        ({"own": LOOPBACK, "environment": {"GLOO_SOCKET_IFNAME": "eth0"}}, "gloo", Status.PASS, "GLOO_SOCKET_IFNAME=eth0"),
        ({"environment": {"NCCL_SOCKET_IFNAME": "eth"}}, "nccl", Status.PASS, "NCCL_SOCKET_IFNAME=eth"),
    ],
)
def test_where_ranks_would_be_reached(changes: Mapping[str, Any], backend: str, status: Status, says: str) -> None:
    finding = interface(changes, backend)
    assert finding.status is status and says in finding.measured


@pytest.mark.parametrize(("network", "failed"), [({}, ["b"]), ({"network": "one"}, [])])
def test_a_node_that_ray_knows_by_a_loopback_address_is_out_of_reach(network: Any, failed: list[str]) -> None:
    """On one machine it is where everybody is."""
    all_nodes = [replace(node, address="127.0.0.1" if node.name == "b" else node.address) for node in nodes()]
    answered = {node.name: named(node, **network) for node in all_nodes}
    found = judge_interfaces(all_nodes, told(InterfaceFacts, answered), ())
    bad = [finding for finding in found if finding.status is Status.FAIL]
    assert [finding.node for finding in bad] == failed and all("127.0.0.1" in finding.measured for finding in bad)


def test_one_node_has_nobody_to_connect_to() -> None:
    assert interface({"own": LOOPBACK}, count=1).status is Status.PASS
    assert {finding.status for finding in judge_connections(nodes(1), told(MeshFacts, {}), {})} == {Status.SKIP}


def test_a_node_that_did_not_answer_is_an_error() -> None:
    (finding,) = judge_interfaces(nodes(1), told(InterfaceFacts, {}, {"a": {"error": "it died"}}), ())
    assert finding.status is Status.ERROR and finding.reason == "it died" and finding.remedy


@pytest.mark.parametrize(
    ("gpu", "gpus", "cpus", "groups"),
    [
        (0, (0, 4, 4), (8, 8, 8), [("gloo", "abc")]),
        (0, (0, 4, 4), (0, 8, 8), [("gloo", "bc")]),  # no worker goes to a head without CPUs
        (1, (0, 4, 4), (8, 8, 8), [("nccl", "bc")]),  # nor to one without GPUs
        (1, (0, 0, 1), (8, 8, 8), []),
        ("auto", (0, 0, 1), (8, 8, 8), [("gloo", "abc")]),
        (None, (0, 4, 4), (8, 8, 8), [("nccl", "bc")]),
        (None, (0, 0, 1), (8, 8, 8), [("gloo", "abc")]),
        (None, (0, 0, 0), (0, 8, 8), [("gloo", "bc")]),
    ],
)
def test_sums_are_made_as_workers_would_and_where_they_would_be(
    gpu: Any, gpus: Sequence[int], cpus: Sequence[int], groups: list[tuple[str, str]]
) -> None:
    all_nodes = [replace(node, gpus=its, cpus=own) for node, its, own in zip(nodes(), gpus, cpus, strict=True)]
    setting = SETTING if gpu is None else replace(SETTING, job=job(gpu))
    made = [(backend, "".join(node.name for node in group)) for backend, group in network.backends(setting, all_nodes)]
    assert made == groups


def test_a_head_without_gpus_is_not_held_to_what_gloo_needs() -> None:
    debian = {node.name: named(node, own=LOOPBACK) for node in nodes()}
    setting, all_nodes = replace(SETTING, job=job(1)), [replace(node, gpus=0 if node.head else 4) for node in nodes()]
    ((name, group),) = network.backends(setting, all_nodes)
    backend = Backend(name=name, nodes=tuple(node.name for node in group))
    found = judge_interfaces(all_nodes, told(InterfaceFacts, debian), [backend])
    assert not [finding for finding in found if finding.status is Status.FAIL]
    skipped = {found.node: found.reason for found in judge_sums(all_nodes, [backend])}
    assert skipped["a"] == "no worker that sums with others is placed there"
    assert skipped["b"].startswith("left out")


# Connections


def refused(peer: str, port: int, error: str = "refused") -> MeshFailure:
    cause = "refused" if error == "refused" else "no answer"
    return MeshFailure(peer=peer, purpose="rendezvous", port=port, cause=cause, error=error)


def met(*failed: MeshFailure, **changes: Any) -> MeshFacts:
    reached = 3 - len({each.peer for each in failed})
    return changed(MeshFacts(reached=reached, failed=failed), **changes)


def judged_connections(answered: Mapping[str, MeshFacts], unanswered: Mapping[str, Any] | None = None) -> list[Finding]:
    ports = {"a": 1001, "b": 1002, "c": 1003}
    return judge_connections(nodes(), told(MeshFacts, answered, unanswered), ports)


def by_status(findings: Sequence[Finding], status: Status, name: str = "TCP connections") -> list[Finding]:
    return [finding for finding in findings if finding.name == name and finding.status is status]


def test_who_is_not_reached_is_named_with_its_port() -> None:
    closed = refused("b", 1002)
    findings = judged_connections({"a": met(closed), "b": met(), "c": met(closed)})
    (finding,) = by_status(findings, Status.FAIL)
    assert (finding.node, finding.device) == ("b", "port 1002 (rendezvous)")
    assert finding.measured == "not reached by a, c of 3 nodes: refused"
    assert [each.node for each in by_status(findings, Status.PASS)] == ["a", "c"]


def test_who_reaches_nobody_is_named() -> None:
    silent = [refused(peer, port, "no answer within 2 s") for peer, port in (("a", 1001), ("c", 1003))]
    findings = judged_connections({"a": met(), "b": met(*silent), "c": met()})
    (finding,) = by_status(findings, Status.FAIL)
    assert (finding.node, finding.device) == ("b", None) and "a port 1001, c port 1003" in finding.measured


def test_whose_probe_could_not_run_is_an_error_and_nobody_is_blamed_for_it() -> None:
    closed = refused("b", 1002)
    for answered, unanswered in (
        ({"a": met(closed), "c": met(closed)}, {"b": {"error": "it died"}}),
        ({"a": met(closed), "b": MeshFacts(taken="Address already in use"), "c": met(closed)}, {}),
    ):
        findings = judged_connections(answered, unanswered)
        assert not by_status(findings, Status.FAIL)
        assert [finding.node for finding in by_status(findings, Status.ERROR) if finding.remedy] == ["b"]
        passed = by_status(findings, Status.PASS)
        assert [finding.node for finding in passed] == ["a", "c"]
        assert all(finding.reason == f"ports rendezvous {port}" for finding, port in zip(passed, (1001, 1003), strict=True))


def test_with_nobody_else_nothing_is_known() -> None:
    findings = judge_connections(nodes(2), told(MeshFacts, {"a": met()}, {"b": {"error": "it died"}}), {"a": 1001, "b": 1002})
    assert {finding.node: finding.status for finding in findings} == {"a": Status.SKIP, "b": Status.ERROR}


@pytest.mark.parametrize(
    ("failed", "blamed"),
    [
        ([], []),
        ([("a", "b"), ("c", "b")], ["b"]),
        ([("b", "a"), ("b", "c")], ["b"]),
        ([("a", "b")], ["b"]),
        ([("b", "a")], ["a"]),
        ([("a", "b"), ("b", "a")], ["b"]),  # a is the head
        ([("c", "b"), ("b", "c")], ["c"]),
        ([("b", "b"), ("a", "b")], ["b"]),
        ([(one, other) for one in "abc" for other in "abc" if one != other], ["c", "b"]),
    ],
)
def test_the_fewest_are_blamed(failed: list[tuple[str, str]], blamed: list[str]) -> None:
    assert fewest_to_blame("abc", failed, "a") == blamed


# Sums

CASES = ((1, "uint8"), (1 << 20, "float32"))
RIGHT = Sum(hash="abc")


def rank(**changes: Any) -> RankFacts:
    right = {"place": DONE, "ended": "done", "results": [RIGHT, RIGHT]}
    return RankFacts(**{**right, "seconds": [0.002, 0.001, 0.003], **changes})


def run(*ranks: RankFacts | str, names: str = "abcdef", **changes: Any) -> Run:
    """One rank a node; a str is why the node did not answer."""
    placed = dict(zip(names, ranks, strict=False))
    answered = {name: SumFacts(ranks={at: one}) for at, (name, one) in enumerate(placed.items()) if isinstance(one, RankFacts)}
    silent = {name: one for name, one in placed.items() if isinstance(one, str)}
    return Run(nodes=tuple(placed), answered=answered, unanswered=silent, **changes)


WRONG = rank(results=[Sum(hash="bad", wrong=Wrong(count=1, index=0, got="4", expected=3)), RIGHT])
GAVE_UP = rank(place=2, ended="raised", error="RuntimeError: Timed out", results=[RIGHT], seconds=[])
STUCK = changed(GAVE_UP, ended="stuck", error="")
BEHIND = changed(GAVE_UP, place=1)
DIED = changed(GAVE_UP, ended="died", error="killed by SIGSEGV")
OTHER_HASH = rank(results=[Sum(hash="xyz"), RIGHT])


@pytest.mark.parametrize(
    ("ranks", "blamed", "says"),
    [
        ((GAVE_UP, STUCK, GAVE_UP), {"b"}, "rank 1 hung and did not finish sum 2"),
        ((GAVE_UP, BEHIND, GAVE_UP), {"b"}, "rank 1 did not come to sum 2"),
        ((GAVE_UP, DIED, GAVE_UP), {"b"}, "rank 1 died: killed by SIGSEGV"),
        # Where it shows need not be where it was made.
        ((rank(), WRONG, rank()), set(), ""),
        ((rank(), OTHER_HASH, rank()), set(), ""),
        ((rank(), WRONG), set(), ""),
        ((GAVE_UP, "no answer within 5 s", "it died"), {"b", "c"}, "no answer within 5 s"),
        ((GAVE_UP, changed(GAVE_UP, place=START)), {"b"}, "rank 1 did not join the others"),
        # What all have in common is nobody's own.
        ((GAVE_UP, GAVE_UP, GAVE_UP), set(), ""),
        ((WRONG, WRONG, WRONG), set(), ""),
        ((STUCK, STUCK, GAVE_UP), set(), ""),
        ((WRONG,), {"a"}, "sum 1 is wrong at 1 places, first 0: 4, not 3"),
    ],
)
def test_who_is_behind_a_sum_that_fails(ranks: Sequence[Any], blamed: set[str], says: str) -> None:
    round = run(*ranks)
    assert not sound(round)
    found = suspects(round)
    assert found.keys() == blamed
    assert not blamed or any(says in suspicion.why for suspicion in found.values())


def test_a_sum_that_is_wrong_everywhere_is_repeated_alone() -> None:
    well, ill = rank(), WRONG
    alone = (run(well, names="a"), run(ill, names="b"), run(well, names="c"))
    assert suspects(run(ill, ill, ill, alone=alone)).keys() == {"b"}


def test_of_two_nodes_the_one_that_received_the_damage_is_not_blamed_for_it() -> None:
    alone = (run(WRONG, names="a"), run(rank(), names="b"))
    findings = judged_sums(run(rank(), WRONG, alone=alone), run(rank(), names="b"), count=2)
    assert {finding.node: finding.status for finding in findings if finding.name == "all-reduce"} == {
        "a": Status.FAIL,
        "b": Status.PASS,
    }
    (finding,) = judged_sums(run(rank(), WRONG, alone=(run(rank(), names="a"), run(rank(), names="b"))), count=2)
    assert (finding.status, finding.node, finding.blames) == (Status.FAIL, None, ("a", "b"))
    assert "sum 1 is wrong" in finding.measured and finding.reason == "over 2 nodes together; each was right alone"


def test_judging_many_nodes_asks_once_for_the_suspects(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Run] = []
    monkeypatch.setattr(sums, "suspects", lambda round: asked.append(round) or suspects(round))
    judged_sums(run(GAVE_UP, STUCK, GAVE_UP))
    assert len(asked) == 1


def judged_sums(*rounds: Run, count: int = 3) -> list[Finding]:
    names = tuple(node.name for node in nodes(count))
    return judge_sums(nodes(count), [Backend(name="gloo", nodes=names, cases=CASES, timed_bytes=1 << 20, rounds=rounds)])


def test_sums_that_are_exact_everywhere_pass_with_their_bandwidth() -> None:
    findings = judged_sums(run(rank(), rank(), rank()))
    assert [finding.node for finding in by_status(findings, Status.PASS, "all-reduce")] == ["a", "b", "c"]
    assert (findings[0].device, findings[0].measured) == ("gloo", "2 sums exact, 1 B to 1 MiB, over 3 ranks on 3 nodes")
    (bus,) = [finding.measure for finding in findings if "bus bandwidth" in finding.name]
    # nccl-tests: bytes / seconds × 2(n-1)/n; the median of three is 2 ms.
    assert bus and bus.number == pytest.approx((1 << 20) / 0.002 * 4 / 3 / 1e9)


def test_without_the_culprit_the_others_are_shown_to_be_right() -> None:
    findings = judged_sums(run(GAVE_UP, STUCK, GAVE_UP), run(rank(), rank(), names="ac"))
    assert [finding.node for finding in by_status(findings, Status.FAIL, "all-reduce")] == ["b"]
    assert [finding.node for finding in by_status(findings, Status.PASS, "all-reduce")] == ["a", "c"]


def test_a_failure_that_cannot_be_put_down_to_anybody_speaks_against_all() -> None:
    (finding,) = judged_sums(run(GAVE_UP, GAVE_UP, GAVE_UP))
    assert (finding.status, finding.node, finding.blames) == (Status.FAIL, None, ("a", "b", "c"))
    assert "Timed out" in finding.measured


def test_who_did_not_answer_is_an_error_and_who_was_left_out_a_skip() -> None:
    findings = judged_sums(run(GAVE_UP, "the agent is gone"), run(rank(), names="a"))
    assert {finding.node: finding.status for finding in findings if finding.name == "all-reduce"} == {
        "a": Status.PASS,
        "b": Status.ERROR,
        "c": Status.SKIP,
    }


class Answers(Answering):
    """A pool of known answers: a's numbers are wrong alone, and with others it is b that gets them."""

    def __init__(self) -> None:
        self.nodes = nodes(2)
        self.sums: list[list[str]] = []

    def probe(self, calls: Mapping[str, Call]) -> dict[str, ProbeOutcome]:
        (probe,) = {call.probe for call in calls.values()}
        probe = probe.rpartition(".")[2]
        if probe == "allreduce":
            self.sums.append(sorted(calls))
        return {name: ProbeOutcome(facts=to_plain(getattr(self, probe)(name, call.parameters))) for name, call in calls.items()}

    def interfaces(self, name: str, asked: Any) -> InterfaceFacts:
        (node,) = [node for node in self.nodes if node.name == name]
        return named(node)

    def mesh(self, name: str, asked: Any) -> MeshFacts:
        return met(reached=2)

    def allreduce(self, name: str, asked: Any) -> SumFacts:
        alone = asked["world"] == asked["local"]
        return SumFacts(ranks={asked["first"]: WRONG if name == ("a" if alone else "b") else rank()})


def test_wrong_sums_are_repeated_alone_before_anybody_is_blamed() -> None:
    pool = Answers()
    findings = network.judge(SETTING, pool.nodes, network.gather(SETTING, pool))
    # Together, each alone, and b once more to be shown right.
    assert pool.sums == [["a", "b"], ["a", "b"], ["b"]]
    assert {finding.node: finding.status for finding in findings if finding.name == "all-reduce"} == {
        "a": Status.FAIL,
        "b": Status.PASS,
    }
