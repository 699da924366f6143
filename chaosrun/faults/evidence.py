"""Whether what was seen of a process is the proof of a fault. Pure: who saw it journals it, the verifier asks again.

What is seen of a death (`found`), beside its exit code or signal:

- end      what its end record says: {status, error ("Type: message" or null)}; null when it left none
- note     what the fault wrote down before the harm, or null
- after_s  from the marker to the death
- killed   by chaosrun itself, because its attempt was over
- alone    it was one of several that strike together, and the others had not come

Of a hang it is what was found of the rank's process, of all else the note. What is particular to a kind, its `shows` says.
"""

import re
import string

from chaosrun.faults.kind import PREEMPTED_EXIT_CODE
from chaosrun.faults.seen import NOTHING_SAID, SAID, Problem, ProblemCode, Seen

NO_DEATH = ProblemCode("shows_otherwise", "a fault of kind {kind} does not show by a death")
OTHER_SIGNAL = ProblemCode("other_signal", "the process ended with signal {signal}, a fault of kind {kind} ends it otherwise")
OTHER_EXIT_CODE = ProblemCode(
    "other_exit_code", "the process ended with exit code {exit_code}, a fault of kind {kind} ends it otherwise"
)
KILLED_WAITING = ProblemCode(
    "killed_while_waiting", "the process was killed because its attempt was over, while it waited for the others of its group"
)
KILLED_EARLY = ProblemCode(
    "killed_with_its_attempt", "the process was killed because its attempt was over, not because its grace had run out"
)
GRACE_LEFT = ProblemCode(
    "grace_left", "the process was killed {after_s} s after the notice, before its grace of {grace_s:g} s had run out"
)
END_RECORD = ProblemCode("end_record", "the process left an end record ({status}), a fault of kind {kind} leaves none")
NO_ERROR = ProblemCode("no_error", "the process left no error behind, a fault of kind {kind} does")
NO_VICTIM = ProblemCode("not_written_down", "nothing was written down of {missing}")
OTHER_ERROR = ProblemCode("other_error", "the process left with another error: {error}")
NOTHING_FOUND = ProblemCode("nothing_found", "nothing was written down of what was found of it")
OTHER_STATE = ProblemCode("other_state", "its process was in state {state}, a fault of kind {kind} leaves it alive")

_WANTED_EXIT_CODES = {"none": None, "zero": 0, "preempted": PREEMPTED_EXIT_CODE}


def death_problem(seen: Seen) -> Problem | None:
    """Why a process that ended like this did not end by the fault; None when it did."""
    kind = seen.fault.facts
    if kind.evidence != "death":
        return NO_DEATH(kind=kind.name)
    if seen.signal is not None:
        if seen.signal not in kind.signals:
            return OTHER_SIGNAL(signal=seen.signal, kind=kind.name)
        if seen.found.get("killed") and seen.found.get("alone"):
            return KILLED_WAITING()
        return _grace_problem(seen) if kind.notice else None
    if kind.exit_codes == "failure":
        agrees = seen.exit_code not in (None, 0)
    else:
        agrees = seen.exit_code is not None and seen.exit_code == _WANTED_EXIT_CODES[kind.exit_codes]
    if not agrees:
        return OTHER_EXIT_CODE(exit_code=seen.exit_code, kind=kind.name)
    if kind.exit_codes == "zero" and seen.found.get("end") is not None:
        return END_RECORD(status=seen.found["end"]["status"], kind=kind.name)
    return _error_problem(seen, kind.error) if kind.error is not None else None


def hang_problem(seen: Seen) -> Problem | None:
    """Why a rank that stopped first, as it was found then (`hang.declared`), did not stop by the fault; None when it did."""
    if not seen.found:
        return NOTHING_FOUND()
    shows = seen.fault.facts.shows
    return shows(seen) if shows else alive(seen)


def alive(seen: Seen) -> Problem | None:
    """A rank that hangs is there, and not stopped by a signal."""
    state = seen.found.get("state")
    return OTHER_STATE(state=state, kind=seen.fault.kind) if state in (None, "T", "Z") else None


def note_problem(seen: Seen) -> Problem | None:
    """Why a note does not show the fault; None when it does."""
    if not seen.found:
        return NOTHING_SAID()
    if seen.found.get("problem") is not None:
        return SAID(words=str(seen.found["problem"]))
    shows = seen.fault.facts.shows
    return shows(seen) if shows else None


def _grace_problem(seen: Seen) -> Problem | None:
    if seen.found.get("killed"):
        return KILLED_EARLY()
    after_s, grace_s = seen.found.get("after_s"), seen.fault.option("grace_s")
    return GRACE_LEFT(after_s=after_s, grace_s=grace_s) if after_s is None or after_s < grace_s else None


def _error_problem(seen: Seen, template: str) -> Problem | None:
    """The error has to be the one that this very fault brings about."""
    if not seen.error:
        return NO_ERROR(kind=seen.fault.kind)
    known = {"fault": seen.fault.id, **seen.note}
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    if not names <= known.keys():
        return NO_VICTIM(missing=", ".join(sorted(names - known.keys())))
    wanted = template.format_map({name: re.escape(str(known[name])) for name in names})
    return None if re.search(wanted, seen.error) else OTHER_ERROR(error=seen.error)
