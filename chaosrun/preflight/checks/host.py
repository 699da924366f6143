"""The check "host": what the machine under each node has, and what else goes on on it."""

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.assess.host import assess
from chaosrun.preflight.model import PROBES, Check, Level, Setting

LIMIT_S = 15.0


def call(setting: Setting, node: Node) -> Call:
    places = {"storage": setting.storage}
    if not setting.storage.is_relative_to(setting.root):
        places["runs"] = setting.root
    return Call(
        probe=f"{PROBES}.host",
        parameters={"places": {purpose: str(path) for purpose, path in places.items()}},
        limit_s=LIMIT_S,
    )


CHECK = Check(
    name="host",
    about="memory, processors, disks, limits, what else runs",
    order=20,
    level=Level.QUICK,
    judge=assess,
    call=call,
)
