"""The check "shared storage": nodes look for each other's files."""

import secrets

from chaosrun.cluster.probing import Call
from chaosrun.preflight.assess.shared_storage import assess
from chaosrun.preflight.model import PROBES, Check, Facts, Level, Pool, Setting

_EFFORT = {
    Level.QUICK: {"meet_s": 3.0, "names": 40, "rounds": 20, "ring_s": 0.5, "wait_s": 3.0, "patience_s": 8.0},
    Level.STANDARD: {"meet_s": 10.0, "names": 100, "rounds": 100, "ring_s": 2.0, "wait_s": 5.0, "patience_s": 25.0},
    # Longer than a client of NFS keeps what it knows of a directory.
    Level.DEEP: {"meet_s": 65.0, "names": 1000, "rounds": 1000, "ring_s": 20.0, "wait_s": 65.0, "patience_s": 65.0},
}
NODE_S = 0.01
"""More of them take longer to look for each other."""
MARGIN_S = 7.0


def _gather(setting: Setting, pool: Pool) -> Facts:
    """{"names": of the nodes by number, "answered", "unanswered"}; a node alone is asked nothing."""
    names = [node.name for node in pool.nodes]
    if len(names) < 2:
        return {"names": names, "answered": {}, "unanswered": {}}
    effort = dict(_EFFORT[setting.level])
    effort["meet_s"] += NODE_S * len(names)
    limit_s = effort["meet_s"] + effort["ring_s"] + 3 * effort["wait_s"] + effort["patience_s"]
    about = {"storage": str(setting.storage), "token": secrets.token_hex(8), "number": len(names), "limit_s": limit_s}
    calls = {
        name: Call(probe=f"{PROBES}.shared_storage", parameters={**about, **effort, "me": number}, limit_s=limit_s + MARGIN_S)
        for number, name in enumerate(names)
    }
    return {"names": names, **pool.ask(calls, dict).raw()}


CHECK = Check(
    name="shared storage",
    about="what one node saves, the others see: whole, soon, and created once",
    order=80,
    level=Level.QUICK,
    gather=_gather,
    judge=assess,
)
