"""Judges the connections between all nodes: who cannot be reached and on which port, round trips, bandwidth. Pure.

Who refused only before it listened at all was late, and who came only after the other had ended did not try in time: neither is
a closed port. That goes by the nodes' clocks, which the check "cluster" compares.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.network_blame import fewest_to_blame
from chaosrun.preflight.model import Facts, Finding, Measure, Rows, Setting, Status
from chaosrun.wording import listed

ROWS = Rows(check="network")

SOME = 3
ROUND_TRIP_WARN = 0.05
"""On a busy machine a round trip of 0.05 ms easily takes ten times that."""
BANDWIDTH_WARN = 0.4
"""No FAIL: a head without ranks may well have a smaller network card."""
REMEDIES = {
    "refused": "nothing may listen there, or a firewall rejects: open {ports} between the nodes",
    "no answer": "packets are dropped on the way: open {ports} between the nodes in firewalls, security groups, network "
    "policies, and check the routes",
}
BUSY = "look at what keeps this node busy (load, a slow file system) and repeat; a higher --level waits longer"
RANGES = {
    "rendezvous": "the ports that the kernel gives out (sysctl net.ipv4.ip_local_port_range)",
    "gcs": "the port of Ray's head",
}


def judge_connections(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    told = facts["connections"]
    if told is None:
        if len(nodes) != 1:
            return []
        skipped = {"check": "network", "status": Status.SKIP, "node": nodes[0].name, "reason": "one node"}
        return [Finding(name=name, **skipped) for name in ("TCP connections", "TCP round trip")]
    tardy = late(told)
    # Whose own part could not run, or only too late, is no evidence against its network.
    answered = {name: found for name, found in _listening(told).items() if name not in tardy}
    failed = [
        {**failure, "from": name}
        for name, found in answered.items()
        for failure in found["failed"]
        if failure["purpose"] != "rendezvous" or (failure["peer"] in answered and not _missed(failure, answered))
    ]
    asked = [node for node in nodes if node.name in told["ports"]]
    head = next((node.name for node in nodes if node.head), None)
    blamed = fewest_to_blame([node.name for node in asked], {(failure["from"], failure["peer"]) for failure in failed}, head)
    findings: list[Finding] = []
    for name in blamed:
        against = [failure for failure in failed if name in (failure["from"], failure["peer"])]
        # What it fails in with another that is blamed says less.
        clear = [failure for failure in against if not {failure["from"], failure["peer"]} - {name} & set(blamed)]
        findings += _against(name, clear or against, len(asked))
    for node in asked:
        if node.name not in answered:
            findings.append(_could_not(node.name, told, tardy))
            continue
        found = answered[node.name]
        if node.name not in blamed:
            findings.append(_not_blamed(node, answered, told["ports"], blamed))
        if found["round_trip_ms"] is not None:
            findings.append(_round_trip(node.name, found["round_trip_ms"]))
    return [*findings, *_bandwidths(answered)]


def late(told: Facts) -> dict[str, float]:
    """Nodes that began to listen only when somebody had given up on them, and how many seconds after the first that was."""
    listening = _listening(told)
    first = min((found["listened"][0] for found in listening.values()), default=0.0)
    given_up = {
        (failure["peer"], failure["tried"][1])
        for found in listening.values()
        for failure in found["failed"]
        if failure["purpose"] == "rendezvous" and failure["error"] == "refused"
    }
    began = {name: found["listened"][0] for name, found in listening.items()}
    return {name: began[name] - first for name, at in sorted(given_up) if name in began and at < began[name]}


def _listening(told: Facts) -> dict[str, Facts]:
    return {name: found for name, found in told["answered"].items() if "taken" not in found}


def _missed(failure: Mapping[str, Any], answered: Mapping[str, Facts]) -> bool:
    """Whether the peer had ended when it was first tried."""
    return failure["error"] == "refused" and failure["tried"][0] > answered[failure["peer"]]["listened"][1]


def _against(name: str, failed: Sequence[Mapping[str, Any]], size: int) -> list[Finding]:
    """One FAIL for each port of it that others do not reach, and one for all that it does not reach itself."""
    findings: list[Finding] = []
    inward = [failure for failure in failed if failure["peer"] == name]
    for purpose in dict.fromkeys(failure["purpose"] for failure in inward):
        these = [failure for failure in inward if failure["purpose"] == purpose]
        by = [f"{name} itself" if failure["from"] == name else failure["from"] for failure in these]
        findings.append(
            _failure(name, f"port {these[0]['port']} ({purpose})", f"not reached by {listed(by, SOME)} of {size} nodes", these)
        )
    outward = [failure for failure in failed if failure["from"] == name and failure["peer"] != name]
    if outward:
        to = [f"{failure['peer']} port {failure['port']}" for failure in outward]
        findings.append(_failure(name, None, f"it does not reach {listed(to, SOME)}", outward))
    return findings


def _failure(name: str, device: str | None, measured: str, failed: Sequence[Mapping[str, Any]]) -> Finding:
    said = failed[0]["error"]
    ports = RANGES.get(failed[0]["purpose"], f"Ray's port of its {failed[0]['purpose']}")
    cause = "no answer" if said.startswith("no answer") else said
    remedy = REMEDIES.get(cause, "check the network between this node and the others: open {ports}").format(ports=ports)
    return ROWS.fail(
        f"{measured}: {said}", "every node connects to every node", remedy, name="TCP connections", node=name, device=device
    )


def _could_not(name: str, told: Facts, tardy: Mapping[str, float]) -> Finding:
    about: dict[str, Any] = {"check": "network", "name": "TCP connections", "status": Status.ERROR, "node": name}
    if name in tardy:
        why = f"it began to listen {tardy[name]:.1f} s after the first node, when others had given up on it"
        return Finding(**about, reason=why, remedy=BUSY)
    if name in told["unanswered"]:
        return Finding(**about, reason=told["unanswered"][name]["error"], remedy=BUSY)
    why = f"cannot listen on port {told['ports'][name]}: {told['answered'][name]['taken']}"
    return Finding(**about, reason=why, remedy="repeat with --only network: ports are chosen anew")


def _not_blamed(node: Node, answered: Mapping[str, Facts], ports: Mapping[str, int], blamed: Sequence[str]) -> Finding:
    """PASS where every other node was reached, or is blamed for it that it was not, or says itself why it could not be."""
    about: dict[str, Any] = {"check": "network", "name": "TCP connections", "node": node.name}
    found, others = answered[node.name], len(ports) - 1
    reached = found["reached"] - 1
    measured = f"reaches {reached} of {others} others and itself"
    missed = found["untried"] + sum(failure["peer"] in answered and _missed(failure, answered) for failure in found["failed"])
    if missed:
        why = f"{missed} of {others} others were not tried in time"
        return ROWS.error(why, BUSY, measured=measured, **about)
    if answered.keys() == {node.name}:
        return ROWS.skip("no other node could take its part in time", measured=measured, **about)
    known = {"node manager", "object manager", "gcs"}
    used = [f"{purpose} {number}" for purpose, number in node.ports.items() if purpose in known and number > 0]
    reason = f"ports {', '.join([*used, f'rendezvous {ports[node.name]}'])}"
    if reached < others and blamed:
        reason += f"; what fails is told of {listed(list(blamed), SOME)}"
    return ROWS.passed(measured, reason=reason, **about)


def _round_trip(name: str, found: Mapping[str, Any]) -> Finding:
    return ROWS.passed(
        f"{found['median']:.2g} ms, to {found['peer']} {found['worst']:.2g} ms",
        name="TCP round trip",
        node=name,
        measure=Measure(number=found["median"], unit="ms", better="lower", warn=ROUND_TRIP_WARN),
    )


def _bandwidths(answered: Mapping[str, Facts]) -> list[Finding]:
    """Of each node the best of what it sent and received: one slow end spoils only the streams that it takes part in."""
    streams = [(name, stream["peer"], stream) for name, found in answered.items() for stream in found["streams"]]
    findings: list[Finding] = []
    for name in answered:
        speeds = {
            f"to {to}" if sender == name else f"from {sender}": stream["bytes"] / max(stream["seconds"], 1e-9) / 1e9
            for sender, to, stream in streams
            if name in (sender, to)
        }
        if speeds:
            best = max(speeds.values())
            findings.append(
                ROWS.passed(
                    ", ".join(f"{speed:.2g} GB/s {which}" for which, speed in speeds.items()),
                    name="TCP bandwidth",
                    node=name,
                    measure=Measure(number=best, unit="GB/s", better="higher", warn=BANDWIDTH_WARN),
                )
            )
    return findings
