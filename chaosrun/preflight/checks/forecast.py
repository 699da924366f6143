"""The check "forecast": goodput and the best checkpoint interval when nodes fail as often as said, the job's own beside it."""

from collections.abc import Sequence
from typing import Any

from chaosrun.cluster.probing import Node
from chaosrun.preflight.costs import together
from chaosrun.preflight.earlier_run import costs_of_run
from chaosrun.preflight.forecast import Costs, Forecast, forecast, goodput
from chaosrun.preflight.model import Check, Facts, Finding, Level, Pool, Rows, Setting, Status
from chaosrun.preflight.placement import nodes_used
from chaosrun.spec.source import Job
from chaosrun.wording import count, duration

ROWS = Rows(check="forecast")


def gather(setting: Setting, pool: Pool) -> Facts:
    """{"drill": costs, "job": costs, "run": its id}; None of what there is not."""
    former = setting.former
    return {
        "drill": _of_drills(setting.earlier.get("drill")),
        "job": None if former is None else costs_of_run(former["folder"]),
        "run": None if former is None else former["run"],
    }


def _of_drills(facts: Facts | None) -> Facts | None:
    """Of the drill over all nodes, where there was one: a job meets what that met."""
    if facts is None:
        return None
    passed = [told["costs"] for told in facts["nodes"].values() if told and told.get("status") == "PASS"]
    whole = facts["all"]
    if whole and whole.get("status") == "PASS":
        return whole["costs"]
    return together(passed) if passed else None


LARGEST_CLUSTER = 1024
LEAST_GOODPUT = 0.5
"""Below it a training spends more time on failures than on steps."""
MOST_LOST = 0.05
"""Of the best goodput, before another interval is advised."""
HERE = "goodput here"
LARGER = "goodput at other sizes"
INTERVAL = "checkpoint.every_steps"
FASTER = "make saves and restarts shorter: faster storage, fewer bytes, warm starts; or use fewer nodes"


def judge_forecast(setting: Setting, nodes: Sequence[Node], facts: Facts) -> list[Finding]:
    figures = facts["job"] or facts["drill"]
    drill = facts["drill"] or {}
    if figures is None:
        reason = "nothing was measured: it goes by what the drills took, and none has passed"
        return [_finding(Status.SKIP, HERE, reason=reason)]
    save_s, restart_s = figures["save_s"] or drill.get("save_s"), figures["restart_s"] or drill.get("restart_s")
    if not save_s or not restart_s:
        return [_finding(Status.SKIP, HERE, reason="nothing was measured: no save or no restart was seen")]
    source = f"of run {facts['run']}" if facts["job"] else "of the drill's small training; a job's own take longer"
    took = f"a save takes {duration(save_s)} and a restart {duration(restart_s)} ({source})"
    if setting.mtbf_s is None:
        reason = "how often a node fails is not known: give its mean time between failures, such as --mtbf 720h"
        return [_finding(Status.SKIP, HERE, measured=took, reason=reason)]
    costs = Costs(save_s=save_s, restart_s=restart_s)
    here = forecast(costs, node_mtbf_s=setting.mtbf_s, nodes=max(1, nodes_used(setting, nodes)))
    findings = [_here(here, took), _elsewhere(setting, setting.mtbf_s, costs, here.nodes)]
    return findings if setting.job is None else [*findings, _interval(setting.job, facts, costs, here)]


def _here(here: Forecast, took: str) -> Finding:
    number = f"{count(here.nodes, 'node')}, a failure every {duration(here.mtbf_s)}"
    return _finding(
        Status.PASS if here.goodput >= LEAST_GOODPUT else Status.WARN,
        HERE,
        measured=f"{_best(here)} ({number})",
        threshold=f"at least {LEAST_GOODPUT:.0%}",
        reason=f"{took}; intervals after Daly 2006, Young 1974 gives {duration(here.young_s)}",
        remedy="" if here.goodput >= LEAST_GOODPUT else FASTER,
    )


def _elsewhere(setting: Setting, node_mtbf_s: float, costs: Costs, here: int) -> Finding:
    """Sizes that were asked for are judged; others are told."""
    asked = sorted(set(setting.forecast_nodes))
    sizes = asked or [size for size in _powers() if size > here]
    found = [forecast(costs, node_mtbf_s=node_mtbf_s, nodes=size) for size in sizes]
    if not found:
        return _finding(Status.SKIP, LARGER, reason="no other size was asked for")
    poor = bool(asked) and any(each.goodput < LEAST_GOODPUT for each in found)
    return _finding(
        Status.WARN if poor else Status.PASS,
        LARGER,
        measured="; ".join(f"{each.nodes}: {_best(each)}" for each in found),
        threshold=f"at least {LEAST_GOODPUT:.0%}" if asked else "",
        reason="if saves and restarts take as long there",
        remedy=FASTER if poor else "",
    )


def _powers() -> list[int]:
    """4, 16, 64 … up to the largest."""
    return [4**power for power in range(1, 6) if 4**power <= LARGEST_CLUSTER]


def _interval(job: Job, facts: Facts, costs: Costs, here: Forecast) -> Finding:
    every = job.spec.checkpoint.every_steps
    step_s = (facts["job"] or {}).get("step_s")
    if not step_s:
        reason = (
            "how long the job's steps and saves take is not known, and the drill's say nothing of it: no run of this job "
            "went through under this root; after `chaosrun submit` of it this row compares"
        )
        return _finding(Status.SKIP, INTERVAL, reason=reason)
    best_steps = _rounded(here.interval_s / step_s)
    if job.spec.max_steps is not None:
        best_steps = min(best_steps, job.spec.max_steps)
    best, own = (goodput(steps * step_s, costs, here.mtbf_s) for steps in (best_steps, every))
    # A rounded interval may be worse than the one that it is compared with.
    lost = 0.0 if best <= own else 1 - own / best
    good = lost <= MOST_LOST
    return _finding(
        Status.PASS if good else Status.WARN,
        INTERVAL,
        measured=f"{every} ({duration(every * step_s)}): goodput {_percent(own)}, {_percent(best)} with {best_steps}",
        threshold=f"at most {MOST_LOST:.0%} less than with the best interval",
        reason=f"a step takes {duration(step_s)} (run {facts['run']})",
        remedy="" if good else f"set checkpoint.every_steps to {best_steps}, every {duration(best_steps * step_s)}",
    )


def _rounded(steps: float) -> int:
    """Two digits: around the best interval the goodput hardly changes."""
    return max(1, round(float(f"{steps:.2g}")))


def _best(told: Forecast) -> str:
    if told.is_hopeless:
        return f"{_percent(told.goodput)}: a save takes twice the time between failures, or more"
    return f"{_percent(told.goodput)}, saving every {duration(told.interval_s)}"


def _percent(share: float) -> str:
    """As many digits as tell it from 100%."""
    return f"{share:.1%}" if share < 0.999 else f"{min(share, 0.99999):.3%}"


def _finding(status: Status, name: str, **about: Any) -> Finding:
    return ROWS.row(status, name=name, **about)


CHECK = Check(
    name="forecast",
    about="goodput and the best checkpoint interval when nodes fail",
    order=100,
    level=Level.STANDARD,
    judge=judge_forecast,
    gather=gather,
)
