"""The check "bits": a little training on every device of every node, whose bits are compared."""

from chaosrun.cluster.probing import Call, Node
from chaosrun.preflight.assess.bits import assess
from chaosrun.preflight.checks.devices import LIMIT_S, PATIENCE_S
from chaosrun.preflight.model import PROBES, Check, Level, Setting
from chaosrun.preflight.placement import may_take_gpus

REPEATS = 3
THREADS = 2
"""Without a job: enough to see whether their number matters."""
DEEP_S = 60.0
DEEP_SHARE = 0.25
"""Of the time that a deep preflight may take."""


def call(setting: Setting, node: Node) -> Call:
    seconds = 0.0
    if setting.level is Level.DEEP:
        seconds = DEEP_S if setting.seconds is None else DEEP_SHARE * setting.seconds
    training = {"repeats": REPEATS, "seconds": seconds, "cores": setting.level is not Level.QUICK}
    return Call(
        probe=f"{PROBES}.bits",
        parameters={
            "gpus": node.gpus if may_take_gpus(setting) else 0,
            "patience_s": PATIENCE_S[setting.level],
            "compute": {"threads": setting.job.spec.threads if setting.job else THREADS, "training": training},
        },
        limit_s=LIMIT_S[setting.level] + seconds,
        env=setting.job.spec.env if setting.job else {},
    )


CHECK = Check(
    name="bits",
    about="the same bits on every device, each time",
    order=40,
    level=Level.QUICK,
    judge=assess,
    call=call,
)
