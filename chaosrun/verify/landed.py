"""Did every planned fault happen, to whom and where it was planned? Judged by the records of who struck and of who saw.

Pure.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from chaosrun.faults.evidence import death_problem, hang_problem, note_problem
from chaosrun.faults.fault import INJECTED, Fault
from chaosrun.faults.gone import wrong_place
from chaosrun.faults.kind import Evidence
from chaosrun.faults.seen import Problem, Seen
from chaosrun.records.events import AttemptStarting, FaultInjected, FaultObserved, FaultRequested, FaultWithdrawn, LegStarted
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.verify.check import Check, Drill, inconclusive, passed
from chaosrun.verify.codes import Cause
from chaosrun.verify.storage import storage_problem, storage_shortfall

BEFORE_THE_STEP = frozenset({"fetch", "forward", "reduce", "optimizer"})
"""Phases of a step that is not recorded yet."""


def faults_landed(drill: Drill) -> Check:
    """Every planned fault was requested once and then seen to happen to the very process it was meant for."""
    if altered := _altered(drill):
        return inconclusive("faults_landed", "plan_altered", how=altered, planned=len(drill.plan.faults))
    if not drill.plan.faults:
        return inconclusive("faults_landed", "no_fault_planned", planned=0)
    planned = {fault.id: fault for fault in drill.plan.faults}
    injected = sum(fault.source == INJECTED for fault in drill.plan.faults)
    which = f"faults ({len(planned) - injected} planned, {injected} injected)" if injected else "planned faults"
    requested = {fault.id for fault in drill.plan.faults if requests_of(fault, drill.chaos)}
    # Drawn in seconds, or replayed: the training may end before their time comes.
    may_be_late = [fault.id for fault in drill.plan.faults if not fault.required and fault.source != INJECTED]
    outrun = [fault for fault in may_be_late if fault not in requested]
    if len(outrun) == len(planned):
        late = _late(drill)
        about = {"planned": len(planned), "outrun": outrun, **late}
        return inconclusive("faults_landed", "faults_too_late", because="by_steps" if late else None, **about)
    due = [fault for fault in drill.plan.faults if fault.id not in outrun]
    problems = {fault.id: problem for fault in due if (problem := fault_problem(fault, drill.chaos))}
    problems |= {fault.id: problem for fault in due if fault.group and (problem := _parted(fault, due, drill.chaos))}
    if problems:
        fault, problem = next(iter(problems.items()))
        because, more = _because(planned[fault], problem, drill)
        about = {"fault": fault, "problem": problem, "which": which, "planned": len(planned), "problems": problems, **more}
        return inconclusive("faults_landed", "fault_not_shown", because=because, failing=len(problems), **about)
    late = f", {len(outrun)} had not come when the training ended" if outrun else ""
    summary = f"{len(due)} of {len(planned)} {which} landed{late}"
    return passed("faults_landed", summary, planned=len(planned), outrun=outrun)


def _because(fault: Fault, problem: str, drill: Drill) -> tuple[str | None, dict[str, Any]]:
    """What is known of why a fault cannot be shown to have happened: a row of the table of causes, and what fills it."""
    asked = next(iter(requests_of(fault, drill.chaos)), None)
    if asked is None:
        late = _late(drill)
        if fault.id in late.get("late", ()):
            return "never_due", late
        return ("never_due_by_time" if fault.phase is None else "never_reached"), {}
    seen = next((record for record in drill.chaos.events(FaultObserved) if record.fault == fault.id), None)
    if seen is not None and (found := storage_shortfall(fault, seen, drill.chaos)) and found.problem == problem:
        return found.code, {}
    attempt = next((entry for entry in drill.chaos.attempts if entry.number == asked.attempt), None)
    struck = any(entry.attempt == asked.attempt and entry.how != "note" for entry in drill.chaos.events(FaultObserved))
    if attempt is not None and attempt.unplanned and not struck:
        death = Cause(attempt.unplanned[0].code or "recovery_failed").blame
        if death.whose == "machine":
            return "other_death", {"death": death.reason}
    return None, {}


def _late(drill: Drill) -> dict[str, Any]:
    """Faults planned for steps after the training's end, and that end; nothing when there are none."""
    end = drill.chaos_lineage.final_step
    late = [fault.id for fault in drill.plan.faults if fault.at_step is not None and fault.at_step > end]
    return {"late": late, "end": end} if late else {}


