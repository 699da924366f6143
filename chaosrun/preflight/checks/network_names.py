"""Judges what nodes make of each other's names and addresses, and through which interfaces they talk. Pure.

Ray and chaosrun go by addresses, so that a name nobody resolves is a WARN at most. One name matters: gloo binds to what a
node's own hostname resolves to, unless GLOO_SOCKET_IFNAME names an interface, and other nodes must be able to reach that.
"""

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.model import Facts, Finding, Rows, Setting, Status

ROWS = Rows(check="network")

Interfaces = Mapping[str, Mapping[str, Any]]

SLOW_S = 1.0
SOME = 3
"""So many names are spelled out."""


def judge_names(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    answered: Mapping[str, Facts] = facts["names"]["answered"]
    findings: list[Finding] = []
    for node in nodes:
        if node.name in answered:
            backends = [backend for backend, names in facts["backends"] if node.name in names]
            found = answered[node.name]
            elsewhere = [
                other for other in nodes if other.name in answered and answered[other.name]["network"] != found["network"]
            ]
            findings += [
                _interface(node, found, backends, alone=not elsewhere),
                _forward(node, nodes, answered),
                _backward(node, nodes, found),
            ]
        elif node.name in facts["names"]["unanswered"]:
            why = facts["names"]["unanswered"][node.name]["error"]
            remedy = "look at this node's name server (/etc/resolv.conf) and at its load, and repeat"
            error: dict[str, Any] = {"check": "network", "name": "interface", "status": Status.ERROR, "node": node.name}
            findings.append(Finding(**error, reason=why, remedy=remedy))
    return findings


def _interface(node: Node, found: Facts, backends: Sequence[str], *, alone: bool) -> Finding:
    """Where ranks of this node will be reached."""
    interfaces: Interfaces = found["interfaces"]
    about: dict[str, Any] = {"check": "network", "name": "interface", "node": node.name}
    wrong = _chosen_in_vain(about, found, backends) or _no_way(about, node, found, alone=alone)
    if wrong is not None:
        return wrong
    if "gloo" in backends and "GLOO_SOCKET_IFNAME" not in found["environment"] and not alone:
        return _gloo(about, node, found)
    chosen = [f"{name}={value}" for name, value in sorted(found["environment"].items()) if not alone]
    return ROWS.passed(", ".join([_named(node.address, interfaces), *chosen]), **about)


def _chosen_in_vain(about: Mapping[str, Any], found: Facts, backends: Sequence[str]) -> Finding | None:
    """A variable that names no interface of this node."""
    interfaces: Interfaces = found["interfaces"]
    for backend in ("nccl", "gloo"):
        variable = f"{backend.upper()}_SOCKET_IFNAME"
        chosen = found["environment"].get(variable)
        if chosen is not None and not _matching(backend, chosen, interfaces):
            return ROWS.row(
                Status.FAIL if backend in backends else Status.WARN,
                f"{variable}={chosen} names no interface with an address",
                f"one of {', '.join(sorted(name for name in interfaces if interfaces[name]['addresses']))}",
                remedy=f"set {variable} on this node to the interface that the other nodes reach, or unset it everywhere",
                **about,
            )
    return None


def _no_way(about: Mapping[str, Any], node: Node, found: Facts, *, alone: bool) -> Finding | None:
    if error := found["route"].get("error"):
        return ROWS.fail(
            error, "a route to every node", "check this node's network interface and its routes (ip route)", **about
        )
    if ipaddress.ip_address(node.address).is_loopback and not alone:
        return ROWS.fail(
            f"Ray knows this node as {node.address}, which leads every other node to itself",
            "an address that the other nodes can reach",
            "start Ray there with --node-ip-address and the address of its network interface",
            **about,
        )
    return None


def _gloo(about: Mapping[str, Any], node: Node, found: Facts) -> Finding:
    """Of the addresses of its own name gloo takes the first that it can bind to, and the loopback one when there is none."""
    own: Mapping[str, Any] = found["own"]
    interfaces: Interfaces = found["interfaces"]
    own_addresses = [address for address in own.get("found", ()) if _interface_of(address, interfaces)]
    usable = own_addresses[0] if own_addresses else None
    if usable is not None and not ipaddress.ip_address(usable).is_loopback:
        return ROWS.passed(f"gloo: {_named(usable, interfaces)}", **about)
    to = ", ".join(own.get("found", ())) or f"nothing ({own.get('error')})"
    return ROWS.fail(
        f"its own hostname {found['hostname']} resolves to {to}: gloo would listen on the loopback interface",
        f"an address that the other nodes can reach, like {node.address}",
        f"set GLOO_SOCKET_IFNAME to the interface of {node.address}, or give {found['hostname']} that address in /etc/hosts",
        **about,
    )


def _matching(backend: str, chosen: str, interfaces: Interfaces) -> list[str]:
    """Interfaces that a *_SOCKET_IFNAME means: gloo knows a list of names; NCCL's are beginnings of names, whole names after a
    "=", and after a "^" those that are not to be used (docs.nvidia.com, NCCL, environment variables)."""
    usable = [name for name, about in interfaces.items() if about["addresses"] and about["up"]]
    if backend == "gloo":
        return [name for name in chosen.split(",") if name in usable]
    excluded, exact = chosen.startswith("^"), chosen.lstrip("^").startswith("=")
    wanted = [part for part in chosen.lstrip("^").lstrip("=").split(",") if part]
    return [name for name in usable if any(name == part if exact else name.startswith(part) for part in wanted) != excluded]


def _interface_of(address: str, interfaces: Interfaces) -> str | None:
    if ipaddress.ip_address(address).is_loopback:
        return "lo"
    return next((name for name, about in interfaces.items() if address in about["addresses"]), None)


def _named(address: str, interfaces: Interfaces) -> str:
    name = _interface_of(address, interfaces)
    return f"{name} {address}" if name else f"{address} (on no interface here: translated on the way)"


def _forward(node: Node, nodes: Sequence[Node], answered: Mapping[str, Facts]) -> Finding:
    found = answered[node.name]
    about: dict[str, Any] = {"check": "network", "name": "names of the nodes", "node": node.name}
    if len(nodes) == 1:
        return _alone(about)
    by_name = {other.name: other for other in nodes}
    wrong = {
        name: said
        for name, answer in found["astray"].items()
        if name in by_name and (said := _astray(found, by_name[name], answered.get(name), answer)) is not None
    }
    if wrong:
        some = "; ".join(f"{by_name[name].hostname} {said}" for name, said in list(wrong.items())[:SOME])
        return ROWS.warn(
            f"of {found['asked']} names {len(wrong)} lead nowhere or elsewhere: {some}",
            "the address that Ray knows, or another one of that node",
            "complete DNS or /etc/hosts on this node, where scripts use names",
            reason="Ray, torch and chaosrun go by addresses; a script that connects by name would fail",
            **about,
        )
    if found["slowest_s"] > SLOW_S:
        return ROWS.warn(
            f"looking up {found['slowest']} took {found['slowest_s']:.1f} s",
            f"at most {SLOW_S:g} s",
            "repair the name server in this node's /etc/resolv.conf: libraries wait for it when they start",
            **about,
        )
    return ROWS.passed(f"{found['asked']} others, within {found['slowest_s'] * 1000:.0f} ms", **about)


def _astray(here: Facts, other: Node, there: Facts | None, answer: Mapping[str, Any]) -> str | None:
    """What is wrong with an answer that lacks the address that Ray knows of a node; None: it leads there all the same."""
    if "error" in answer:
        return f"does not resolve ({answer['error']})"
    got = ", ".join(answer["found"])
    if there is None or there["network"] == here["network"]:
        # On one machine every address of it leads there.
        local = [address for address in answer["found"] if _interface_of(address, here["interfaces"])]
        return None if local or there is None else f"resolves to {got} instead of {other.address}"
    if any(not ipaddress.ip_address(address).is_loopback for address in answer["found"]) and any(
        address in about["addresses"] for about in there["interfaces"].values() for address in answer["found"]
    ):
        return None
    return f"resolves to {got} instead of {other.address}"


def _backward(node: Node, nodes: Sequence[Node], found: Facts) -> Finding:
    about: dict[str, Any] = {"check": "network", "name": "names of addresses", "node": node.name}
    if len(nodes) == 1:
        return _alone(about)
    by_name = {other.name: other for other in nodes}
    for name, called in found["renamed"].items():
        if name not in by_name:
            continue
        for other in nodes:
            short = other.hostname.partition(".")[0].lower()
            if other.hostname != by_name[name].hostname and short in {each.partition(".")[0].lower() for each in called}:
                return ROWS.warn(
                    f"{by_name[name].address}, the address of {name}, is called {called[0]}, like {other.name}",
                    f"{by_name[name].hostname}, or no name",
                    "correct the reverse entries in DNS or /etc/hosts: logs and libraries will name the wrong node",
                    **about,
                )
    named = found["asked"] - len(found["nameless"])
    if not named:
        return ROWS.skip("addresses have no names here, and nothing needs them", **about)
    return ROWS.passed(f"{named} of {found['asked']} have one", **about)


def _alone(about: Mapping[str, Any]) -> Finding:
    return ROWS.skip("one node", **about)
