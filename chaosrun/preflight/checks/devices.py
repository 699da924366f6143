"""The check "devices": what each node's driver says of its GPUs, and whether each of them computes."""

from chaosrun.preflight.assess.devices import CHECK, assess
from chaosrun.preflight.assess.placement import may_take_gpus
from chaosrun.preflight.model import Call, Check, Level, Node, Setting

PATIENCE_S = {Level.QUICK: 20.0, Level.STANDARD: 40.0, Level.DEEP: 60.0}
"""Of a device, with one operation."""
LIMIT_S = {Level.QUICK: 100.0, Level.STANDARD: 150.0, Level.DEEP: 180.0}


def call(setting: Setting, node: Node) -> Call:
    return Call(
        probe="devices",
        parameters={
            "gpus": node.gpus if may_take_gpus(setting) else 0,
            "patience_s": PATIENCE_S[setting.level],
            "compute": {"threads": 1, "products": True, "training": None},
        },
        limit_s=LIMIT_S[setting.level],
        env=setting.job.spec.env if setting.job else {},
    )


DEVICES = Check(
    name="devices",
    about="number, health, room, a product on each",
    level=Level.QUICK,
    assess=assess,
    call=call,
)
assert DEVICES.name == CHECK
