"""The check "storage": what each node finds out of its own storage."""

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.assess.storage import assess
from chaosrun.preflight.model import PROBES, Check, Level, Setting

_EFFORT = {
    Level.QUICK: {"kills": 8, "kills_s": 0.25, "names": 20, "speed_s": 0.25, "speed_bytes": 64 << 20},
    Level.STANDARD: {"kills": 60, "kills_s": 3.0, "names": 100, "speed_s": 1.5, "speed_bytes": 1 << 30},
    Level.DEEP: {"kills": 2000, "kills_s": 20.0, "names": 1000, "speed_s": 10.0, "speed_bytes": 4 << 30},
}
_PATIENCE_S = {Level.QUICK: 8.0, Level.STANDARD: 25.0, Level.DEEP: 65.0}
"""Storage that gives no sign for so long is taken for dead."""
_LIMIT_S = {Level.QUICK: 20.0, Level.STANDARD: 60.0, Level.DEEP: 300.0}
"""And one that takes as long for all, though it goes on, for slow."""
DEEP_SHARE = 0.1
"""Of the time that a deep preflight may take, writers are killed for this share."""
MARGIN_S = 7.0
"""For the process to start and to say that the storage does not answer."""


def _call(setting: Setting, node: Node) -> Call:
    effort = _EFFORT[setting.level]
    if setting.level is Level.DEEP and setting.seconds:
        kills_s = DEEP_SHARE * setting.seconds
        effort = {**effort, "kills_s": kills_s, "kills": max(8, int(20 * kills_s))}
    limit_s = _LIMIT_S[setting.level] + (effort["kills_s"] if setting.level is Level.DEEP else 0.0)
    about = {"storage": str(setting.storage), "patience_s": _PATIENCE_S[setting.level], "limit_s": limit_s}
    return Call(probe=f"{PROBES}.storage", parameters={**about, **effort}, limit_s=limit_s + MARGIN_S)


CHECK = Check(
    name="storage",
    about="storage keeps its promises, is fast enough and has room",
    order=50,
    level=Level.QUICK,
    call=_call,
    judge=assess,
)
