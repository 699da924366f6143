"""Whether every planned fault happened to the planned process at the planned point, by the records of the striking and of the
observing side. Pure."""

from collections.abc import Sequence

from chaosrun.faults.fault import INJECTED, Fault
from chaosrun.faults.landed import fault_problem, requests_of
from chaosrun.faults.observed import Disproof
from chaosrun.records.events import AttemptStarting, FaultInjected, FaultObserved, FaultRequested, LegStarted
from chaosrun.records.history import LegHistory
from chaosrun.verify.check import CheckResult, Drill, inconclusive, passed
from chaosrun.verify.codes import TABLE, Cause, Params


def faults_landed(drill: Drill) -> CheckResult:
    """Every planned fault was requested once and then observed in exactly the process that it was meant for."""
    if altered := _altered(drill):
        return inconclusive("plan_altered", how=altered, planned=len(drill.plan.faults))
    if not drill.plan.faults:
        return inconclusive("no_fault_planned", planned=0)
    planned = {fault.id: fault for fault in drill.plan.faults}
    injected = sum(fault.source == INJECTED for fault in drill.plan.faults)
    which = f"faults ({len(planned) - injected} planned, {injected} injected)" if injected else "planned faults"
    requested = {fault.id for fault in drill.plan.faults if requests_of(fault, drill.chaos)}
    # Faults drawn in seconds, or replayed: the training may end before they are due.
    may_be_late = [fault.id for fault in drill.plan.faults if not fault.required and fault.source != INJECTED]
    outrun = [fault for fault in may_be_late if fault not in requested]
    if len(outrun) == len(planned):
        late = _late(drill)
        because = "by_steps" if late else None
        return inconclusive("faults_too_late", because=because, planned=len(planned), outrun=outrun, **late)
    due = [fault for fault in drill.plan.faults if fault.id not in outrun]
    problems = {fault.id: problem for fault in due if (problem := fault_problem(fault, drill.chaos))}
    problems |= {fault.id: problem for fault in due if fault.group and (problem := _parted(fault, due, drill.chaos))}
    if problems:
        fault, problem = next(iter(problems.items()))
        because, more = _because(planned[fault], problem, drill)
        about = {"fault": fault, "problem": problem.words, "which": which, "planned": len(planned), **more}
        about["problems"] = {name: each.words for name, each in problems.items()}
        return inconclusive("fault_not_shown", because=because, failing=len(problems), **about)
    late = f", {len(outrun)} had not come when the training ended" if outrun else ""
    summary = f"{len(due)} of {len(planned)} {which} landed{late}"
    return passed(summary, planned=len(planned), outrun=outrun)


def _because(fault: Fault, problem: Disproof, drill: Drill) -> tuple[str | None, Params]:
    """The known reason why a fault is not shown to have happened: a row of the table of causes, and its parameters."""
    asked = next(iter(requests_of(fault, drill.chaos)), None)
    if asked is None:
        late = _late(drill)
        if fault.id in late.get("late", ()):
            return "never_due", late
        return ("never_due_by_time" if fault.phase is None else "never_reached"), {}
    if f"fault_not_shown.{problem.code}" in TABLE:
        return problem.code, {}
    attempt = next((entry for entry in drill.chaos.attempts if entry.number == asked.attempt), None)
    struck = any(entry.attempt == asked.attempt and entry.how != "note" for entry in drill.chaos.events(FaultObserved))
    if attempt is not None and attempt.unplanned and not struck:
        first = attempt.unplanned[0]
        death = Cause(first.code or "recovery_failed").blame
        if death.whose == "machine":
            return "other_death", {"death": death.reason}
        if fault.facts.notice and drill.by_script and first.code is None:
            return "failed_on_notice", {"attempt": attempt.number}
    return None, {}


def _late(drill: Drill) -> Params:
    """Faults planned for steps after the training's end, and that end; empty if there are none."""
    end = drill.chaos_lineage.final_step
    late = [fault.id for fault in drill.plan.faults if fault.at_step is not None and fault.at_step > end]
    return {"late": late, "end": end} if late else {}


def _altered(drill: Drill) -> str | None:
    """How plan.json differs from the plan that the leg ran under, according to its journal; None if it does not."""
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


def _parted(fault: Fault, due: Sequence[Fault], chaos: LegHistory) -> Disproof | None:
    """Why a fault did not strike together with the others of its group."""
    members = {other.id for other in due if other.group == fault.group}
    attempts = {record.attempt for record in chaos.events(FaultObserved) if record.fault in members}
    if len(attempts) < 2:
        return None
    others = ", ".join(sorted(members - {fault.id}))
    return Disproof("parted", f"it was to strike together with {others}, they struck in several attempts")
