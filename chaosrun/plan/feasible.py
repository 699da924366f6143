"""Which faults of a plan cannot be relied on to fire, and why. Pure.

A drill whose fault never fires proves nothing, so this is said before anything starts. The rules follow from two facts:
a checkpoint is saved at each multiple of `checkpoint.every_steps` and at `max_steps`, and after a death the job goes on
from the newest committed one, never crossing that step again.
"""

from collections.abc import Iterator, Sequence

from chaosrun.plan.faults import Fault
from chaosrun.plan.kinds import CHECKPOINT_PHASES
from chaosrun.spec.model import JobSpec

__all__ = ["first_checkpoint", "is_checkpoint_step", "objections"]


def is_checkpoint_step(spec: JobSpec, step: int) -> bool:
    return step % spec.checkpoint.every_steps == 0 or step == spec.max_steps


def first_checkpoint(spec: JobSpec) -> int:
    """The step of the first checkpoint that an undisturbed job saves."""
    every = spec.checkpoint.every_steps
    return every if spec.max_steps is None else min(every, spec.max_steps)


def objections(spec: JobSpec, faults: Sequence[Fault]) -> list[str]:
    """One sentence for each fault that can never fire, or only by chance; `faults` in the order of the plan."""
    found = [sentence for fault in faults for sentence in _alone(spec, fault)]
    return list(dict.fromkeys(found or [*_overtaken(spec, faults), *_unrestored(spec, faults)]))


def _alone(spec: JobSpec, fault: Fault) -> Iterator[str]:
    """Objections to one fault, whatever the others do."""
    if fault.rank >= spec.workers:
        yield f"{fault.source}: rank {fault.rank} does not exist, {spec.workers} workers have ranks 0 to {spec.workers - 1}"
    if fault.phase == "reduce" and spec.workers == 1:
        yield f"{fault.source}: one worker alone reduces no gradients, phase reduce needs at least 2 workers"
    if fault.at_step is None:
        return
    if spec.max_steps is not None and fault.at_step > spec.max_steps:
        yield f"{fault.source}: step {fault.at_step} is never reached, max_steps is {spec.max_steps}"
    elif fault.phase in CHECKPOINT_PHASES | {"restore.end"} and not is_checkpoint_step(spec, fault.at_step):
        every = spec.checkpoint.every_steps
        yield (
            f"{fault.source}: no checkpoint is saved at step {fault.at_step}, "
            f"only at multiples of {every} (checkpoint.every_steps) and at max_steps"
        )


def _overtaken(spec: JobSpec, faults: Sequence[Fault]) -> Iterator[str]:
    """Faults after the commit of a checkpoint that another fault already follows: the job does not come by there again."""
    first_after: dict[int, Fault] = {}
    for fault in faults:
        step = _committed_step(spec, fault)
        if step is None:
            continue
        earlier = first_after.setdefault(step, fault)
        if earlier is not fault:
            yield (
                f"{fault.source}: {fault.describe()} may never fire, since {earlier.source} kills there too and the job "
                f"then goes on from the checkpoint of step {step}"
            )


def _unrestored(spec: JobSpec, faults: Sequence[Fault]) -> Iterator[str]:
    """Faults at the end of a restore that no other fault brings about."""
    restored = {_resume_step(spec, fault) for fault in faults if fault.phase != "restore.end"} - {0}
    for fault in faults:
        if fault.phase != "restore.end":
            continue
        if not restored:
            yield f"{fault.source}: nothing is ever restored, no other fault kills the job after its first checkpoint"
        elif fault.at_step is not None and fault.at_step not in restored:
            steps = ", ".join(map(str, sorted(restored)))
            yield f"{fault.source}: step {fault.at_step} is never restored; the other faults lead to a restore of step {steps}"


def _committed_step(spec: JobSpec, fault: Fault) -> int | None:
    """The step of the checkpoint that is committed right before the fault fires, if one is."""
    if fault.phase == "checkpoint.postcommit":
        return fault.at_step if fault.at_step is not None else first_checkpoint(spec)
    if fault.phase == "step" and fault.at_step is not None and is_checkpoint_step(spec, fault.at_step):
        return fault.at_step
    return None


def _resume_step(spec: JobSpec, fault: Fault) -> int:
    """The step that the job goes on from after the fault; 0: from the beginning."""
    committed = _committed_step(spec, fault)
    if committed is not None:
        return committed
    step = fault.at_step if fault.at_step is not None else first_checkpoint(spec)
    before = step if fault.phase == "step" else step - 1
    return before - before % spec.checkpoint.every_steps
