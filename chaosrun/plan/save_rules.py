"""Which points a job has, depending on what saves it: chaosrun's checkpoints, or the script's own saves. Pure."""

from collections.abc import Iterator, Sequence

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, RESTORE_PHASES
from chaosrun.faults.tracer import SaveNote
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Objection


def elsewhere(spec: JobSpec, faults: Sequence[Fault]) -> list[Objection]:
    """An objection for each fault at a point that this kind of job does not have."""
    found = [Objection(fault.source, sentence) for fault in faults for sentence in _elsewhere(spec, fault)]
    return list(dict.fromkeys(found))


def _elsewhere(spec: JobSpec, fault: Fault) -> Iterator[str]:
    if spec.by == "chaosrun" and fault.phase == "save":
        yield "phase save is inside the save of a script that resumes by itself (resume.by: script), chaosrun saves this job"
    elif spec.by == "script" and fault.phase in CHECKPOINT_PHASES | RESTORE_PHASES:
        yield f"the script saves and resumes by itself, it has no {fault.phase}: phase save is inside its own save"
    elif spec.command and fault.kind == "port_taken":
        yield "the launcher of a command hosts its own rendezvous, before any rank begins: nobody else can take that port then"
    elif fault.phase == "save" and fault.group is not None:
        yield "which ranks save is for the script to decide: name one rank, or add an entry for each"


def two_in_one_save(faults: Sequence[Fault]) -> Iterator[Objection]:
    """Objections to a second fault in one save: only one strace at a time can be attached to a rank."""
    seen: dict[tuple[int, int | None, int], Fault] = {}
    for fault in faults:
        if fault.phase == "save" and fault.facts.note is SaveNote:
            first = seen.setdefault((fault.rank, fault.at_step, fault.occurrence), fault)
            if first is not fault:
                yield Objection(fault.source, f"{fault.describe()}: {first.source} strikes in that save, too, and only one can")
