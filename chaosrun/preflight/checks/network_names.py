"""Judges what nodes make of each other's names, and through which interfaces they talk. Pure.

Ray and chaosrun go by addresses, so that a name nobody resolves is a WARN at most. One name matters: gloo binds to what a
node's own hostname resolves to, unless GLOO_SOCKET_IFNAME names an interface, and other nodes must be able to reach that.
"""

from collections.abc import Mapping, Sequence
from ipaddress import ip_address

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Answers, Finding, Rows, Status
from chaosrun.preflight.probes.names import Lookup, NamesFacts

ROWS = Rows(check="network", name="interface")
SLOW_S = 1.0
SOME = 3
"""So many names are spelled out."""


def judge_names(nodes: Sequence[Node], told: Answers[NamesFacts], backends: Mapping[str, Sequence[str]]) -> list[Finding]:
    """`backends`: the nodes over which each is used."""
    findings: list[Finding] = []
    for node in nodes:
        rows = ROWS.of(node=node.name)
        if found := told.answered.get(node.name):
            used = [backend for backend, names in backends.items() if node.name in names]
            machines = {told.answered[other.name].network for other in nodes if other.name in told.answered}
            findings.append(_interface(rows, node, found, used, alone=len(machines) == 1))
            findings.append(_names(rows.of(name="names of the nodes"), nodes, found, told.answered))
        elif silence := told.unanswered.get(node.name):
            remedy = "look at this node's name server (/etc/resolv.conf) and at its load, and repeat"
            findings.append(rows.error(silence.error, remedy))
    return findings


def _interface(rows: Rows, node: Node, found: NamesFacts, backends: Sequence[str], *, alone: bool) -> Finding:
    """Where ranks of this node will be reached. `alone`: all nodes are on its machine."""
    for backend in ("nccl", "gloo"):
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        chosen = found.environment.get(variable)
        if chosen is not None and not _matching(backend, chosen, found):
            return rows.row(
                Status.FAIL if backend in backends else Status.WARN,
                f"{variable}={chosen} names no interface with an address",
                f"one of {', '.join(sorted(name for name, interface in found.interfaces.items() if interface.addresses))}",
                remedy=f"set {variable} on this node to the interface that the other nodes reach, or unset it everywhere",
            )
    if found.no_route:
        return rows.fail(
            found.no_route, "a route to every node", "check this node's network interface and its routes (ip route)"
        )
    if ip_address(node.address).is_loopback and not alone:
        return rows.fail(
            f"Ray knows this node as {node.address}, which leads every other node to itself",
            "an address that the other nodes can reach",
            "start Ray there with --node-ip-address and the address of its network interface",
        )
    if "gloo" in backends and "GLOO_SOCKET_IFNAME" not in found.environment and not alone:
        return _gloo(rows, found)
    chosen = [f"{name}={value}" for name, value in sorted(found.environment.items()) if not alone]
    return rows.passed(", ".join([_named(node.address, found), *chosen]))


def _gloo(rows: Rows, found: NamesFacts) -> Finding:
    """Of the addresses of its own name gloo takes the first that it can bind to, and the loopback one when there is none."""
    usable = next((address for address in found.own.found if _interface_of(address, found)), None)
    if usable is not None and not ip_address(usable).is_loopback:
        return rows.passed(f"gloo: {_named(usable, found)}")
    to = ", ".join(found.own.found) or f"nothing ({found.own.error})"
    return rows.fail(
        f"its own hostname {found.hostname} resolves to {to}: gloo would listen on the loopback interface",
        "an address that the other nodes can reach, like the one that Ray knows",
        "set GLOO_SOCKET_IFNAME to the interface of that address, or give the hostname that address in /etc/hosts",
    )


def _matching(backend: str, chosen: str, found: NamesFacts) -> list[str]:
    """Interfaces that a *_SOCKET_IFNAME means: gloo knows a list of names; NCCL's are beginnings of names, whole names after a
    "=", and after a "^" those that are not to be used (docs.nvidia.com, NCCL, environment variables)."""
    usable = [name for name, interface in found.interfaces.items() if interface.addresses and interface.up]
    if backend == "gloo":
        return [name for name in chosen.split(",") if name in usable]
    excluded, exact = chosen.startswith("^"), chosen.lstrip("^").startswith("=")
    wanted = [part for part in chosen.lstrip("^").lstrip("=").split(",") if part]
    return [name for name in usable if any(name == part if exact else name.startswith(part) for part in wanted) != excluded]


def _interface_of(address: str, found: NamesFacts) -> str | None:
    if ip_address(address).is_loopback:
        return "lo"
    return next((name for name, interface in found.interfaces.items() if address in interface.addresses), None)


def _named(address: str, found: NamesFacts) -> str:
    name = _interface_of(address, found)
    return f"{name} {address}" if name else f"{address} (on no interface here: translated on the way)"


def _names(rows: Rows, nodes: Sequence[Node], here: NamesFacts, answered: Mapping[str, NamesFacts]) -> Finding:
    if len(nodes) == 1:
        return rows.skip("one node")
    wrong = [
        f"{other.hostname} {said}"
        for other in nodes
        if other.name in here.astray and (said := _astray(here, other, answered.get(other.name), here.astray[other.name]))
    ]
    if wrong:
        return rows.warn(
            f"of {here.asked} names {len(wrong)} lead nowhere or elsewhere: {'; '.join(wrong[:SOME])}",
            "the address that Ray knows, or another one of that node",
            "complete DNS or /etc/hosts on this node, where scripts use names",
            reason="Ray, torch and chaosrun go by addresses; a script that connects by name would fail",
        )
    if here.slowest_s > SLOW_S:
        return rows.warn(
            f"looking up {here.slowest} took {here.slowest_s:.1f} s",
            f"at most {SLOW_S:g} s",
            "repair the name server in this node's /etc/resolv.conf: libraries wait for it when they start",
        )
    return rows.passed(f"{here.asked} others, within {here.slowest_s * 1000:.0f} ms")


def _astray(here: NamesFacts, other: Node, there: NamesFacts | None, answer: Lookup) -> str:
    """What is wrong with an answer that lacks the address that Ray knows of a node; empty: it leads there all the same."""
    if answer.error:
        return f"does not resolve ({answer.error})"
    if there is None:
        return ""
    own = [address for address in answer.found if _interface_of(address, there)]
    # On one machine every address of it leads there.
    if own and (there.network == here.network or not all(ip_address(address).is_loopback for address in own)):
        return ""
    return f"resolves to {', '.join(answer.found)} instead of {other.address}"
