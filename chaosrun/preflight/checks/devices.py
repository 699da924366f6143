"""The check "devices": what each node's driver says of its GPUs, and whether each of them computes."""

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.assess.devices import assess
from chaosrun.preflight.model import PROBES, Check, Level, Setting
from chaosrun.preflight.placement import may_take_gpus

PATIENCE_S = {Level.QUICK: 20.0, Level.STANDARD: 40.0, Level.DEEP: 60.0}
"""Of a device, with one operation."""
LIMIT_S = {Level.QUICK: 100.0, Level.STANDARD: 150.0, Level.DEEP: 180.0}


def call(setting: Setting, node: Node) -> Call:
    return Call(
        probe=f"{PROBES}.devices",
        parameters={
            "gpus": node.gpus if may_take_gpus(setting) else 0,
            "patience_s": PATIENCE_S[setting.level],
            "compute": {"threads": 1, "products": True, "training": None},
        },
        limit_s=LIMIT_S[setting.level],
        env=setting.job.spec.env if setting.job else {},
    )


CHECK = Check(
    name="devices",
    about="number, health, room, a product on each",
    order=30,
    level=Level.QUICK,
    judge=assess,
    call=call,
)
