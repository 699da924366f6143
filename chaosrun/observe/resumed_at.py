"""Finds the step at which a script resumed by itself, by comparing its initial state to every step of an earlier trace.

Pure. No single quantity identifies a step: a warm-up from zero leaves the weights unchanged, data repeat in every epoch, an
optimizer without momentum has no state. The chosen step agrees in the weights, if any does, and in as much else as possible; if
none agrees in the weights, it agrees in the data, unless they are the first batch, which any loader yields that was not
restored.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from chaosrun.records.trace_reader import TraceMoment
from chaosrun.records.traces import NEAREST, Found

QUANTITIES = ("weights", "data", "optimizer", "rates", "rng")
"""In the order in which they decide on a step."""


class RankStart(NamedTuple):
    """The state with which an attempt begins."""

    weights: str
    optimizer: str
    rates: tuple[str, ...] | None
    """Rates, the random stream and the first inputs are None if the attempt ended without a forward pass."""
    rng: str | None
    data: str | None = None
    params: bytes = b""
    """A digest of each of the weights, as in `records.traces.StartRecord`."""


class Due(NamedTuple):
    """The inputs of the step after an attempt's position."""

    batches: Sequence[str]
    """Digests of the inputs of its forward passes."""
    taken: bool
    """Whether the attempt has begun with them."""
    stepped: int
    """How many optimizers made that step."""


class ResumePlace(NamedTuple):
    step: int
    found: Found
    due: Due | None = None
    """None if nothing is recorded of the step after it."""
    settings: str | None = None
    """The optimizers' settings in the step after it."""
    together: Mapping[str, int] = {}
    """By the first of several optimizers to step: how many made the step that it last began."""


def find(start: RankStart, moments: Sequence[TraceMoment], *, own: bool = False, alone: bool = False) -> ResumePlace:
    """Compare an attempt's initial state to the `moments` of one trace. `own`: the trace is of an earlier attempt of the same
    leg. `alone`: no other leg continues after the last moment, of which only weights and optimizer are known then."""
    agreeing = _agreeing(start, moments, alone=alone)
    judged = [name for name in QUANTITIES if getattr(start, name) is not None]
    known = ("weights", "data", "optimizer") if any(agreeing["data"]) else ("weights", "optimizer", "data")
    decisive = next((name for name in known if agreeing[name]), None)
    if decisive is None:
        return ResumePlace(step=0, found=Found(step=None, own=own, **_nearest(agreeing, 0)))
    step = max(agreeing[decisive], key=lambda each: (*(each in agreeing[name] for name in QUANTITIES), each))
    whole = all(step in agreeing[name] for name in judged)
    after = [moment for moment in moments if moment.step == step and moment.data_after is not None]
    together = {moment.stepped[0]: len(moment.stepped) for moment in moments if moment.stepped and moment.step <= step}
    found = Found(step=step if whole else None, own=own, **_nearest(agreeing, step))
    due, settings = None, None
    if after:
        then, settings = after[-1], after[-1].settings_after
        stepped = next((len(moment.stepped) for moment in moments if moment.step == step + 1), 0)
        due = Due(then.batches_after, step in agreeing["data"], stepped or 1)
    return ResumePlace(step=step, found=found, due=due, settings=settings, together=together)


def _agreeing(start: RankStart, moments: Iterable[TraceMoment], *, alone: bool) -> Mapping[str, Mapping[int, None]]:
    """By quantity, the steps after which it was equal. Data, stream and rates after a step are in the next step's record; rates
    that a loop sets between forward pass and optimizer step are, at the forward pass, still those of the step before."""
    found: dict[str, dict[int, None]] = {name: {} for name in QUANTITIES}
    for moment in moments:
        step = moment.step
        if start.weights in (moment.weights, moment.weights_after):
            found["weights"][step] = None
        if moment.optimizer == start.optimizer:
            found["optimizer"][step] = None
        if start.rates is not None and start.rates in (moment.rates, moment.rates_after):
            found["rates"][step] = None
        if start.rng is not None and start.rng in (moment.rng_after, moment.rng_within):
            found["rng"][step] = None
        if start.data is not None and moment.data_after == start.data:
            found["data"][step] = None
        if alone and moment.data_after is None and step in found["weights"]:
            found |= {name: {**found[name], step: None} for name in ("rates", "rng", "data")}
    return found


def _nearest(agreeing: Mapping[str, Mapping[int, None]], step: int) -> dict[str, tuple[int, ...]]:
    return {name: tuple(sorted(sorted(steps, key=lambda each: abs(each - step))[:NEAREST])) for name, steps in agreeing.items()}
