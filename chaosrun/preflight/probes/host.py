"""The machine under a node: what it has, what uses it, what it has left over and what its kernel complains of."""

from dataclasses import dataclass

from chaosrun.preflight.probes.busy import Busy, LeftOver, busy, left_over
from chaosrun.preflight.probes.kernel_log import KernelLog, kernel_log
from chaosrun.preflight.probes.room import Cpus, Limits, Memory, Place, SharedMemory, cpus, limits, memory, shared_memory
from chaosrun.preflight.probes.room import places as places_of


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    cpus: Cpus
    memory: Memory
    places: dict[str, Place]
    """By purpose."""
    shared_memory: SharedMemory
    limits: Limits
    busy: Busy
    left_over: LeftOver
    kernel_log: KernelLog


def probe(*, places: dict[str, str]) -> HostFacts:
    """`places`: paths by purpose."""
    return HostFacts(
        cpus=cpus(),
        memory=memory(),
        places=places_of(places),
        shared_memory=shared_memory(),
        limits=limits(),
        busy=busy(),
        left_over=left_over(),
        kernel_log=kernel_log(),
    )
