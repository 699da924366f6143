"""Faults of the rendezvous: its port is somebody else's, or a rank does not come."""

import os
import signal
import subprocess
import sys

from chaosrun.faults.kind import Kind
from chaosrun.faults.observed import Observation, Problem, alive
from chaosrun.faults.strike import Strike

STRANGER = """\
import signal, socket, sys
taken = socket.create_server((sys.argv[1], int(sys.argv[2])), backlog=128)
print("taken", flush=True)
while True:
    signal.pause()
"""


def port_taken(strike: Strike) -> None:
    """Give the port up that was held for the rendezvous, have a stranger take it, and host the rendezvous there all the same.

    The stranger is a process of its own, in this rank's process group, so that it dies with the rank.
    """
    import torch

    order = strike.order
    os.close(strike.at["listen_fd"])
    address = order.master_addr if order.master_addr.startswith("127.") else "0.0.0.0"
    stranger = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", STRANGER, address, str(order.master_port)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    )
    assert stranger.stdout is not None
    if stranger.stdout.readline() != b"taken\n":
        strike.note(problem=f"port {order.master_port} could not be taken: process {stranger.pid} left")
    else:
        strike.note(port=order.master_port, stranger=stranger.pid)
    torch.distributed.TCPStore("127.0.0.1", order.master_port, None, is_master=True, wait_for_workers=False)
    strike.note(problem=f"port {order.master_port} was taken, and yet the rendezvous could be hosted there")
    raise RuntimeError(f"fault {strike.fault.id}: the rendezvous could be hosted at a port that was taken")


def no_arrival(strike: Strike) -> None:
    """Never come to the rendezvous."""
    while True:
        signal.pause()


def _not_arrived(seen: Observation) -> Problem | None:
    stage = seen.found.get("stage")
    told = f"it was at the stage {stage}, beyond the rendezvous that it was not to come to"
    return alive(seen) or (None if stage == "started" else Problem("beyond_the_rendezvous", told))


def _tell_port(seen: Observation) -> str:
    return f"{seen.process}: EADDRINUSE at port {seen.note.get('port')}, held by pid {seen.note.get('stranger')}"


_AT_THE_RENDEZVOUS = frozenset({"rendezvous"})

KINDS = (
    Kind(
        name="port_taken",
        family="rendezvous",
        words="a stranger takes the rendezvous port of {rank}",
        proof="the end record of rank 0 names EADDRINUSE, of the very port that it was to host the rendezvous at",
        phases=_AT_THE_RENDEZVOUS,
        default_phase="rendezvous",
        only_rank=0,
        needs_peers="needs no rendezvous port",
        inside=port_taken,
        exit_codes="failure",
        tell=_tell_port,
        error=r"^DistNetworkError: .*\bport: {port}\b.*\bEADDRINUSE\b",
    ),
    Kind(
        name="no_arrival",
        family="rendezvous",
        words="{rank} never arrives",
        proof="the hang was declared and this rank named as the one that never arrived",
        phases=_AT_THE_RENDEZVOUS,
        default_phase="rendezvous",
        inside=no_arrival,
        evidence="hang",
        shows=_not_arrived,
        tell=lambda seen: f"{seen.process}: alive, never at the rendezvous{seen.silence}",
    ),
)
