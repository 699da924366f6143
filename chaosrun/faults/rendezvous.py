"""Faults of the rendezvous: another process has its port, or a rank never arrives."""

import os
import re
import signal
import subprocess
import sys
from functools import partial

from chaosrun.faults.kind import Kind
from chaosrun.faults.observed import Disproof, Observation, alive, other_error
from chaosrun.faults.strike import Strike
from chaosrun.records.markers import Note

STRANGER = """\
import signal, socket, sys
taken = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=128)
print("taken", flush=True)
while True:
    signal.pause()
"""


class PortNote(Note, frozen=True, kw_only=True):
    port: int | None = None
    stranger: int | None = None


def port_taken(strike: Strike) -> None:
    """Release the port held for the rendezvous, let another process take it, and try to host the rendezvous there nevertheless.

    That process (the stranger) is in this rank's process group, so that it dies with the rank.
    """
    import torch

    order = strike.order
    if strike.at["listen_fd"] is not None:
        os.close(strike.at["listen_fd"])
    address = order.master_addr if order.master_addr.startswith("127.") else "0.0.0.0"
    stranger = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", STRANGER, address, str(order.master_port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert stranger.stdout is not None
    if stranger.stdout.readline() != b"taken\n":
        strike.note(PortNote(problem=f"port {order.master_port} could not be taken: process {stranger.pid} left"))
    else:
        strike.note(PortNote(port=order.master_port, stranger=stranger.pid))
    torch.distributed.TCPStore("127.0.0.1", order.master_port, None, is_master=True, wait_for_workers=False)
    strike.note(PortNote(problem=f"port {order.master_port} was taken, and yet the rendezvous could be hosted there"))
    raise RuntimeError(f"fault {strike.fault.id}: the rendezvous could be hosted at a port that was taken")


def no_arrival(strike: Strike) -> None:
    while True:
        signal.pause()


def _port_in_use(seen: Observation) -> Disproof | None:
    """Why the error is not torch's about this port; None when it is."""
    note: PortNote | None = seen.note
    if note is None or note.port is None:
        return Disproof("nothing_said", "the fault's record names no port")
    wanted = rf"^DistNetworkError: .*\bport: {note.port}\b.*\bEADDRINUSE\b"
    return other_error(seen, unless=bool(re.search(wanted, seen.error)))


def _not_arrived(seen: Observation) -> Disproof | None:
    assert seen.hang is not None
    told = f"it was at the stage {seen.hang.stage}, past the rendezvous that it was never to reach"
    return alive(seen) or (None if seen.hang.stage == "started" else Disproof("beyond_the_rendezvous", told))


_of_rendezvous = partial(Kind, family="rendezvous", phases=frozenset({"rendezvous"}), default_phase="rendezvous")

KINDS = (
    _of_rendezvous(
        name="port_taken",
        words="a stranger takes the rendezvous port of {rank}",
        proof="the end record of rank 0 names EADDRINUSE, of the very port that it was to host the rendezvous at",
        only_rank=0,
        needs_peers="needs no rendezvous port",
        inside=port_taken,
        exit_code="failure",
        note=PortNote,
        shows=_port_in_use,
        tell=lambda seen: f"{seen.process}: EADDRINUSE at port {seen.note.port}, held by pid {seen.note.stranger}",
    ),
    _of_rendezvous(
        name="no_arrival",
        words="{rank} never arrives",
        proof="the hang was declared and this rank named as the one that never arrived",
        inside=no_arrival,
        evidence="hang",
        shows=_not_arrived,
        tell=lambda seen: f"{seen.process}: alive, never at the rendezvous {seen.standstill}",
    ),
)
