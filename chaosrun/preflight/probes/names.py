"""What a node makes of the names of all nodes, through which interfaces it talks, and a few ports that are free.

Of the peers only what is out of the ordinary comes back: a cluster of hundreds would otherwise answer with hundreds of
thousands of lines.
"""

import os
import socket
import threading
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import psutil
from msgspec import Struct

LOOKUPS_AT_ONCE = 8
FREE_PORTS = 12
LOOKUP_S = 5.0
"""For all names."""
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class Peer(Struct, frozen=True, kw_only=True):
    name: str
    hostname: str
    address: str


class Lookup(Struct, frozen=True, kw_only=True):
    found: tuple[str, ...] = ()
    """In the resolver's order."""
    error: str = ""


class Interface(Struct, frozen=True, kw_only=True):
    addresses: tuple[str, ...]
    up: bool


class NamesFacts(Struct, frozen=True, kw_only=True):
    asked: int
    """How many peers were looked up."""
    hostname: str
    own: Lookup
    """Of its own hostname."""
    network: str
    """Processes for which this is equal share their interfaces and ports."""
    interfaces: dict[str, Interface]
    environment: dict[str, str]
    no_route: str
    """Why the first other one cannot be reached; empty where it can."""
    astray: dict[str, Lookup]
    """Peers to whose address their hostname does not lead."""
    slowest: str
    slowest_s: float
    """Of all hostnames."""
    free_ports: tuple[int, ...]


def probe(*, peers: list[dict[str, str]]) -> NamesFacts:
    others, hostname = [Peer(**peer) for peer in peers], socket.gethostname()
    answers, took = _look_up({hostname, *(peer.hostname for peer in others)})
    slowest = max(took, key=lambda name: took[name])
    return NamesFacts(
        asked=len(others),
        hostname=hostname,
        own=answers[hostname],
        network=_network(),
        interfaces=_interfaces(),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        no_route=_no_route(others[0].address) if others else "",
        astray={peer.name: answers[peer.hostname] for peer in others if peer.address not in answers[peer.hostname].found},
        slowest=slowest,
        slowest_s=round(took[slowest], 3),
        free_ports=_free_ports(),
    )


def _look_up(names: set[str]) -> tuple[dict[str, Lookup], dict[str, float]]:
    """The answer to each, and how long it took."""
    answers = dict.fromkeys(names, Lookup(error=f"no answer within {LOOKUP_S:g} s"))
    took = dict.fromkeys(names, LOOKUP_S)
    waiting = deque(names)

    def work() -> None:
        while True:
            try:
                name = waiting.popleft()
            except IndexError:
                return
            began = time.monotonic()
            try:
                answer = Lookup(found=_addresses(name))
            except OSError as error:
                answer = Lookup(error=error.strerror or str(error))
            took[name], answers[name] = time.monotonic() - began, answer

    # Daemons: a resolver that hangs must not keep this process.
    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(LOOKUPS_AT_ONCE, len(names)))]
    deadline = time.monotonic() + LOOKUP_S
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    # What comes later is not told.
    return dict(answers), dict(took)


def _addresses(hostname: str) -> tuple[str, ...]:
    found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
    return tuple(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))


def _network() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/net')}"


def _interfaces() -> dict[str, Interface]:
    state, internet = psutil.net_if_stats(), (socket.AF_INET, socket.AF_INET6)
    return {
        name: Interface(
            addresses=tuple(entry.address.partition("%")[0] for entry in addresses if entry.family in internet),
            up=name in state and state[name].isup,
        )
        for name, addresses in psutil.net_if_addrs().items()
    }


def _no_route(address: str) -> str:
    """Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        try:
            datagrams.connect((address, 9))
        except OSError as error:
            return f"no route to {address}: {error.strerror or error}"
    return ""


def _free_ports() -> tuple[int, ...]:
    """Held all at once, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(FREE_PORTS)]
        for each in sockets:
            each.bind(("0.0.0.0", 0))
        return tuple(each.getsockname()[1] for each in sockets)
