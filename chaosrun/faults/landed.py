"""The only module that decides whether a fault happened as planned, from the records of those that struck and those that
observed it. Pure.

`observed` has the observation: a death, a hang or a note. Each kind adds its own checks, `shows` and `aftermath`.
"""

import signal
from collections.abc import Callable, Mapping

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import CHECKPOINT_PHASES, LEFT_ON_NOTICE, Evidence
from chaosrun.faults.observed import Disproof, Observation, alive
from chaosrun.faults.process import NoticeNote
from chaosrun.records.events import FaultObserved, FaultRequested, FaultWithdrawn
from chaosrun.records.history import Attempt, LegHistory

BEFORE_THE_STEP = frozenset({"fetch", "forward", "reduce", "optimizer"})
"""Phases within a step, before it is recorded."""


def requests_of(fault: Fault, leg: LegHistory) -> list[FaultRequested]:
    """The fault's `fault.requested` records, without withdrawn ones, which had no effect."""
    standing: list[FaultRequested] = []
    for record in leg.journal:
        if isinstance(record, FaultRequested) and record.fault == fault.id:
            standing.append(record)
        elif isinstance(record, FaultWithdrawn) and record.fault == fault.id:
            standing.clear()
    return standing


def fault_problem(fault: Fault, leg: LegHistory) -> Disproof | None:
    """Why `fault` cannot be shown to have happened as planned; None when it can."""
    requested = requests_of(fault, leg)
    observed = [record for record in leg.events(FaultObserved) if record.fault == fault.id]
    if not requested:
        return Disproof("never_fired", "it never fired")
    attempt = next((attempt for attempt in leg.attempts if attempt.number == requested[0].attempt), None)
    if not observed:
        other = f" before its attempt was ended: {attempt.unplanned[0].reason}" if attempt and attempt.unplanned else ""
        return Disproof("nobody_saw", f"it was requested, but no record shows that it happened{other}")
    if len(requested) > 1 or len(observed) > 1:
        return Disproof("several", f"requested {len(requested)} times, observed {len(observed)} times")
    asked, record = requested[0], observed[0]
    try:
        seen = Observation.of(fault, record)
    except ValueError as error:
        return Disproof("unreadable", f"its record cannot be read ({error})")
    if problem := _elsewhere(fault, asked, record):
        return problem
    if record.how != fault.facts.evidence:
        # The striking process may have noted why it could not strike.
        other = f"it was seen by its {record.how}, a fault of kind {fault.kind} shows by its {fault.facts.evidence}"
        return seen.problem or Disproof("other_evidence", other)
    if attempt is None:
        return Disproof("unknown_attempt", f"attempt {asked.attempt} is not in the journal")
    return (
        _wrong_process(seen, attempt)
        or _wrong_moment(seen, asked, attempt)
        or _PROOFS.get(fault.facts.evidence, note_problem)(seen)
        or (_unrecorded(seen, attempt) if fault.facts.evidence == "death" else None)
        or (_trained_on(seen, asked, attempt, leg) if fault.facts.notice else None)
        or (fault.facts.aftermath(seen, asked, leg) if fault.facts.aftermath else None)
    )


def _elsewhere(fault: Fault, asked: FaultRequested, record: FaultObserved) -> Disproof | None:
    if (asked.rank, asked.phase) != (fault.rank, fault.phase) or fault.at_step not in (None, asked.step):
        return Disproof("elsewhere", f"it fired on rank {asked.rank} at {asked.phase} of step {asked.step}, not as planned")
    if fault.attempt not in (None, asked.attempt):
        return Disproof("other_attempt", f"it fired in attempt {asked.attempt}, not in attempt {fault.attempt}")
    if (record.attempt, record.rank) != (asked.attempt, asked.rank):
        places = [f"rank {each.rank} of attempt {each.attempt}" for each in (asked, record)]
        return Disproof("seen_elsewhere", f"fired by {places[0]}, seen on {places[1]}")
    return None


