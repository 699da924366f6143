"""Whether what was seen of a process is the proof of a fault. Pure: who saw it journals it, the verifier asks again.

What is seen of a death (`found`), beside its exit code or signal:

- end      what its end record says: {status, error ("Type: message" or null)}; null when it left none
- note     what the fault wrote down before the harm, or null
- after_s  from the marker to the death
- killed   by chaosrun itself, because its attempt was over
- alone    it was one of several that strike together, and the others had not come
"""

import re
import signal
import string
from collections.abc import Mapping
from typing import Any

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import PREEMPTED_EXIT_CODE

_WANTED_EXIT_CODES = {"none": None, "zero": 0, "preempted": PREEMPTED_EXIT_CODE}


def signal_name(number: int | None) -> str:
    """SIGKILL; "signal 40" of one that has no name, as the real-time signals."""
    if number is None:
        return "no signal"
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def death_problem(fault: Fault, *, exit_code: int | None, by_signal: int | None, found: Mapping[str, Any]) -> str | None:
    """Why a process that ended like this did not end by `fault`, a fault whose evidence is a death; None when it did."""
    kind = fault.facts
    if kind.evidence != "death":
        return f"a fault of kind {fault.kind} does not show by a death"
    if by_signal is not None:
        if by_signal not in kind.signals:
            return f"the process ended with signal {by_signal}, a fault of kind {fault.kind} ends it otherwise"
        if found.get("killed") and found.get("alone"):
            return "the process was killed because its attempt was over, while it waited for the others of its group"
        return _grace_problem(fault, found) if "grace_s" in kind.options else None
    if kind.exit_codes == "failure":
        agrees = exit_code not in (None, 0)
    else:
        agrees = exit_code is not None and exit_code == _WANTED_EXIT_CODES[kind.exit_codes]
    if not agrees:
        return f"the process ended with exit code {exit_code}, a fault of kind {fault.kind} ends it otherwise"
    if kind.exit_codes == "zero" and found.get("end") is not None:
        return f"the process left an end record ({found['end']['status']}), a fault of kind {fault.kind} leaves none"
    return _error_problem(fault, found) if kind.error is not None else None


def hang_problem(fault: Fault, found: Mapping[str, Any]) -> str | None:
    """Why a rank that stopped first, as it was `found` then (`hang.declared`), did not stop by this fault; None when it did."""
    state, stage = found.get("state"), found.get("stage")
    if fault.kind == "stop":
        return None if state == "T" else f"its process was in state {state}, a process that SIGSTOP stopped is in state T"
    if state in (None, "T", "Z"):
        return f"its process was in state {state}, a fault of kind {fault.kind} leaves it alive"
    if fault.kind == "no_arrival" and stage != "started":
        return f"it was at the stage {stage}, beyond the rendezvous that it was not to come to"
    return None


def note_problem(fault: Fault, found: Mapping[str, Any]) -> str | None:
    """Why the note of a pause or of a slow rank does not show one; None when it does, and for other kinds."""
    if fault.kind == "pause":
        stopped, before, after = (found.get(f"state_{when}") for when in ("stopped", "before", "after"))
        if (stopped, before) != ("T", "T") or after in ("T", "Z", None):
            return f"the process was seen in the states {stopped}, {before} and {after}, not stopped and then running"
        if found.get("stopped_s", 0.0) < fault.option("duration_s"):
            return f"the process was stopped for {found.get('stopped_s')} s, not for {fault.option('duration_s'):g} s"
    if fault.kind == "slow_storage":
        waits, waited_s = found.get("waits"), found.get("waited_s")
        if not waits or not waited_s or waited_s < waits * fault.option("duration_s") - 1e-3:
            return f"the storage made it wait {waits} times, {waited_s} s in all"
    if fault.kind == "slow":
        steps, before_s, during_s = (found.get(key) for key in ("steps", "before_s", "during_s"))
        if steps != fault.option("steps"):
            return f"{steps} steps were stretched, not {fault.option('steps')}"
        # Both were rounded when they were written down.
        if not before_s or not during_s or during_s < fault.option("factor") * before_s - 1e-4:
            return f"steps took {during_s} s, not {fault.option('factor'):g} times the {before_s} s of before"
    return None


def _grace_problem(fault: Fault, found: Mapping[str, Any]) -> str | None:
    if found.get("killed"):
        return "the process was killed because its attempt was over, not because its grace had run out"
    after_s, grace_s = found.get("after_s"), fault.option("grace_s")
    if after_s is None or after_s < grace_s:
        return f"the process was killed {after_s} s after the notice, before its grace of {grace_s:g} s had run out"
    return None


def _error_problem(fault: Fault, found: Mapping[str, Any]) -> str | None:
    """The error has to be the one that this very fault brings about."""
    end, template = found.get("end"), fault.facts.error
    assert template is not None
    if end is None or end["error"] is None:
        return f"the process left no error behind, a fault of kind {fault.kind} does"
    known = {"fault": fault.id, **(found.get("note") or {})}
    names = {name for _, name, _, _ in string.Formatter().parse(template) if name}
    if not names <= known.keys():
        return f"nothing was written down of {', '.join(sorted(names - known.keys()))}"
    if re.search(template.format_map({name: re.escape(str(known[name])) for name in names}), end["error"]) is None:
        return f"the process left with another error: {end['error']}"
    return None
