"""The state that attempts saved and restored, against the reference's at the same step, by component. Pure.

This shows where a difference begins; the training may read the differing state only later.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Literal

from chaosrun.records.history import Attempt
from chaosrun.records.traces import CheckpointRecord, Digests
from chaosrun.verify.check import CheckResult, Drill, failed, passed, skipped
from chaosrun.verify.codes import Params
from chaosrun.verify.compare import Kind, differing_keys
from chaosrun.wording import listed

COMPONENTS: Mapping[str, tuple[str, Kind]] = {
    "model": ("weights", "weights"),
    "buffers": ("buffers", "buffers"),
    "optimizer": ("optimizer_state", "optimizer"),
    "scheduler": ("lr_scheduler", "learning rate"),
    "registered": ("registered_state", "registered"),
    "rng": ("rng", "rng"),
}
"""The components of a checkpoint: their part (`code_differences.PARTS`), and the kind of divergence in it. In the order in
which differences are reported: an earlier one most likely explains later ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """The first component that is not the reference's at `step`, as the lowest of `ranks` holds it."""

    step: int
    component: str
    ranks: tuple[int, ...]
    expected: Mapping[str, str]
    seen: Mapping[str, str]
    also: tuple[str, ...]
    """Other components that differ on this rank."""

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def names(self) -> list[str]:
        """Names of the values that differ: first those that were saved, last the empty containers that replaced them."""
        return sorted(differing_keys(self.expected, self.seen), key=lambda name: name not in self.expected)

    @property
    def only_rates(self) -> bool:
        """Nothing but learning rates in the optimizer's parameter groups."""
        return all(is_setting(name) and name.split("/")[-1] == "lr" for name in self.names)

    @property
    def permuted(self) -> bool:
        values = [Counter(side.get(name) for name in self.names) for side in (self.expected, self.seen)]
        return len(self.names) > 1 and values[0] == values[1]

    def held_by(self, drill: Drill) -> tuple[int, int] | None:
        """Rank and step at which the reference has the state seen here; None if it never has."""
        places = [(rank, self.step) for rank in drill.ranks]
        places += [(self.rank, step) for step in reversed(range(1, drill.reference_lineage.final_step + 1))]
        for rank, step in places:
            state = reference_state(drill, rank, step)
            if state is not None and state.get(self.component) == self.seen:
                return rank, step
        return None


def is_setting(name: str) -> bool:
    """Whether a path in the saved state is a value of the optimizer's parameter groups."""
    return "param_groups" in name.split("/")[1:-1]


def is_scaler(name: str) -> bool:
    """Whether a path is a value of the GradScaler, which is saved with the optimizer."""
    return name.split("/")[0] == "scaler"


def reference_state(drill: Drill, rank: int, step: int) -> Digests | None:
    """The state that the reference saved at `step` on this rank; None if it saved no checkpoint, or did not digest it."""
    span = drill.reference_lineage.of(rank).span_of(step)
    return next((saved.digests for saved in span.trace.checkpoints if saved.step == step), None) if span else None


def saved_before(drill: Drill, attempt: Attempt, rank: int, step: int) -> CheckpointRecord | None:
    """The state that the chaos leg saved last at `step` on this rank, before this attempt."""
    earlier = drill.before(attempt.number, rank)
    saved = [checkpoint for trace in earlier for checkpoint in trace.checkpoints if checkpoint.step == step]
    return saved[-1] if saved else None


def lost_buffers(drill: Drill, attempt: Attempt, ranks: Set[int]) -> tuple[int, list[str]] | None:
    """The first of these ranks whose model began with other buffers than it had when its script saved at that step, and those
    of them that differ at the end, too, since a pass may recompute some. Buffers that another rank had saved do not count: DDP
    broadcasts them."""
    saved = _as_saved(drill, attempt, "buffers")
    for rank in sorted(saved.keys() & attempt.starts.keys() & ranks):
        began = attempt.starts[rank].buffers
        ends = [leg.ends[rank].digests.get("buffers", {}) for leg in (drill.reference, drill.chaos) if rank in leg.ends]
        apart = set(differing_keys(*ends)) if began and len(ends) == 2 else set[str]()
        names = [name for name in differing_keys(saved[rank], began) if name in apart]
        if names := [name for name in names if all(began.get(name) != other.get(name) for other in saved.values())]:
            return rank, names
    return None


def buffers_lost_at_start(drill: Drill, rank: int) -> Params:
    """The variant and the names of a cause, if a restart of this rank is known to have begun with other buffers than it had
    saved."""
    lost = (lost_buffers(drill, attempt, {rank}) for attempt in drill.chaos.attempts if attempt.went_on)
    return next(({"because": "at_start", "name": names} for _, names in filter(None, lost)), {})


