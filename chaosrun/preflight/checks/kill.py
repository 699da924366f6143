"""The check "kill": a worker with children is killed on every node, and nothing of it may be left."""

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.assess.kill import LIMIT_S, assess_kill
from chaosrun.preflight.model import PROBES, Check, Level, Setting
from chaosrun.preflight.placement import may_take_gpus

DEVICES_S = 60.0
"""For torch to be imported and CUDA to start in the worker that is to be killed."""


def call(setting: Setting, node: Node) -> Call:
    gpus = node.gpus if may_take_gpus(setting) else 0
    # Processes, port and device memory have their time one after the other.
    limit_s = 4 * LIMIT_S + 10 + (DEVICES_S if gpus else 0)
    return Call(probe=f"{PROBES}.kill", parameters={"limit_s": LIMIT_S, "gpus": gpus}, limit_s=limit_s)


CHECK = Check(
    name="kill",
    about="a killed worker is gone, with all it held",
    order=60,
    level=Level.QUICK,
    judge=assess_kill,
    call=call,
)