def _altered(drill: Drill) -> str | None:
    """How plan.json is not the plan that the leg ran under, by what its journal says; None when nothing speaks against it.

    Journals of earlier versions hold no digests: then only a fault that is gone from the plan is noticed.
    """
    planned = {fault.id: fault for fault in drill.plan.faults}
    chaos = drill.chaos
    gone = {record.fault: "fired" for kind in (FaultRequested, FaultObserved) for record in chaos.events(kind)}
    gone |= {fault: "armed" for record in chaos.events(AttemptStarting) for fault in record.armed}
    gone |= {record.fault: "injected" for record in chaos.events(FaultInjected)}
    if missing := next(((fault, what) for fault, what in gone.items() if fault not in planned), None):
        return f"{missing[0]} was {missing[1]}, and is not in the plan: plan.json was changed after the run began"
    digests = {record.plan for record in chaos.events(LegStarted) if isinstance(record.plan, str)}
    if digests - {drill.plan.digest()}:
        return "plan.json is not the plan that the run began with: it was changed since"
    for record in chaos.events(FaultInjected):
        if record.plan not in (None, planned[record.fault].digest()):
            return f"{record.fault} is not in plan.json as it was injected: it was changed since"
    return None


def requests_of(fault: Fault, chaos: LegHistory) -> list[FaultRequested]:
    """Its `fault.requested` records, those left out that were withdrawn: nothing came of them."""
    standing: list[FaultRequested] = []
    for record in chaos.journal:
        if isinstance(record, FaultRequested) and record.fault == fault.id:
            standing.append(record)
        elif isinstance(record, FaultWithdrawn) and record.fault == fault.id:
            standing.clear()
    return standing


def _parted(fault: Fault, due: Sequence[Fault], chaos: LegHistory) -> str | None:
    """Why a fault did not strike together with the others of its group."""
    members = {other.id for other in due if other.group == fault.group}
    attempts = {record.attempt for record in chaos.events(FaultObserved) if record.fault in members}
    if len(attempts) < 2:
        return None
    return f"it was to strike together with {', '.join(sorted(members - {fault.id}))}, they struck in several attempts"


def fault_problem(fault: Fault, chaos: LegHistory) -> str | None:
    """Why `fault` cannot be shown to have happened as planned; None when it can."""
    try:
        return _problem(fault, chaos)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError) as error:
        return f"what was written down of it cannot be read ({type(error).__name__}: {error})"


