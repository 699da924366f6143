"""The addresses of a node's own hostname, its network interfaces, and a few free ports."""

import os
import socket
from contextlib import ExitStack
from pathlib import Path

import psutil
from msgspec import Struct

FREE_PORTS = 12
INTERNET = (socket.AF_INET, socket.AF_INET6)
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


class InterfaceFacts(Struct, frozen=True, kw_only=True):
    hostname: str
    own: tuple[str, ...]
    """Addresses of its hostname, in the resolver's order."""
    own_error: str
    network: str
    """Processes with the same value share their interfaces and ports."""
    interfaces: dict[str, tuple[str, ...]]
    """Their addresses."""
    environment: dict[str, str]
    free_ports: tuple[int, ...]


def probe() -> InterfaceFacts:
    hostname, own, own_error = socket.gethostname(), (), ""
    try:
        found = socket.getaddrinfo(hostname, None, type=socket.SOCK_STREAM)
        own = tuple(dict.fromkeys(str(address[0]).partition("%")[0] for *_, address in found))
    except OSError as error:
        own_error = error.strerror or str(error)
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return InterfaceFacts(
        hostname=hostname,
        own=own,
        own_error=own_error,
        network=f"{boot} {os.readlink('/proc/self/ns/net')}",
        interfaces={
            name: tuple(entry.address.partition("%")[0] for entry in addresses if entry.family in INTERNET)
            for name, addresses in psutil.net_if_addrs().items()
        },
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        free_ports=_free_ports(),
    )


def _free_ports() -> tuple[int, ...]:
    """Held all at once, so that they differ."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(FREE_PORTS)]
        for each in sockets:
            each.bind(("0.0.0.0", 0))
        return tuple(each.getsockname()[1] for each in sockets)
