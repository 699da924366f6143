"""Judges the connections between all nodes: which nodes cannot be reached, and on which port. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Answers, Finding, Rows
from chaosrun.preflight.probes.mesh import MeshFacts, MeshFailure
from chaosrun.wording import listed

ROWS = Rows(check="network", name="TCP connections")
SOME = 3
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
class FailedConnection:
    """A connection that failed, and who tried it."""

    who: str
    what: MeshFailure

    @property
    def both(self) -> set[str]:
        return {self.who, self.what.peer}


def judge_connections(nodes: Sequence[Node], told: Answers[MeshFacts], ports: Mapping[str, int]) -> list[Finding]:
    """`ports`: on which each probed node had to listen."""
    if len(nodes) == 1:
        return [ROWS.skip("one node", node=nodes[0].name)]
    # A node whose own probe could not run proves nothing about its network.
    heard = {name: facts for name, facts in told.answered.items() if not facts.taken}
    failed = [
        FailedConnection(name, failure)
        for name, facts in heard.items()
        for failure in facts.failed
        if failure.purpose != "rendezvous" or failure.peer in heard
    ]
    asked = [node for node in nodes if node.name in ports]
    head = next((node.name for node in nodes if node.head), None)
    blamed = fewest_to_blame([node.name for node in asked], {(each.who, each.what.peer) for each in failed}, head)
    findings: list[Finding] = []
    for name in blamed:
        against = [each for each in failed if name in each.both]
        # Failures with another blamed node say less about this one.
        clear = [each for each in against if not each.both - {name} & {*blamed}]
        findings += _against(name, clear or against, len(asked))
    for node in asked:
        rows = ROWS.of(node=node.name)
        if silence := told.unanswered.get(node.name):
            findings.append(rows.error(silence.error, BUSY))
        elif node.name not in heard:
            why = f"cannot listen on port {ports[node.name]}: {told.answered[node.name].taken}"
            findings.append(rows.error(why, "repeat with --only network: new ports are chosen"))
        elif node.name not in blamed:
            findings.append(_not_blamed(rows, node, heard, ports, blamed))
    return findings


def again(told: Answers[MeshFacts]) -> bool:
    """Whether to probe again: another process took a port between its choice and its use, or a process started slowly."""
    failed = [failure for facts in told.answered.values() for failure in facts.failed]
    slow = any(each.purpose == "rendezvous" and each.cause == "refused" for each in failed)
    return slow or any(facts.taken for facts in told.answered.values())


def _against(name: str, failed: Sequence[FailedConnection], size: int) -> Iterator[Finding]:
    """One FAIL for each of its ports that others cannot reach, and one for everything that it cannot reach itself."""
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


def _failure(rows: Rows, measured: str, failure: MeshFailure) -> Finding:
    ports = RANGES.get(failure.purpose, f"Ray's port of its {failure.purpose}")
    remedy = REMEDIES.get(failure.cause, OTHER_REMEDY).format(ports=ports)
    return rows.fail(f"{measured}: {failure.error}", "every node connects to every node", remedy)


def _not_blamed(
    rows: Rows, node: Node, heard: Mapping[str, MeshFacts], ports: Mapping[str, int], blamed: Sequence[str]
) -> Finding:
    """PASS where every other node was reached, or is itself to blame, or reports why it could not be reached."""
    found, others = heard[node.name], len(ports) - 1
    reached = found.reached - 1
    measured = f"reaches {reached} of {others} others and itself"
    if heard.keys() == {node.name}:
        return rows.skip("no other node could take its part", measured=measured)
    used = [f"{purpose} {number}" for purpose, number in node.ports.items()]
    reason = f"ports {', '.join([*used, f'rendezvous {ports[node.name]}'])}"
    if reached < others and blamed:
        reason += f"; what fails is told of {listed(blamed, SOME)}"
    return rows.passed(measured, reason=reason)


def fewest_to_blame(names: Sequence[str], failed: Iterable[tuple[str, str]], head: str | None = None) -> list[str]:
    """Names without which none of the failed (from, to) pairs is left, as few as a greedy choice finds.

    First a node that fails with itself, then the one that fails with most others; of two that fail only with each other, the
    unreachable one, then the one that is not Ray's head, then the later one.
    """
    order = {name: index for index, name in enumerate(names)}
    partners: dict[str, set[str]] = {name: set() for name in order}
    arrivals: dict[str, set[str]] = {name: set() for name in order}
    blamed: list[str] = []

    def blame(name: str) -> None:
        blamed.append(name)
        for partner in partners[name]:
            partners[partner].discard(name)
            arrivals[partner].discard(name)
        partners[name] = set()

    pairs = list(failed)
    for one, other in pairs:
        if one != other:
            partners[one].add(other)
            partners[other].add(one)
            arrivals[other].add(one)
    for name in sorted({one for one, other in pairs if one == other}, key=order.__getitem__):
        blame(name)
    while True:
        worst = max(order, key=lambda name: (len(partners[name]), len(arrivals[name]), name != head, order[name]))
        if not partners[worst]:
            return blamed
        blame(worst)
