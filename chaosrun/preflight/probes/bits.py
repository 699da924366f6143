"""A little training on every device of this node, again and again. On the CPU products too: there torch is loaded once."""

from dataclasses import dataclass
from typing import Any

from chaosrun.preflight.probes.devices import ask_driver
from chaosrun.preflight.probes.per_device import Computed, compute, gpu_devices, visible_gpus


@dataclass(frozen=True, slots=True, kw_only=True)
class BitsFacts:
    computed: dict[str, Computed]
    """By the device's name."""


def probe(*, gpus: int, patience_s: float, work: dict[str, Any]) -> BitsFacts:
    """`gpus`: as Ray counts them; `patience_s` of a phase; `work`: what the probe `compute` takes."""
    uuids = [gpu.uuid for gpu in ask_driver().gpus if gpu.uuid] if gpus else []
    devices = {"cpu": "", **(gpu_devices(gpus, visible_gpus(), uuids) if gpus else {})}
    orders = {name: {**work, "visible": token, "products": name == "cpu"} for name, token in devices.items()}
    return BitsFacts(computed=compute(orders, patience_s))
