"""Faults of what supervises a job: the supervisor itself, Ray's head, the agent of a node."""

import os
import platform
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from chaosrun.errors import RecoveryError
from chaosrun.faults.kind import WITHIN_AN_ATTEMPT, Kind
from chaosrun.faults.node_evidence import BELOW, by_successor, ended, on_its_node, tell_one, tell_successor
from chaosrun.faults.outside import LastAct, OutsideStrike
from chaosrun.processes import ProcessIdentity, identify, is_alive, send_signal, wait_gone
from chaosrun.records.markers import write_note

END_LIMIT_S = 10.0


def end_agent(strike: OutsideStrike) -> bool:
    return strike.end([seen for seen in strike.node.seen() if seen["what"] == "agent"])


def end_supervisor(act: LastAct) -> NoReturn:
    _end_oneself(act, [])


def end_head(act: LastAct) -> NoReturn:
    """And this process with it: without a head nothing can be placed, and Ray would end this process after a while."""
    head = act.head()
    if head is None:
        raise RecoveryError("Ray's head is not to be found", hint="only the head of a private Ray can be struck")
    _end_oneself(act, [("head", head)])


def _end_oneself(act: LastAct, first: list[tuple[str, ProcessIdentity]]) -> NoReturn:
    """What is struck is written down first, for the supervisor that takes over."""
    own = identify(os.getpid())
    assert own is not None
    struck = [*first, ("supervisor", own)]
    named = [{"what": what, "pid": each.pid, "start_ticks": each.start_ticks} for what, each in struck]
    write_note(act.leg, act.fault, kind=act.kind, host=_this_boot(), struck=named)
    for what, identity in struck:
        send_signal(identity, signal.SIGKILL)
        if wait_gone([identity], timeout_s=END_LIMIT_S):
            raise RecoveryError(f"the {what} (process {identity.pid}) outlived a SIGKILL", hint="`chaosrun resume` goes on")
    raise AssertionError("a process that was killed goes on")


def seen_by_successor(note: Mapping[str, Any]) -> dict[str, Any]:
    """What there is to see, from this process, of those whom the supervisor before it struck."""
    identities = {ProcessIdentity(each["pid"], each["start_ticks"]): each for each in note["struck"]}
    if note["host"] == _this_boot():
        wait_gone(identities, timeout_s=END_LIMIT_S)
        left = [each for identity, each in identities.items() if is_alive(identity)]
        problem = f"still there: {', '.join(each['what'] for each in left)}" if left else None
    else:
        left, problem = list(identities.values()), f"it struck on {note['host']}, and cannot be seen from {_this_boot()}"
    gone = [each for each in identities.values() if each not in left]
    return {**note, "gone": gone, "left": left, "successor": os.getpid(), "problem": problem}


def _this_boot() -> str:
    """A machine until it is restarted: a pid and a start time mean something only there."""
    return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"


KINDS = (
    Kind(
        name="supervisor",
        family="control",
        words="SIGKILL the supervisor, {rank} waiting",
        proof="the supervisor that took over found its predecessor gone",
        phases=WITHIN_AN_ATTEMPT,
        last_act=end_supervisor,
        evidence="successor",
        aftermath=by_successor,
        shows=ended(struck=("supervisor",), gone=("supervisor",), alone=True),
        tell=tell_successor,
    ),
    Kind(
        name="agent",
        family="control",
        words="SIGKILL the agent of the node of {rank}",
        proof="the agent's process was seen to be gone",
        phases=WITHIN_AN_ATTEMPT,
        outside=end_agent,
        evidence="node",
        aftermath=on_its_node,
        shows=ended(struck=("agent",), gone=BELOW, alone=True),
        tell=tell_one,
    ),
    Kind(
        name="head",
        family="control",
        words="SIGKILL Ray's head, {rank} waiting",
        proof="the supervisor that took over found Ray's head gone",
        phases=WITHIN_AN_ATTEMPT,
        last_act=end_head,
        strikes_ray="head",
        evidence="successor",
        aftermath=by_successor,
        shows=ended(struck=("head", "supervisor"), gone=("head", "supervisor"), alone=True),
        tell=tell_successor,
    ),
)
