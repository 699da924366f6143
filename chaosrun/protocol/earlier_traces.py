"""The traces that an attempt of a script that resumes by itself may have gone on from."""

from collections.abc import Iterator
from pathlib import Path

from chaosrun.observe.resumed_at import Place, Standing, find
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.trace_reader import Moment, read_moments, read_start
from chaosrun.records.traces import StartRecord


class EarlierTraces:
    """The traces of one rank: the reference's, and those of its own leg's earlier attempts."""

    def __init__(self, order: WorkerOrder, leg: LegLayout) -> None:
        self._order, self._leg = order, leg

    def first_start(self) -> StartRecord | None:
        """The start record of the reference, or without one of this leg's first attempt."""
        order = self._order
        leg = self._leg if order.reference_path is None else LegLayout(Path(order.reference_path))
        return read_start(leg.attempt(1).trace(order.rank))

    def has_trained(self) -> bool:
        """An earlier attempt of this leg has made a step, or begun one."""
        return any(moments for moments, own in self._moments() if own)

    def place(self, standing: Standing) -> Place | None:
        """Where an attempt stands that begins with this; None if nothing was recorded before it."""
        best: Place | None = None
        for moments, own in self._moments():
            if not moments:
                continue  # killed before its first record: nothing to compare with
            place = find(standing, moments, own=own, alone=self._order.reference_path is None)
            if place.found.step is not None:
                return place
            if best is None or (place.found.weights and not best.found.weights):
                best = place
        return best

    def _moments(self) -> Iterator[tuple[list[Moment], bool]]:
        """The reference's first, then those of its own leg, newest first."""
        order = self._order
        if order.reference_path is not None:
            reference = LegLayout(Path(order.reference_path))
            for attempt in reference.attempts():
                yield read_moments(reference.attempt(attempt).trace(order.rank)), False
        # State that was not restored equals that of the very beginning.
        beginning = read_moments(self._leg.attempt(1).trace(order.rank), at_most=1) if order.attempt > 2 else []
        for attempt in range(order.attempt - 1, 0, -1):
            own = read_moments(self._leg.attempt(attempt).trace(order.rank))
            yield (own if attempt == 1 else [*beginning, *own]), True
