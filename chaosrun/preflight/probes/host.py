"""The machine under a node: what it has, what uses it, what it has left over and what its kernel complains of."""

from typing import Any

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.busy import busy, left_over
from chaosrun.preflight.probes.kernel_log import kernel_log
from chaosrun.preflight.probes.room import cpus, limits, memory, places, shared_memory


def probe(**parameters: Any) -> Facts:
    """Parameters: {places: {purpose: path}}."""
    return {
        "cpus": cpus(),
        "memory": memory(),
        "places": places(parameters["places"]),
        "shared_memory": shared_memory(),
        "limits": limits(),
        "busy": busy(),
        "left_over": left_over(),
        "kernel_log": kernel_log(),
    }