def _wrong_process(seen: Observation, attempt: Attempt) -> Disproof | None:
    rank, pid = seen.fault.rank, seen.pid
    trace = attempt.traces.get(rank)
    own = {attempt.pids.get(rank), trace.start.pid if trace and trace.start else None} - {None}
    if own != {pid}:
        who = ", ".join(map(str, own)) or "unknown"
        told = f"process {pid} was struck, rank {rank} of attempt {attempt.number} was process {who}"
        return Disproof("other_process", told)
    return None


def _wrong_moment(seen: Observation, asked: FaultRequested, attempt: Attempt) -> Disproof | None:
    """Why its rank was at another point according to its trace, which records a step before its checkpoint and faults; None if
    it was not."""
    fault, kind = seen.fault, seen.fault.facts
    if fault.phase is None or fault.phase == "rendezvous" or not kind.ends_attempt:
        return None
    trace, step = attempt.traces.get(fault.rank), asked.step or 0
    if fault.phase == "restore.begin":
        went_on = trace is not None and trace.start is not None
        return Disproof("went_on", "its attempt ran on after a restore that it was to die before") if went_on else None
    if trace is None or trace.start is None:
        return Disproof("no_trace", f"rank {fault.rank} left no trace of attempt {attempt.number}")
    reached = trace.steps.last or trace.start.position.step
    before = step - 1 if fault.phase in BEFORE_THE_STEP else step
    if kind.notice:
        # On notice, a rank finishes its step, and with others the next; or the script decides when, until grace runs out.
        in_order = seen.signal is None if kind.evidence == "death" else seen.note.left_in_order(fault.rank)
        wrong = reached not in (step, step + 1) if in_order and attempt.by == "chaosrun" else reached < before
    else:
        wrong = reached != before
    beside = {saved.step for saved in trace.checkpoints if saved.pending}
    if not wrong or (reached > step and (fault.phase == "save" or (fault.phase in CHECKPOINT_PHASES and step in beside))):
        # A save may continue during the next steps.
        return None
    words = f"rank {fault.rank} had recorded step {reached} last, a fault at {fault.phase} of step {step} comes after "
    return Disproof("other_moment", f"{words}step {before}")


def _trained_on(seen: Observation, asked: FaultRequested, attempt: Attempt, leg: LegHistory) -> Disproof | None:
    """A script that resumes by itself acts on a notice when it chooses: if it finished the training first, it lost nothing, and
    a restart had nothing left to do."""
    last, told, over = _trained_until(seen, asked, attempt), asked.step or 0, leg.finished
    if last is None or over is None or over.outcome != "completed" or last < over.final_step:
        return None
    at = f"at step {told}" if told else "from outside"
    return Disproof("trained_on", f"told {at}, rank {seen.fault.rank} trained on to the last step, {last}: nothing was resumed")


def _trained_until(seen: Observation, asked: FaultRequested, attempt: Attempt) -> int | None:
    """The last step of a rank whose script got a notice and trained beyond the next step; None for any other rank."""
    trace = attempt.traces.get(seen.fault.rank)
    last = trace.steps.last if trace and attempt.by == "script" and seen.signal != signal.SIGKILL else None
    return last if last is not None and last > (asked.step or 0) + 1 else None


def may_be_taken_back(fault: Fault, record: FaultObserved, leg: LegHistory) -> bool:
    """Whether a fault that this record shows in a running leg may turn out to have had no effect: a notice to a rank that
    trained on, while no later attempt has gone beyond its last step yet."""
    if leg.finished or not fault.facts.notice:
        return False
    asked = requests_of(fault, leg)[0]
    last = _trained_until(Observation.of(fault, record), asked, leg.attempt(asked.attempt))
    later = (each.traces.get(fault.rank) for each in leg.attempts if each.number > asked.attempt)
    return last is not None and not any(trace and (trace.steps.last or 0) > last for trace in later)


