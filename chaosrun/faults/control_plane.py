"""Faults of the control plane of a job: the supervisor, Ray's head, the agent of a node."""

import os
import platform
import signal
from functools import partial
from pathlib import Path
from typing import NoReturn

from chaosrun.errors import RecoveryError
from chaosrun.faults.kind import WITHIN_AN_ATTEMPT, Kind
from chaosrun.faults.node_evidence import BELOW, EndNote, NamedProcess, describe_process, ended, named, on_its_node
from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.outside import FinalStrike
from chaosrun.processes import is_alive, send_signal, wait_gone
from chaosrun.records.codec import changed
from chaosrun.records.events import FaultRequested, LegStarted, SupervisorResumed
from chaosrun.records.history import LegHistory
from chaosrun.records.markers import write_note

END_LIMIT_S = 10.0


def end_head(act: FinalStrike) -> NoReturn:
    """Kill Ray's head, and this process: without a head nothing can be placed, and Ray would end this process after a while."""
    head = act.head()
    if head is None:
        raise RecoveryError("Ray's head was not found", hint="only the head of a private Ray can be struck")
    _end(act, NamedProcess(what="head", pid=head.pid, start_ticks=head.start_ticks), _this_process())


def _this_process() -> NamedProcess:
    own = named("supervisor", os.getpid())
    assert own is not None
    return own


def _end(act: FinalStrike, *struck: NamedProcess) -> NoReturn:
    """Kill these processes, this one last. They are recorded first, for the supervisor that takes over."""
    write_note(act.leg, act.fault, EndNote(host=_this_boot(), struck=struck))
    for each in struck:
        send_signal(each.identity, signal.SIGKILL)
        if wait_gone([each.identity], timeout_s=END_LIMIT_S):
            said = f"the {each.what} (process {each.pid}) outlived a SIGKILL"
            raise RecoveryError(said, hint="`chaosrun resume` continues the run")
    raise AssertionError("a process that was killed is still alive")


def completed_by_successor(note: EndNote) -> EndNote:
    """The previous supervisor's note, completed with which of the processes that it struck are gone."""
    if note.host == _this_boot():
        wait_gone({each.identity: each for each in note.struck}, timeout_s=END_LIMIT_S)
        left = tuple(each for each in note.struck if is_alive(each.identity))
        problem = f"still there: {', '.join(each.what for each in left)}" if left else None
    else:
        left, problem = note.struck, f"it struck on {note.host}, and cannot be seen from {_this_boot()}"
    gone = tuple(each for each in note.struck if each not in left)
    return changed(note, gone=gone, left=left, successor=os.getpid(), problem=problem)


def _this_boot() -> str:
    """Identifies this boot of the machine: a pid and a start time identify a process only within it."""
    return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


def _by_successor(seen: Observation, asked: FaultRequested, leg: LegHistory) -> Disproof | None:
    """Why the struck process was not the supervisor at that time, or the note not its successor's; None when both are right."""
    supervisors = [event for event in leg.journal if isinstance(event, LegStarted | SupervisorResumed)]
    writers = [event.supervisor_pid for event in supervisors if event.seq < asked.seq][-1:]
    struck = [each.pid for each in seen.note.struck if each.what == "supervisor"]
    if struck != writers:
        return Disproof("other_supervisor", f"process {struck} was struck, the supervisor was process {writers}")
    after = [event.supervisor_pid for event in supervisors if event.seq > asked.seq][:1]
    told = "its end was not noted by the supervisor that took over"
    return None if seen.note.successor in after else Disproof("other_successor", told)


def _describe_successor(seen: Observation) -> str:
    gone = ", ".join(f"{each.what} {each.pid}" for each in seen.note.gone)
    return f"gone: {gone or 'none'}, seen by the next supervisor ({seen.note.successor})"


_of_control = partial(Kind, family="control", phases=WITHIN_AN_ATTEMPT, note=EndNote)
_of_supervisors = partial(_of_control, evidence="successor", aftermath=_by_successor, tell=_describe_successor)

KINDS = (
    _of_supervisors(
        name="supervisor",
        words="SIGKILL the supervisor, {rank} waiting",
        proof="the supervisor that took over found its predecessor gone",
        last_act=lambda act: _end(act, _this_process()),
        shows=ended(struck=("supervisor",), gone=("supervisor",), alone=True),
    ),
    _of_control(
        name="agent",
        words="SIGKILL the agent of the node of {rank}",
        proof="the agent's process was seen to be gone",
        outside=lambda strike: strike.end([each for each in strike.node.everybody() if each.what == "agent"]),
        evidence="node",
        aftermath=on_its_node,
        shows=ended(struck=("agent",), gone=BELOW, alone=True),
        tell=describe_process,
    ),
    _of_supervisors(
        name="head",
        words="SIGKILL Ray's head, {rank} waiting",
        proof="the supervisor that took over found Ray's head gone",
        last_act=end_head,
        strikes_ray="head",
        shows=ended(struck=("head", "supervisor"), gone=("head", "supervisor"), alone=True),
    ),
)
