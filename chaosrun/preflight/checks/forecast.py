"""The check "forecast": goodput and the best checkpoint interval for a given failure rate of nodes, compared with the job's own
interval.

Symbols as in Daly: M, the mean time between failures of all nodes of the training; δ, the time of a save; R, that of a restart;
τ, the training time between two saves. Failures are independent and exponential, so N nodes have M / N.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, 530-531.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), 2006, 303-312.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct

from chaosrun.cluster.probing import Node
from chaosrun.preflight.checks.drill import DrillFacts
from chaosrun.preflight.earlier_run import Costs, together
from chaosrun.preflight.model import Check, Finding, Level, Pool, Rows, Setting, Status
from chaosrun.preflight.placement import nodes_used
from chaosrun.spec.job_file import Job
from chaosrun.wording import count, duration

ROWS = Rows(check="forecast")
LARGEST_EXPONENT = 700.0
LEAST_GOODPUT = 0.5
"""Below it a training spends more time on failures than on steps."""
MOST_LOST = 0.05
"""Of the best goodput, before another interval is advised."""
HERE = "goodput here"
LARGER = "goodput at other sizes"
INTERVAL = "checkpoint.every_steps"
FASTER = "make saves and restarts shorter: faster storage, fewer bytes, warm starts; or use fewer nodes"
NO_RUN = (
    "how long the job's steps and saves take is not known, and the drill's say nothing of it: no run of this job "
    "went through under this root; after `chaosrun submit` of it this row compares"
)


class ForecastFacts(Struct, frozen=True, kw_only=True):
    """Measured times of saves and restarts; None: none was measured."""

    drill: Costs | None = None
    job: Costs | None = None
    run: str | None = None
    """The run in which `job` was measured."""


def gather(setting: Setting, pool: Pool) -> ForecastFacts:
    run = setting.last_run
    drill = _of_drills(setting.earlier.get("drill"))
    return ForecastFacts(drill=drill, job=run and run.costs, run=run and run.run)


def _of_drills(facts: object) -> Costs | None:
    """Costs of the drill over all nodes, if there was one, as a job has the same conditions."""
    if not isinstance(facts, DrillFacts):
        return None
    if facts.all is not None and facts.all.status == "PASS":
        return facts.all.costs
    passed = [told.costs for told in facts.nodes.values() if told is not None and told.status == "PASS"]
    return together(passed) if passed else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    nodes: int
    mtbf_s: float
    """Of all nodes together."""
    interval_s: float
    """Between saves: Daly's."""
    goodput: float
    """From 0 to 1, with Daly's interval."""
    is_hopeless: bool
    """A save takes at least twice the time between failures: then no interval is useful."""

    def __str__(self) -> str:
        hopeless = ": a save takes twice the time between failures, or more"
        return f"{_percent(self.goodput)}{hopeless if self.is_hopeless else f', saving every {duration(self.interval_s)}'}"


