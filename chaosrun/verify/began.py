"""A chaos leg that began at a checkpoint of the reference, and not at the beginning: whether that is shown, and at which step.

The steps before it are the reference's own: it has been shown to repeat itself, so a leg from the beginning would have come to
this very state. docs/exactness.md has the argument ("Where a drill begins"). Pure, but for one look at a file's being there.
"""

from chaosrun.records.began import digest_of
from chaosrun.records.history import LegHistory
from chaosrun.records.layout import checkpoint_step
from chaosrun.spec.model import JobSpec
from chaosrun.verify.compare import exact_weights


def began_at(reference: LegHistory, chaos: LegHistory, spec: JobSpec) -> int:
    """The step that the first attempt went on from, where that is shown to be the reference's state; else 0."""
    first = chaos.attempts[0] if chaos.attempts else None
    return first.resume_step if first and first.resume and not unproven(reference, chaos, spec) else 0


def unproven(reference: LegHistory, chaos: LegHistory, spec: JobSpec) -> str | None:
    """Why a first attempt that went on from a checkpoint is not shown to have been given the reference's. What it made of that
    checkpoint is for the checks of every resume."""
    first, began = chaos.attempts[0], chaos.began
    if began is None or not began.states:
        return "nothing says whose it was"
    if first.number != 1 or first.resume not in began.states:
        return f"attempt {first.number} went on from {first.resume}, it had been given {', '.join(began.states)}"
    if spec.by == "script" or not exact_weights(spec.verify) or not spec.verify.losses.exact:
        return "nothing says that its state is complete"
    if not reference.layout.repeats.is_file():
        return "the job was never shown to repeat itself"
    odd = [name for name, state in began.states.items() if state != _saved(reference, name, spec.workers)]
    return f"{odd[0]} is not what the reference saved" if odd else None


def _saved(reference: LegHistory, name: str, workers: int) -> str | None:
    """`digest_of` a checkpoint as the ranks of the reference recorded it; None where one did not."""
    traces = [reference.attempts[-1].traces.get(rank) if reference.attempts else None for rank in range(workers)]
    saved = [next((each for each in trace.checkpoints if each.name == name), None) for trace in traces if trace]
    states = [record.digests for record in saved if record and record.digests and record.step == checkpoint_step(name)]
    return digest_of(states) if len(states) == workers else None
