"""Faults of a node: all its processes are killed, its raylet is killed, or it is drained."""

import os
import signal
import time
from functools import partial

from chaosrun.faults.kind import AT_STEPS, PREEMPTED_EXIT_CODE, WITHIN_AN_ATTEMPT, Kind
from chaosrun.faults.node_evidence import BELOW, EndNote, describe_node, describe_process, ended, named, on_its_node
from chaosrun.faults.observed import Disproof, Observation
from chaosrun.faults.outside import OutsideStrike
from chaosrun.processes import send_signal, wait_gone
from chaosrun.wording import count

POLL_S = 0.005
TELL_LIMIT_S = 5.0
"""How long to wait for the fork server to tell how the ranks ended, once they are gone."""


def end_raylet(strike: OutsideStrike) -> bool:
    raylet = named("raylet", os.getppid())
    return strike.end([] if raylet is None else [raylet])


def drain(strike: OutsideStrike) -> None:
    """Give notice to every rank of this node; end the node when the ranks are gone, or grace has run out."""
    began, node, grace_s = time.monotonic(), strike.node, strike.option("grace_s")
    victims = node.everybody()
    told = tuple(rank for rank, identity in node.ranks.items() if send_signal(identity, signal.SIGTERM))
    # A rank at the fault's point waits for this note.
    strike.note(EndNote(final=False, told=told))
    left = wait_gone([node.ranks[rank] for rank in told], timeout_s=grace_s)
    waited_s = time.monotonic() - began
    while not left and not node.ends.keys() >= set(told) and time.monotonic() - began < waited_s + TELL_LIMIT_S:
        time.sleep(POLL_S)  # they are gone; the fork server is about to report how
    ends = {rank: node.ends[rank] for rank in told if rank in node.ends}
    strike.end(node.everybody(), watch=victims, told=told, ends=ends, waited_s=round(waited_s, 3))


_gone = ended(struck=("agent", "fork server"), gone=BELOW)


def _drained(seen: Observation) -> Disproof | None:
    """Why the ranks did not get a notice and then leave normally, or die when grace had run out; None when they did."""
    if problem := _gone(seen):
        return problem
    note: EndNote = seen.note
    if seen.fault.rank not in note.told:
        return Disproof("not_told", f"rank {seen.fault.rank} was not told to leave")
    out_of_time = note.waited_s >= seen.fault.option("grace_s")
    for rank in note.told:
        end = note.ends.get(rank)
        if end is None:
            if not out_of_time:
                return Disproof("end_unknown", f"it is not known how rank {rank} left")
        elif end.exit_code != PREEMPTED_EXIT_CODE and end.signal != signal.SIGKILL:
            how = f"left with exit code {end.exit_code}" if end.signal is None else f"was ended by signal {end.signal}"
            return Disproof("left_otherwise", f"rank {rank} did not leave on the notice: it {how}")
        elif end.signal == signal.SIGKILL and not out_of_time:
            told = f"rank {rank} was killed {note.waited_s:g} s after the notice, before its grace ran out"
            return Disproof("killed_in_grace", told)
    return None


def _describe_drain(seen: Observation) -> str:
    ends = len(seen.note.ends)
    return f"{count(ends, 'rank')} left on the notice; {describe_node(seen)}" if ends else describe_node(seen)


_of_nodes = partial(Kind, family="node", loss=True, evidence="node", note=EndNote, aftermath=on_its_node)

KINDS = (
    _of_nodes(
        name="node",
        words="SIGKILL every process of the node of {rank}",
        proof="its agent and every process below were seen to be gone",
        phases=WITHIN_AN_ATTEMPT,
        outside=lambda strike: strike.end(strike.node.everybody()),
        shows=ended(struck=BELOW, gone=BELOW),
        tell=describe_node,
    ),
    _of_nodes(
        name="raylet",
        words="SIGKILL the raylet of the node of {rank}",
        proof="the raylet, its agent and every process below were seen to be gone",
        phases=WITHIN_AN_ATTEMPT,
        outside=end_raylet,
        ends_node=True,
        strikes_ray="raylet",
        shows=ended(struck=("raylet",), gone=("raylet", *BELOW), alone=True),
        tell=describe_process,
    ),
    _of_nodes(
        name="drain",
        words="drain notice ({grace_s:g} s of grace) to the node of {rank}",
        proof="its ranks checkpointed and left, and its agent was seen to be gone",
        phases=AT_STEPS,
        options={"grace_s": 30.0},
        outside=lambda strike: strike.later(partial(drain, strike)),
        notice=True,
        ends_node=True,
        shows=_drained,
        tell=_describe_drain,
    ),
)