def young_interval(save_s: float, mtbf_s: float) -> float:
    """√(2 δ M). Accurate where δ is small compared with M; ignores the save's own delay and failures in a restart."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The higher order estimate: √(2 δ M) · [1 + ⅓ (δ / 2M)^½ + ⅑ (δ / 2M)] − δ where δ < 2M, else M, whatever R."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return young_interval(save_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(interval_s: float, save_s: float, restart_s: float, mtbf_s: float) -> float:
    """The share of time spent on steps that are not lost: Daly's complete model of the wall-clock time, T = M e^(R/M)
    (e^((τ+δ)/M) − 1) T_s / τ, as T_s / T. Includes failures during saves and restarts."""
    lost, segment = restart_s / mtbf_s, (interval_s + save_s) / mtbf_s
    if lost + segment > LARGEST_EXPONENT:
        return 0.0
    return interval_s / (mtbf_s * math.exp(lost) * math.expm1(segment))


def forecast(save_s: float, restart_s: float, *, node_mtbf_s: float, nodes: int) -> Forecast:
    mtbf_s = node_mtbf_s / nodes
    interval_s = daly_interval(save_s, mtbf_s)
    return Forecast(
        nodes=nodes,
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        goodput=goodput(interval_s, save_s, restart_s, mtbf_s),
        is_hopeless=save_s >= 2 * mtbf_s,
    )


def judge(setting: Setting, nodes: Sequence[Node], facts: ForecastFacts) -> list[Finding]:
    here, drill = ROWS.of(name=HERE), facts.drill or Costs()
    figures = facts.job or facts.drill
    if figures is None:
        return [here.skip("nothing was measured: it goes by what the drills took, and none has passed")]
    save_s, restart_s = figures.save_s or drill.save_s, figures.restart_s or drill.restart_s
    if not save_s or not restart_s:
        return [here.skip("nothing was measured: no save or no restart was seen")]
    source = f"of run {facts.run}" if facts.job else "of the drill's small training; a job's own take longer"
    took = f"a save takes {duration(save_s)} and a restart {duration(restart_s)} ({source})"
    if setting.mtbf_s is None:
        why = "how often a node fails is not known: give its mean time between failures, such as --mtbf 720h"
        return [here.skip(why, measured=took)]
    used = max(1, nodes_used(setting, nodes))
    now, *others = (
        forecast(save_s, restart_s, node_mtbf_s=setting.mtbf_s, nodes=size)
        for size in (used, *sorted(set(setting.forecast_nodes)))
    )
    number = f"{count(now.nodes, 'node')}, a failure every {duration(now.mtbf_s)}"
    young = duration(young_interval(save_s, now.mtbf_s))
    short = _too_short(facts, now)
    findings = [
        here.skip(short, measured=took)
        if short
        else here.row(
            Status.PASS if now.goodput >= LEAST_GOODPUT else Status.WARN,
            f"{now} ({number})",
            f"at least {LEAST_GOODPUT:.0%}",
            reason=f"{took}; intervals after Daly 2006, Young 1974 gives {young}",
            remedy="" if now.goodput >= LEAST_GOODPUT else FASTER,
        )
    ]
    findings += [_elsewhere(others)] if others else []
    return findings if setting.job is None else [*findings, _interval(setting.job, facts, now, save_s, restart_s)]


def _elsewhere(found: Sequence[Forecast]) -> Finding:
    poor = any(each.goodput < LEAST_GOODPUT for each in found)
    return ROWS.row(
        Status.WARN if poor else Status.PASS,
        "; ".join(f"{each.nodes}: {each}" for each in found),
        f"at least {LEAST_GOODPUT:.0%}",
        name=LARGER,
        reason="if saves and restarts take as long there",
        remedy=FASTER if poor else "",
    )


def _too_short(facts: ForecastFacts, now: Forecast) -> str | None:
    """The finding on a job that ends before its first save is due: an interval or a goodput would be meaningless."""
    costs = facts.job or Costs()
    length_s = costs.steps * (costs.step_s or math.inf)
    if now.interval_s < length_s or not costs.steps:
        return None
    made = f"{count(costs.steps, 'step')} in {duration(length_s)} (run {facts.run})"
    return f"too short to forecast: {made}, the best interval is {duration(now.interval_s)}"


def _interval(job: Job, facts: ForecastFacts, now: Forecast, save_s: float, restart_s: float) -> Finding:
    row, every = ROWS.of(name=INTERVAL), job.spec.checkpoint.every_steps
    costs = facts.job or Costs()
    if not costs.step_s:
        return row.skip(NO_RUN)
    if short := _too_short(facts, now):
        return row.skip(short)
    # Two digits: around the best interval the goodput hardly changes.
    best_steps = max(1, round(float(f"{now.interval_s / costs.step_s:.2g}")))
    best, own = (goodput(steps * costs.step_s, save_s, restart_s, now.mtbf_s) for steps in (best_steps, every))
    # A rounded interval may be worse than the job's own.
    lost = 0.0 if best <= own else 1 - own / best
    return row.judged(
        Status.PASS if lost <= MOST_LOST else Status.WARN,
        f"{every} ({duration(every * costs.step_s)}): goodput {_percent(own)}, {_percent(best)} with {best_steps}; "
        f"a step takes {duration(costs.step_s)} (run {facts.run})",
        f"at most {MOST_LOST:.0%} less than with the best interval",
        f"set checkpoint.every_steps to {best_steps}, every {duration(best_steps * costs.step_s)}",
    )


def _percent(share: float) -> str:
    """With as many digits as distinguish it from 100%."""
    return f"{share:.1%}" if share < 0.999 else f"{min(share, 0.99999):.3%}"


CHECK = Check(
    name="forecast",
    about="goodput and the best checkpoint interval when nodes fail",
    order=100,
    level=Level.STANDARD,
    judge=judge,
    gather=gather,
)
