"""The traces that an attempt may have resumed from, for a script that resumes by itself."""

from collections.abc import Iterator
from pathlib import Path

from chaosrun.observe.found_state import FoundState
from chaosrun.observe.resumed_at import RankStart, ResumePlace, find
from chaosrun.observe.trace import Observer
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.trace_reader import TraceMoment, read_moments, read_start
from chaosrun.records.traces import StartRecord


class EarlierTraces:
    """The traces of one rank: the reference's, and those of its own leg's earlier attempts."""

    def __init__(self, order: WorkerOrder, leg: LegLayout) -> None:
        self._order, self._leg = order, leg

    def first_start(self) -> StartRecord | None:
        """The start record of the reference, or without a reference of this leg's first attempt."""
        order = self._order
        leg = self._leg if order.reference_path is None else LegLayout(Path(order.reference_path))
        return read_start(leg.attempt(1).trace(order.rank))

    def has_trained(self) -> bool:
        """Whether an earlier attempt of this leg has made or begun a step."""
        return any(moments for moments, own in self._moments() if own)

    def begin(
        self, state: FoundState, observer: Observer, data: str | None, *, at_end: bool
    ) -> tuple[RankStart, ResumePlace | None]:
        """What an attempt begins with, and its place. A script may build the optimizers of all phases of its training at a
        restart: those of earlier phases are left out if the reference had replaced them by then, which shows in what agrees."""
        began = observer.beginning()
        if at_end and not observer.parameters:
            return began, None
        place = self.place(_rank_start(began, data, at_end=at_end))
        if place and not place.found.weights and state.order_as_at_first(True):
            # Optimizers built in the middle of the training may hold the parameters in another order. So did the reference's?
            in_order = observer.beginning()
            other = self.place(_rank_start(in_order, data, at_end=at_end))
            # Of a step that a gradient scaler skipped no settings are recorded.
            if other and other.found.weights and (not other.settings or other.settings == state.optimizer_settings()):
                began, place = in_order, other
            else:
                state.order_as_at_first(False)
                began = observer.beginning()
        if place is None or place.found.step is not None or not state.take_shared_for_replaced():
            return began, place
        without = observer.beginning()
        other = self.place(_rank_start(without, data, at_end=at_end))
        if other and (other.found.step is not None or _rates_agree(other) > _rates_agree(place)):
            return without, other
        state.count_all()
        return began, place

    def place(self, start: RankStart) -> ResumePlace | None:
        """The position of an attempt that begins with this state; None if nothing was recorded before it."""
        best: ResumePlace | None = None
        alone, reference, reached = self._order.reference_path is None, list[TraceMoment](), 0
        for moments, own in self._moments():
            if not moments:
                continue  # killed before its first record: nothing to compare with
            place = find(start, moments, own=own, alone=alone)
            if place.found.step is not None:
                return place
            if best is None or (place.found.weights and not best.found.weights):
                best = place
            reference, reached = (reference, max(reached, moments[-1].step)) if own else (moments, reached)
        if best and not best.found.weights and best.step > reached + 1 > 1:
            # Data that come again also do at steps that this leg has not reached; its last step may not be recorded.
            return find(start, [moment for moment in reference if moment.step <= reached + 1], alone=alone)
        return best

    def _moments(self) -> Iterator[tuple[list[TraceMoment], bool]]:
        """The reference's first, then those of its own leg, newest first."""
        order = self._order
        if order.reference_path is not None:
            reference = LegLayout(Path(order.reference_path))
            for attempt in reference.attempts():
                yield read_moments(reference.attempt(attempt).trace(order.rank)), False
        # State that was not restored equals the initial state.
        beginning = read_moments(self._leg.attempt(1).trace(order.rank), at_most=1) if order.attempt > 2 else []
        for attempt in range(order.attempt - 1, 0, -1):
            own = read_moments(self._leg.attempt(attempt).trace(order.rank))
            yield (own if attempt == 1 else [*beginning, *own]), True


def _rank_start(began: RankStart, data: str | None, *, at_end: bool) -> RankStart:
    return began._replace(rates=None, rng=None, data=data) if at_end else began._replace(data=data)


def _rates_agree(place: ResumePlace) -> bool:
    return place.step in place.found.rates
