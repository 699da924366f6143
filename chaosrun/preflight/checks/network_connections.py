"""Judges the connections between all nodes: who cannot be reached and on which port, round trips. Pure.

Who refused only before it listened at all was late, and who came only after the other had ended did not try in time: neither is
a closed port. That goes by the nodes' clocks, which the check "cluster" compares.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaosrun.cluster.probing import Node
from chaosrun.preflight.majority import fewest_to_blame
from chaosrun.preflight.model import Answers, Finding, Measure, Rows
from chaosrun.preflight.probes.mesh import Failure, MeshFacts
from chaosrun.wording import listed

ROWS = Rows(check="network", name="TCP connections")
USED_PORTS = ("node manager", "object manager", "gcs")
"""Those of Ray's that other nodes connect to."""
SOME = 3
ROUND_TRIP_WARN = 0.05
"""On a busy machine a round trip of 0.05 ms easily takes ten times that."""
REMEDIES = {
    "refused": "nothing may listen there, or a firewall rejects: open {ports} between the nodes",
    "no answer": "packets are dropped on the way: open {ports} between the nodes in firewalls, security groups, network "
    "policies, and check the routes",
}
OTHER_REMEDY = "check the network between this node and the others: open {ports}"
BUSY = "look at what keeps this node busy (load, a slow file system) and repeat; a higher --level waits longer"
RANGES = {
    "rendezvous": "the ports that the kernel gives out (sysctl net.ipv4.ip_local_port_range)",
    "gcs": "the port of Ray's head",
}


@dataclass(frozen=True, slots=True)
class Failed:
    """A connection that failed, and who tried it."""

    who: str
    what: Failure

    @property
    def both(self) -> set[str]:
        return {self.who, self.what.peer}


def judge_connections(nodes: Sequence[Node], told: Answers[MeshFacts], ports: Mapping[str, int]) -> list[Finding]:
    """`ports`: where each node that was asked was to listen."""
    if len(nodes) == 1:
        return [ROWS.skip("one node", name=name, node=nodes[0].name) for name in ("TCP connections", "TCP round trip")]
    tardy = late(told)
    # Whose own part could not run, or only too late, is no evidence against its network.
    heard = {name: facts for name, facts in told.answered.items() if not facts.taken and name not in tardy}
    failed = [
        Failed(name, failure)
        for name, facts in heard.items()
        for failure in facts.failed
        if failure.purpose != "rendezvous" or (failure.peer in heard and not _missed(failure, heard))
    ]
    asked = [node for node in nodes if node.name in ports]
    head = next((node.name for node in nodes if node.head), None)
    blamed = fewest_to_blame([node.name for node in asked], {(each.who, each.what.peer) for each in failed}, head)
    findings: list[Finding] = []
    for name in blamed:
        against = [each for each in failed if name in each.both]
        # What it fails in with another that is blamed says less.
        clear = [each for each in against if not each.both - {name} & {*blamed}]
        findings += _against(name, clear or against, len(asked))
    for node in asked:
        rows = ROWS.of(node=node.name)
        if node.name not in heard:
            findings.append(_could_not(rows, node.name, told, tardy, ports))
            continue
        if node.name not in blamed:
            findings.append(_not_blamed(rows, node, heard, ports, blamed))
        if (took_ms := heard[node.name].round_trip_ms) is not None:
            measure = Measure(number=took_ms, unit="ms", better="lower", warn=ROUND_TRIP_WARN)
            findings.append(rows.passed(f"{took_ms:.2g} ms", name="TCP round trip", measure=measure))
    return findings


def late(told: Answers[MeshFacts]) -> dict[str, float]:
    """Nodes that began to listen only when somebody had given up on them, and how many seconds after the first that was."""
    listening = {name: facts for name, facts in told.answered.items() if not facts.taken}
    began = {name: facts.listened[0] for name, facts in listening.items()}
    given_up = [
        (failure.peer, failure.tried[1])
        for facts in listening.values()
        for failure in facts.failed
        if failure.purpose == "rendezvous" and failure.cause == "refused"
    ]
    first = min(began.values(), default=0.0)
    return {name: began[name] - first for name, at_s in sorted(given_up) if name in began and at_s < began[name]}


def _missed(failure: Failure, heard: Mapping[str, MeshFacts]) -> bool:
    """Whether the peer had ended when it was first tried."""
    return failure.cause == "refused" and failure.tried[0] > heard[failure.peer].listened[1]


def _against(name: str, failed: Sequence[Failed], size: int) -> Iterator[Finding]:
    """One FAIL for each port of it that others do not reach, and one for all that it does not reach itself."""
    inward = [each for each in failed if each.what.peer == name]
    for purpose in dict.fromkeys(each.what.purpose for each in inward):
        these = [each for each in inward if each.what.purpose == purpose]
        by = [f"{name} itself" if each.who == name else each.who for each in these]
        device = f"port {these[0].what.port} ({purpose})"
        yield _failure(ROWS.of(node=name, device=device), f"not reached by {listed(by, SOME)} of {size} nodes", these[0].what)
    outward = [each.what for each in failed if each.who == name and each.what.peer != name]
    if outward:
        to = [f"{failure.peer} port {failure.port}" for failure in outward]
        yield _failure(ROWS.of(node=name), f"it does not reach {listed(to, SOME)}", outward[0])


def _failure(rows: Rows, measured: str, failure: Failure) -> Finding:
    ports = RANGES.get(failure.purpose, f"Ray's port of its {failure.purpose}")
    remedy = REMEDIES.get(failure.cause, OTHER_REMEDY).format(ports=ports)
    return rows.fail(f"{measured}: {failure.error}", "every node connects to every node", remedy)


def _could_not(
    rows: Rows, name: str, told: Answers[MeshFacts], tardy: Mapping[str, float], ports: Mapping[str, int]
) -> Finding:
    if name in tardy:
        after = f"{tardy[name]:.1f} s after the first node, when others had given up on it"
        return rows.error(f"it began to listen {after}", BUSY)
    if name in told.unanswered:
        return rows.error(told.unanswered[name].error, BUSY)
    why = f"cannot listen on port {ports[name]}: {told.answered[name].taken}"
    return rows.error(why, "repeat with --only network: ports are chosen anew")


def _not_blamed(
    rows: Rows, node: Node, heard: Mapping[str, MeshFacts], ports: Mapping[str, int], blamed: Sequence[str]
) -> Finding:
    """PASS where every other node was reached, or is blamed for it that it was not, or says itself why it could not be."""
    found, others = heard[node.name], len(ports) - 1
    reached = found.reached - 1
    measured = f"reaches {reached} of {others} others and itself"
    missed = found.untried + sum(failure.peer in heard and _missed(failure, heard) for failure in found.failed)
    if missed:
        return rows.error(f"{missed} of {others} others were not tried in time", BUSY, measured=measured)
    if heard.keys() == {node.name}:
        return rows.skip("no other node could take its part in time", measured=measured)
    used = [f"{purpose} {number}" for purpose, number in node.ports.items() if purpose in USED_PORTS and number > 0]
    reason = f"ports {', '.join([*used, f'rendezvous {ports[node.name]}'])}"
    if reached < others and blamed:
        reason += f"; what fails is told of {listed(blamed, SOME)}"
    return rows.passed(measured, reason=reason)
