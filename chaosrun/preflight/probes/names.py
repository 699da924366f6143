"""What a node makes of the names and addresses of all nodes, through which interfaces it talks, and a few ports that are free.

Parameters: peers [{name, hostname, address}], limit_s. Of the peers only what is out of the ordinary comes back: a cluster of
hundreds would otherwise answer with hundreds of thousands of lines.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from chaosrun.preflight.model import Facts

LOOKUPS_AT_ONCE = 8
FREE_PORTS = 12
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def probe(**parameters: Any) -> Facts:
    peers: list[dict[str, str]] = parameters["peers"]
    hostname = socket.gethostname()
    interfaces = _interfaces()
    questions: dict[tuple[str, str], Callable[[], list[str]]] = {("forward", hostname): lambda: _addresses(hostname)}
    for peer in peers:
        name, address = peer["hostname"], peer["address"]
        questions["forward", name] = lambda name=name: _addresses(name)
        questions["backward", address] = lambda address=address: _names(address)
    answers, slowest_s, slowest = _ask(questions, parameters["limit_s"])
    astray = {
        peer["name"]: answers["forward", peer["hostname"]]
        for peer in peers
        if peer["address"] not in answers["forward", peer["hostname"]].get("found", ())
    }
    back = {peer["name"]: answers["backward", peer["address"]].get("found", []) for peer in peers}
    return {
        "asked": len(peers),
        "hostname": hostname,
        "own": answers["forward", hostname],
        "network": _network(),
        "interfaces": interfaces,
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "route": _route(peers),
        "astray": astray,
        "nameless": sorted(name for name, names in back.items() if not names),
        "renamed": {
            peer["name"]: back[peer["name"]]
            for peer in peers
            if back[peer["name"]] and _short(peer["hostname"]) not in map(_short, back[peer["name"]])
        },
        "slowest": slowest,
        "slowest_s": slowest_s,
        "free_ports": _free_ports(),
    }


def _ask(
    questions: dict[tuple[str, str], Callable[[], list[str]]], limit_s: float
) -> tuple[dict[tuple[str, str], dict[str, Any]], float, str]:
    """The answer to each, {found} or {error}; how long the slowest of the names took, and which that was."""
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    took: dict[tuple[str, str], float] = {}
    waiting = deque(questions.items())

    def work() -> None:
        while True:
            try:
                key, question = waiting.popleft()
            except IndexError:
                return
            began = time.monotonic()
            try:
                answer: dict[str, Any] = {"found": question()}
            except OSError as error:
                answer = {"error": error.strerror or str(error)}
            took[key] = time.monotonic() - began
            answers[key] = answer

    # Daemons: a resolver that hangs must not keep this process.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(LOOKUPS_AT_ONCE, len(questions)))]
    deadline = time.monotonic() + limit_s
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    late = [key for key in questions if key not in answers]
    given = {**answers, **{key: {"error": f"no answer within {limit_s:g} s"} for key in late}}
    # Nothing waits for an address to get a name.
    by_name = {key: took.get(key, limit_s) for key in questions if key[0] == "forward"}
    slowest = max(by_name, key=lambda key: by_name[key])
    return given, round(by_name[slowest], 3), slowest[1]


def _addresses(hostname: str) -> list[str]:
    """In the resolver's order."""
    found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _names(address: str) -> list[str]:
    name, aliases, _ = socket.gethostbyaddr(address)
    return [name, *aliases]


def _short(hostname: str) -> str:
    return hostname.partition(".")[0].lower()


def _network() -> str:
    """Processes for which this is equal share their interfaces and ports."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _interfaces() -> dict[str, dict[str, Any]]:
    state = psutil.net_if_stats()
    found: dict[str, dict[str, Any]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ip = [entry.address.partition("%")[0] for entry in addresses if entry.family in (socket.AF_INET, socket.AF_INET6)]
        about = state.get(name)
        found[name] = {"addresses": ip, "up": about is not None and about.isup, "mbps": about.speed if about else 0}
    return found


def _route(peers: list[dict[str, str]]) -> dict[str, str]:
    """Own address towards the first other one. Nothing is sent."""
    for peer in peers:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
            try:
                datagrams.connect((peer["address"], 9))
            except OSError as error:
                return {"error": f"no route to {peer['address']}: {error.strerror or error}"}
            return {"address": datagrams.getsockname()[0]}
    return {}


def _free_ports() -> list[int]:
    """Held all at once, so that they differ."""
    sockets = [socket.socket() for _ in range(FREE_PORTS)]
    try:
        for each in sockets:
            each.bind(("0.0.0.0", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
