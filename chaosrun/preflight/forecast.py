"""How much of its time a training makes use of when nodes fail, and how often it should save. Pure.

Symbols as in Daly: M, the mean time between failures of everything that the training runs on; δ, the time of a save; R, that of
a restart; τ, the time between two saves in which it trains. Failures are independent and exponential, so N nodes have M / N.

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974, 530-531.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer Systems
22(3), 2006, 303-312.
"""

import math
from dataclasses import dataclass

LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What a save and a restart take."""

    save_s: float
    restart_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    nodes: int
    mtbf_s: float
    """Of all nodes together."""
    interval_s: float
    """Between saves: Daly's."""
    young_s: float
    goodput: float
    """From 0 to 1, with Daly's interval."""
    is_hopeless: bool
    """A save takes twice the time between failures, or more: beyond that no interval is any good."""


def young_interval(save_s: float, mtbf_s: float) -> float:
    """√(2 δ M). Good where δ is small beside M; what the save itself delays and failures in a restart are left out."""
    return math.sqrt(2 * save_s * mtbf_s)


def daly_interval(save_s: float, mtbf_s: float) -> float:
    """The higher order estimate: √(2 δ M) · [1 + ⅓ (δ / 2M)^½ + ⅑ (δ / 2M)] − δ where δ < 2M, else M, whatever R."""
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def goodput(interval_s: float, costs: Costs, mtbf_s: float) -> float:
    """The share of the time in which steps are made that last: Daly's complete model of the wall-clock time,
    T = M e^(R/M) (e^((τ+δ)/M) − 1) T_s / τ, as T_s / T. Failures while it saves and restarts are in it."""
    lost, segment = costs.restart_s / mtbf_s, (interval_s + costs.save_s) / mtbf_s
    if lost + segment > LARGEST_EXPONENT:
        return 0.0
    return interval_s / (mtbf_s * math.exp(lost) * math.expm1(segment))


def forecast(costs: Costs, *, node_mtbf_s: float, nodes: int) -> Forecast:
    mtbf_s = node_mtbf_s / nodes
    interval_s = daly_interval(costs.save_s, mtbf_s)
    return Forecast(
        nodes=nodes,
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        young_s=young_interval(costs.save_s, mtbf_s),
        goodput=goodput(interval_s, costs, mtbf_s),
        is_hopeless=costs.save_s >= 2 * mtbf_s,
    )