def _problem(fault: Fault, chaos: LegHistory) -> str | None:
    requested = requests_of(fault, chaos)
    observed = [record for record in chaos.events(FaultObserved) if record.fault == fault.id]
    if not requested:
        return "it never fired"
    attempt = next((attempt for attempt in chaos.attempts if attempt.number == requested[0].attempt), None)
    if not observed:
        other = f" before its attempt was ended: {attempt.unplanned[0].reason}" if attempt and attempt.unplanned else ""
        return f"it was requested, but nobody saw it happen{other}"
    if len(requested) > 1 or len(observed) > 1:
        return f"requested {len(requested)} times, observed {len(observed)} times"
    asked, seen = requested[0], observed[0]
    if (asked.rank, asked.phase) != (fault.rank, fault.phase) or fault.at_step not in (None, asked.step):
        return f"it fired on rank {asked.rank} at {asked.phase} of step {asked.step}, not as planned"
    if fault.attempt not in (None, asked.attempt):
        return f"it fired in attempt {asked.attempt}, not in attempt {fault.attempt}"
    if (seen.attempt, seen.rank) != (asked.attempt, asked.rank):
        places = [f"rank {record.rank} of attempt {record.attempt}" for record in (asked, seen)]
        return f"fired by {places[0]}, seen on {places[1]}"
    if seen.how != fault.facts.evidence:
        # Whoever was to strike may say why it could not.
        reason = (seen.found or {}).get("problem")
        return reason or f"it was seen by its {seen.how}, a fault of kind {fault.kind} shows by its {fault.facts.evidence}"
    if attempt is None:
        return f"attempt {asked.attempt} is not in the journal"
    what = Seen.of(fault, seen)
    return (
        _wrong_process(fault, seen, attempt)
        or _wrong_moment(fault, asked, seen, attempt)
        or _words(_PROOFS[fault.facts.evidence](what))
        or _words(wrong_place(what, asked, chaos) if fault.facts.evidence in ("node", "successor") else None)
        or (_unrecorded(what, attempt) if fault.facts.evidence == "death" else None)
        or storage_problem(fault, seen, chaos)
    )


def _words(problem: Problem | None) -> str | None:
    return problem and problem.words


def _wrong_process(fault: Fault, seen: FaultObserved, attempt: Attempt) -> str | None:
    rank, pid = fault.rank, seen.pid
    trace = attempt.traces.get(rank)
    own = {attempt.pids.get(rank), trace.start.pid if trace and trace.start else None} - {None}
    if own != {pid}:
        who = ", ".join(map(str, own)) or "unknown"
        return f"process {pid} was struck, rank {rank} of attempt {attempt.number} was process {who}"
    return None


def _wrong_moment(fault: Fault, asked: FaultRequested, seen: FaultObserved, attempt: Attempt) -> str | None:
    """Whatever the phase, a step is recorded before its checkpoint and its faults, and a restore before its end."""
    if fault.phase is None or fault.phase == "rendezvous" or not fault.facts.ends_attempt:
        return None
    trace, step = attempt.traces.get(fault.rank), asked.step or 0
    if fault.phase == "restore.begin":
        return "its attempt went on after a restore that it was to die before" if trace and trace.start else None
    if trace is None or trace.start is None:
        return f"rank {fault.rank} left no trace of attempt {attempt.number}"
    reached = max((record.step for record in trace.steps), default=trace.start.position.step)
    before = step - 1 if fault.phase in BEFORE_THE_STEP else step
    if fault.facts.notice:
        # It finishes its step, and with others the next one; or goes on as its script likes until grace runs out.
        in_order = seen.signal is None if fault.facts.evidence == "death" else _left_in_order(fault, seen)
        wrong = reached not in (step, step + 1) if in_order else reached < before
    else:
        wrong = reached != before
    if wrong:
        return (
            f"rank {fault.rank} had recorded step {reached} last, a fault at {fault.phase} of step {step} comes after "
            f"step {before}"
        )
    return None


def _left_in_order(fault: Fault, seen: FaultObserved) -> bool:
    end = ((seen.found or {}).get("ends") or {}).get(str(fault.rank)) or {}
    return end.get("exit_code") is not None


def _unrecorded(seen: Seen, attempt: Attempt) -> str | None:
    same = [(death.pid, death.signal, death.exit_code) for death in attempt.exits if death.rank == seen.fault.rank]
    if (seen.pid, seen.signal, seen.exit_code) in same:
        return None
    how = f"exit code {seen.exit_code}" if seen.signal is None else f"signal {seen.signal}"
    return f"no exit of process {seen.pid} by {how} was recorded"


_PROOFS: Mapping[Evidence, Callable[[Seen], Problem | None]] = {
    "death": death_problem,
    "note": note_problem,
    "hang": hang_problem,
    "node": note_problem,
    "successor": note_problem,
}
"""How the evidence that a kind asks for is looked at."""
