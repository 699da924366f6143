"""Leaving early, when the leg's result is decided: after the last fault, at a step where every rank's complete state equals the
reference's, or at the second checkpoint where it differs. The verdict checks this again (`verify.early_end`).
"""

import functools
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch

from chaosrun.observe.effects import Effects
from chaosrun.observe.own import OwnState, Surroundings, own_state
from chaosrun.observe.state import ObservedState
from chaosrun.records.early_end import DIFFERED, SETTLED, State, state_of
from chaosrun.records.layout import LegLayout
from chaosrun.records.order import WorkerOrder
from chaosrun.records.trace_reader import read_ends, read_trace
from chaosrun.records.traces import CheckpointRecord, StateRecord

LOOKS = 5
"""So often, evenly, the state is compared between two checkpoints, so that a decided drill soon ends."""
ENOUGH = 2
"""The leg ends at the second checkpoint at which the state differs: the first shows that it does, the second what follows."""

StateOrLost = State | Literal["lost"]
"""Result of a rank's comparison. Lost: an earlier attempt had reached this step, which is only repeated now."""


class EarlyEnd:
    """Decides for one rank of one attempt whether it leaves early."""

    def __init__(self, order: WorkerOrder, leg: LegLayout) -> None:
        self._order = order
        watched = order.looks_after is not None and not order.inspect
        self._leg = leg
        self._effects = Effects(leg, order.storage_path, attempt=order.attempt, rank=order.rank) if watched else None
        self._looks = watched and (order.leg != "chaos" or bool(order.settle))
        self._before = Surroundings({}, {})
        self._differing = 0
        self._was_equal = False
        """The state was equal at some step: the leg is settled."""
        self.left: str | None = None
        """SETTLED or DIFFERED once this rank has left early."""

    def listen(self) -> None:
        """Begin to observe what the script does outside its process, from its first line on."""
        if self._effects:
            gc.freeze()  # objects older than the script are not its own, and need not be searched at each checkpoint
            self._before = Surroundings.now()
            self._effects.begin()

    def begin(self) -> None:
        if self._effects:
            self._effects.has_begun = True

    def own(self, state: ObservedState, step: int) -> OwnState:
        """The script's own state at this step."""
        if self._effects is None or not self._looks or step <= (self._order.looks_after or 0):
            return OwnState("", ())
        effects = tuple(dict.fromkeys(self._effects.seen()))
        # The effects already prevent an early end: the rest need not be collected.
        return OwnState("", effects) if effects else own_state(state, self._before)

    def is_due(self, step: int) -> bool:
        """Whether to record the complete state at a step without a checkpoint: in the reference, and in a chaos leg whose
        faults are over until the states were equal once. Not needed if checkpoints are close together."""
        distance, looks_after = self._order.every_steps // LOOKS, self._order.looks_after or 0
        return self._looks and not self._was_equal and distance > 1 and step > looks_after and step % distance == 0

    def look(
        self, step: int, saved: CheckpointRecord | None, record: Callable[[], StateRecord], save: Callable[[], object]
    ) -> bool:
        """Compare the state with the reference's. Returns whether to leave, as the leg is decided. A collective: every rank
        calls it at the same steps, and all leave or none.

        `saved`: the checkpoint of this step. Without one, `record` records the state, and for a rank that leaves `save` is
        called.
        """
        if not self._order.settle:
            if saved is None:
                record()
            return False
        (expected, last), lost = self._reference, step <= self._came_to
        states = self._gather("lost" if lost else state_of(expected.get(step), saved or record())[0])
        if "lost" in states:
            return False
        if "differs" in states:
            self._differing = self._differing + 1 if saved else max(1, self._differing)
        equal = not self._differing and set(states) == {"equal"}
        self._was_equal = self._was_equal or equal
        if self._order.settle == "watch":
            return False
        if equal and step < last:  # after the last step there is nothing left to skip
            if saved is None:
                save()
            self.left = SETTLED
        elif saved and self._differing >= ENOUGH and self._order.settle == "stop":
            self.left = DIFFERED
        return self.left is not None

    @functools.cached_property
    def _came_to(self) -> int:
        """The last step that this rank reached in earlier attempts."""
        folders = {number: self._leg.attempt(number) for number in self._leg.attempts() if number < self._order.attempt}
        paths = {number: path for number, folder in folders.items() if (path := folder.trace(self._order.rank)).exists()}
        traces = (read_ends(path, number, self._order.rank, []) for number, path in paths.items())
        return max((trace.steps.last for trace in traces), default=0)

    @functools.cached_property
    def _reference(self) -> tuple[dict[int, StateRecord], int]:
        """The reference's records of this rank's state, by step; and its last step."""
        assert self._order.reference_path is not None
        reference = LegLayout(Path(self._order.reference_path))
        last, rank = max(reference.attempts(), default=1), self._order.rank
        trace = read_trace(reference.attempt(last).trace(rank), last, rank, [])
        return {saved.step: saved for saved in trace.states}, trace.steps.last

    def _gather(self, state: StateOrLost) -> list[StateOrLost]:
        if self._order.world_size == 1:
            return [state]
        states: list[StateOrLost] = ["unknown"] * self._order.world_size
        torch.distributed.all_gather_object(states, state)
        return states
