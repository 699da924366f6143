"""A little training on every device of this node, again and again. On the CPU products too: there torch is loaded once."""

from typing import Any

from chaosrun.preflight.model import Facts
from chaosrun.preflight.probes.devices import ask_driver
from chaosrun.preflight.probes.per_device import compute, gpu_devices, visible_gpus


def probe(**parameters: Any) -> Facts:
    """`gpus`: as Ray counts them; `patience_s` of a phase; `compute`: what the probe `compute` takes."""
    gpus = {}
    if parameters["gpus"]:
        uuids = [gpu["uuid"] for gpu in ask_driver()["gpus"] if gpu["uuid"]]
        gpus = gpu_devices(parameters["gpus"], visible_gpus(), uuids)
    orders = {
        name: {**parameters["compute"], "visible": token, "products": name == "cpu"}
        for name, token in {"cpu": "", **gpus}.items()
    }
    return {"computed": compute(orders, parameters["patience_s"])}