def buffers_came_back(drill: Drill, rank: int) -> bool:
    """Whether each attempt of a script that resumes by itself began with the buffers that this rank had at the save."""
    restarted = [attempt for attempt in drill.chaos.attempts if attempt.went_on and rank in attempt.starts]
    pairs = [(attempt.starts[rank].buffers, _as_saved(drill, attempt, "buffers").get(rank)) for attempt in restarted]
    return bool(pairs) and all(began and began == saved for began, saved in pairs)


def lost_optimizers(drill: Drill, attempt: Attempt, ranks: Collection[int]) -> list[str]:
    """Of several optimizers of a script that resumes by itself, those that one of these ranks began with in another state than
    it had saved. Empty if none is known to be right."""
    for rank, saved in sorted(_as_saved(drill, attempt, "optimizers").items()):
        began = attempt.starts[rank].optimizers if rank in ranks else {}
        lost = differing_keys(saved, began) if began.keys() == saved.keys() else []
        if 0 < len(lost) < len(saved):
            return lost
    return []


def _as_saved(drill: Drill, attempt: Attempt, what: Literal["buffers", "optimizers"]) -> Mapping[int, Mapping[str, str]]:
    """Their digests, by rank, when the script last saved at the step at which this attempt resumed."""
    traces = drill.before(attempt.number)
    saves = [(trace.rank, save) for trace in traces for save in trace.saves if save.step == attempt.resume_step]
    return {rank: getattr(save, what) for rank, save in saves if getattr(save, what)}


def restored_difference(drill: Drill, attempt: Attempt) -> StateDifference | None:
    """How the state that this attempt restored differs from the reference's at that step; None if it does not."""
    starts = {rank: start for rank, start in attempt.starts.items() if start.restored}
    for step in sorted({start.position.step for start in starts.values()}):
        held = {rank: start.digests for rank, start in starts.items() if start.position.step == step and start.digests}
        if found := _difference(drill, step, held):
            return found
    return None


def saved_difference(drill: Drill, attempt: Attempt, step: int) -> StateDifference | None:
    """How the state that this attempt saved at `step` differs from the reference's save; None if it does not."""
    held = {
        rank: saved.digests
        for rank, trace in attempt.traces.items()
        for saved in trace.checkpoints
        if saved.step == step and saved.digests
    }
    return _difference(drill, step, held)


def checkpointed_state(drill: Drill) -> CheckResult:
    """All state that the chaos leg restored and saved has the digests of the reference's checkpoint of that step."""
    compared = 0
    for attempt in drill.chaos.attempts:
        steps = sorted({saved.step for trace in attempt.traces.values() for saved in trace.checkpoints})
        found = [("restored", restored_difference(drill, attempt))]
        found += [("saved", saved_difference(drill, attempt, step)) for step in steps]
        for did, difference in found:
            if difference:
                differ = f"{listed(difference.names, 1)} {'differ' if len(difference.names) > 1 else 'differs'}"
                about = {each: getattr(difference, each) for each in ("step", "rank", "ranks", "component")}
                told = {"did": did, "which": differ, "attempt": attempt.number}
                return failed("saved_state_differs", **told, **about, differing=difference.names)
        compared += sum(1 for _ in _comparable(drill, attempt))
    if not compared:
        return skipped("no checkpoint's state was recorded in both legs")
    return passed(f"{compared} saved or restored states of single ranks are equal", compared=compared)


def _comparable(drill: Drill, attempt: Attempt) -> Iterator[tuple[int, int]]:
    for rank, trace in attempt.traces.items():
        states = [(saved.step, saved.digests) for saved in trace.checkpoints]
        if trace.start:
            states.append((trace.start.position.step, trace.start.digests))
        yield from ((rank, step) for step, digests in states if digests and reference_state(drill, rank, step))


def _difference(drill: Drill, step: int, held: Mapping[int, Digests]) -> StateDifference | None:
    # With a tolerance on weights, everything that depends on them may differ in its bits.
    components = tuple(COMPONENTS) if drill.exact_weights else ("rng",)
    differing: dict[str, list[int]] = {}
    for rank, state in sorted(held.items()):
        expected = reference_state(drill, rank, step)
        for component in components if expected is not None else ():
            if expected is not None and expected.get(component) != state.get(component):
                differing.setdefault(component, []).append(rank)
    for component in components:
        if component not in differing:
            continue
        ranks = tuple(differing[component])
        also = tuple(other for other in differing if other != component and ranks[0] in differing[other])
        expected = reference_state(drill, ranks[0], step) or {}
        return StateDifference(
            step=step,
            component=component,
            ranks=ranks,
            expected=expected.get(component, {}),
            seen=held[ranks[0]].get(component, {}),
            also=also,
        )
    return None