def _unrecorded(seen: Observation, attempt: Attempt) -> Disproof | None:
    same = [(death.pid, death.signal, death.exit_code) for death in attempt.exits if death.rank == seen.fault.rank]
    if (seen.pid, seen.signal, seen.exit_code) in same:
        return None
    how = f"exit code {seen.exit_code}" if seen.signal is None else f"signal {seen.signal}"
    return Disproof("no_exit", f"no exit of process {seen.pid} by {how} was recorded")


def death_problem(seen: Observation) -> Disproof | None:
    """Why a process that ended like this did not end by the fault; None when it did."""
    kind = seen.fault.facts
    if kind.evidence != "death":
        return Disproof("shows_otherwise", f"a fault of kind {kind.name} does not show by a death")
    otherwise = f"a fault of kind {kind.name} ends it otherwise"
    if kind.notice and seen.death.of_script and _left_as_it_likes(seen):
        return None
    if seen.signal is not None:
        if seen.signal == signal.SIGTERM and isinstance(seen.note, NoticeNote) and seen.note.unhandled:
            return None
        if seen.signal not in kind.signals:
            return Disproof("other_end", f"the process ended with signal {seen.signal}, {otherwise}")
        if seen.death.killed and seen.death.alone:
            told = "the process was killed because its attempt was over, while it waited for the others of its group"
            return Disproof("killed_with_its_attempt", told)
        return _grace_problem(seen) if kind.notice else kind.shows(seen) if kind.shows else None
    if seen.death.collected:
        return _collected_problem(seen)
    code, wanted = seen.exit_code, kind.exit_code
    if not (code not in (None, 0) if wanted == "failure" else code is not None and code == wanted):
        return Disproof("other_end", f"the process ended with exit code {code}, {otherwise}")
    return kind.shows(seen) if kind.shows else None


def _left_as_it_likes(seen: Observation) -> bool:
    """Whether a script that resumes by itself has left on its notice: with any exit code, or by the notice's signal after
    handling it. An end record that contradicts this counts."""
    if seen.death.killed:
        return False
    end, told_by = seen.death.end, (signal.SIGTERM, signal.SIGINT)
    by_itself = seen.signal in told_by if seen.signal is not None else seen.exit_code is not None
    return by_itself and (end is None or (end.status == LEFT_ON_NOTICE and end.told))


def _collected_problem(seen: Observation) -> Disproof | None:
    """For a rank whose launcher alone knows how it ended: judge by the files it left, and by its claim on the fault."""
    if seen.fault.facts.shows:
        return seen.fault.facts.shows(seen)
    if seen.death.killed or seen.death.end is not None:
        return Disproof("other_end", "it was killed with its attempt, or left an end record: it did not end by the fault")
    return None


def _grace_problem(seen: Observation) -> Disproof | None:
    if seen.death.killed:
        told = "the process was killed because its attempt was over, not because its grace had run out"
        return Disproof("killed_with_its_attempt", told)
    after_s, grace_s = seen.death.after_s, seen.fault.option("grace_s")
    if after_s is not None and after_s >= grace_s:
        return None
    told = f"the process was killed {after_s} s after the notice, before its grace of {grace_s:g} s had run out"
    return Disproof("grace_left", told)


def hang_problem(seen: Observation) -> Disproof | None:
    """Why the rank that `hang.declared` found to have stopped first did not stop by the fault; None when it did."""
    if seen.hang is None:
        return Disproof("nothing_said", "there is no record of what was found of it")
    return (seen.fault.facts.shows or alive)(seen)


def note_problem(seen: Observation) -> Disproof | None:
    """Why a note does not show the fault; None when it does."""
    if seen.note is None:
        return Disproof("nothing_said", "there is no record of what it did")
    shows = seen.fault.facts.shows
    return seen.problem or (shows(seen) if shows else None)


_PROOFS: Mapping[Evidence, Callable[[Observation], Disproof | None]] = {"death": death_problem, "hang": hang_problem}
"""The check for each kind of evidence; all others are shown by a note (`note_problem`)."""
