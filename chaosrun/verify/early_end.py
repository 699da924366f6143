"""A chaos leg that ended early: the drill cut at that step, and whether the leg was allowed to end. Pure.

docs/exactness.md has the argument; its conditions are checked again here, from the records alone.
"""

from collections.abc import Iterator
from dataclasses import replace

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.codec import changed
from chaosrun.records.early_end import DIFFERED, SETTLED, State, state_of
from chaosrun.records.events import FaultObserved
from chaosrun.records.history import LegHistory
from chaosrun.records.position import Position
from chaosrun.records.traces import Block, EndRecord, RankTrace, StateRecord
from chaosrun.verify.check import CheckResult, Drill, inconclusive, passed
from chaosrun.verify.compare import undecided
from chaosrun.wording import listed

EARLY = (SETTLED, DIFFERED)


def up_to(drill: Drill, step: int) -> Drill:
    """The drill up to the step at which the chaos leg ended: both legs end with the checkpoint of that step."""
    legs = [_up_to(leg, step) for leg in (drill.reference, drill.chaos)]
    whole = drill.reference_lineage.final_step
    cut = Drill.of(legs[0], legs[1], drill.spec, drill.plan, drill.confirming)
    return replace(cut, ended_early=step, whole=whole)


def _up_to(leg: LegHistory, step: int) -> LegHistory:
    """Cut only the last attempt: steps of earlier attempts beyond that step stay visible."""
    if not leg.attempts:
        return leg
    last = leg.attempts[-1]
    traces = {rank: _trace(trace, step) for rank, trace in last.traces.items()}
    return replace(leg, attempts=(*leg.attempts[:-1], replace(last, traces=traces)))


def _trace(trace: RankTrace, step: int) -> RankTrace:
    saved = next((record for record in trace.states if record.step == step), None)
    at = trace.steps.get(step)
    end = None
    if saved and saved.digests and at:
        end = EndRecord(
            step=step,
            position=Position(epoch=at.epoch, batches=at.batches, step=step),
            time_s=saved.time_s,
            digests=saved.digests,
            checkpoint=next((record.name for record in trace.checkpoints if record.step == step), None),
            outside=trace.end.outside if trace.end else (),
        )
    return replace(
        trace,
        blocks=tuple(_part(block, step) for block in trace.blocks if block.first <= step),
        buckets=tuple(record for record in trace.buckets if record.step <= step),
        states=tuple(record for record in trace.states if record.step <= step),
        checkpoints=tuple(record for record in trace.checkpoints if record.step <= step),
        end=end,
    )


def _part(block: Block, step: int) -> Block:
    """Part of a block has no digests, only records."""
    return block if block.last <= step else changed(block, count=step - block.first + 1, digest=b"", param=b"")


def early_end(drill: Drill) -> CheckResult:
    """A leg that ended early met every condition for it: see `_problems`."""
    step = drill.ended_early
    if step is None:
        return passed("the chaos leg did not end early")
    if drill.chaos.outcome == "differed":
        return inconclusive("ended_at_a_difference", step=step, whole=drill.whole)
    if problem := next(_problems(drill, step), None):
        return inconclusive("settled_unproven", step=step, whole=drill.whole, problem=problem)
    saved = [_saved(drill.chaos, rank, step) for rank in drill.ranks]
    values = sum(len(group) for record in saved if record and record.digests for group in record.digests.values())
    summary = (
        f"at step {step} of {drill.whole}, after the last fault, {values} digests on {len(saved)} ranks are the reference's"
    )
    return passed(f"{summary}, and so is all else that the script keeps", step=step, whole=drill.whole)


def settled_step(drill: Drill) -> int | None:
    """The step at which a leg that ran to its end could have ended; None if it never settled."""
    attempt = drill.chaos.attempts[-1] if drill.chaos.attempts else None
    steps = sorted({saved.step for trace in attempt.traces.values() for saved in trace.states}) if attempt else []
    for step in (step for step in steps if step > _came_to(drill) and step < drill.reference_lineage.final_step):
        if any(state == "differs" for state, _ in _states(drill, step)):
            return None
        if next(_problems(drill, step, control=True), None) is None:
            return step
    return None


def _problems(drill: Drill, step: int, *, control: bool = False) -> Iterator[str]:
    """Why equal state at this step does not prove that the rest of the steps would be equal. `control`: the leg ran to its
    end."""
    yield from undecided(drill.spec, None if control else drill.reference.layout)
    attempts = drill.chaos.attempts
    late = _late(drill.plan, drill.chaos, attempts[-1].number)
    if len(attempts) < 2 or late:
        yield f"not all faults were over: {listed(late, 2) or 'none came before'}"
    if step <= (came_to := _came_to(drill)):
        yield f"an earlier attempt had come to step {came_to}"
    if step >= (drill.whole or drill.reference_lineage.final_step):
        yield "there was no step left"
    if drill.outside:
        yield f"the training changes state that no checkpoint holds: {listed(drill.outside, 2)}"
    yield from (f"rank {rank}: {why}" for rank, (state, why) in enumerate(_states(drill, step)) if state != "equal")


def _late(plan: FaultPlan, chaos: LegHistory, last: int) -> list[str]:
    """Faults that were not observed before the last attempt began."""
    over = {seen.fault for seen in chaos.events(FaultObserved) if seen.attempt < last}
    return [fault.id for fault in plan.faults if fault.id not in over] or ([] if plan.faults else ["no fault was planned"])


def _came_to(drill: Drill) -> int:
    earlier = drill.chaos.attempts[:-1]
    return max((trace.steps.last for attempt in earlier for trace in attempt.traces.values()), default=0)


def _states(drill: Drill, step: int) -> list[tuple[State, str]]:
    return [state_of(_saved(drill.reference, rank, step), _saved(drill.chaos, rank, step)) for rank in drill.ranks]


def _saved(leg: LegHistory, rank: int, step: int) -> StateRecord | None:
    """The state that the last attempt recorded at this step, before the checkpoint that it may have saved in order to leave."""
    trace = leg.attempts[-1].traces.get(rank) if leg.attempts else None
    return next((saved for saved in trace.states if saved.step == step), None) if trace else None
