"""What shows that a node went, or the supervisor and Ray's head: who was struck, who was seen gone, by pid and start time.

Pure. The note of a node's end is written by `faults.witness`, that of the supervisor's by `faults.control_plane`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from chaosrun.faults.observed import Found, Observation, Problem
from chaosrun.records.events import LegStarted, PlacementAcquired, SupervisorResumed

if TYPE_CHECKING:
    from chaosrun.records.events import FaultRequested
    from chaosrun.records.history import LegHistory

_ORDER = ("raylet", "head", "supervisor", "agent", "fork server")
BELOW = ("agent", "fork server", "{rank}")
"""What goes with an agent."""


def ended(struck: tuple[str, ...], gone: tuple[str, ...], *, alone: bool = False) -> Callable[[Observation], Problem | None]:
    """What has to be seen of a fault that strikes these and, where `alone`, nobody else, and ends those."""

    def shows(seen: Observation) -> Problem | None:
        hit, over = _by_name(seen.found, "struck"), _by_name(seen.found, "gone")
        rank = f"rank {seen.fault.rank}"
        if seen.found.get("left") != []:
            return Problem("somebody_left", f"it is not said that nobody was left: {seen.found.get('left')}")
        for lack, listed, expected in (("struck", hit, struck), ("seen gone", over, gone)):
            if lacking := next((what for name in expected if (what := name.format(rank=rank)) not in listed), None):
                return Problem(f"not_{lack.replace(' ', '_')}", f"the {lacking} was not {lack}")
        if alone and set(hit) - set(struck):
            return Problem("others_struck", f"others were struck too: {', '.join(sorted(set(hit) - set(struck)))}")
        if not {who for each in hit.values() for who in each} <= {who for each in over.values() for who in each}:
            return Problem("struck_not_gone", "some that were struck were not seen gone")
        return _wrong_agent(seen, over) if seen.fault.facts.evidence == "node" else None

    return shows


def _wrong_agent(seen: Observation, over: Mapping[str, list[tuple[int, int]]]) -> Problem | None:
    if seen.pid not in {pid for pid, _ in over.get(f"rank {seen.fault.rank}", ())}:
        return Problem("other_rank_gone", f"process {seen.pid} of rank {seen.fault.rank} was not seen gone")
    agent = seen.found.get("agent")
    told = f"the agent, process {agent}, was not seen gone"
    return None if agent in {pid for pid, _ in over.get("agent", ())} else Problem("other_agent_gone", told)


def on_its_node(seen: Observation, asked: "FaultRequested", leg: "LegHistory") -> Problem | None:
    """Why it was not the node where that rank was then; None when it was."""
    placed = [event.nodes for event in leg.events(PlacementAcquired) if event.seq < asked.seq]
    here = [node for node, about in (placed[-1] if placed else {}).items() if seen.fault.rank in about.ranks]
    if (node := seen.found.get("node")) in here:
        return None
    where = ", ".join(here) or "no known node"
    return Problem("other_node", f"node {node} was ended, rank {seen.fault.rank} was on {where}")


def by_successor(seen: Observation, asked: "FaultRequested", leg: "LegHistory") -> Problem | None:
    """Why it was not the supervisor that wrote the journal then, or not the next one that says so; None when it was."""
    supervisors = [event for event in leg.journal if isinstance(event, LegStarted | SupervisorResumed)]
    writers = [event.supervisor_pid for event in supervisors if event.seq < asked.seq][-1:]
    struck = [pid for pid, _ in _by_name(seen.found, "struck").get("supervisor", ())]
    if struck != writers:
        return Problem("other_supervisor", f"process {struck} was struck, the supervisor was process {writers}")
    after = [event.supervisor_pid for event in supervisors if event.seq > asked.seq][:1]
    told = "it was not the supervisor that took over who says so"
    return None if seen.found.get("successor") in after else Problem("other_successor", told)


def tell_node(seen: Observation) -> str:
    """Who went, by name."""
    named = dict.fromkeys(str(each["what"]) for each in _ordered(seen.found) if each["what"] != "process below")
    return f"gone: {', '.join(named)}"


def tell_one(seen: Observation) -> str:
    """The one that was struck by its pid, whoever went with it by a name."""
    struck = {each["pid"] for each in seen.found.get("struck") or ()}
    named = [each for each in _ordered(seen.found) if each["what"] != "process below"]
    direct = [f"{each['what']} {each['pid']}" for each in named if each["pid"] in struck]
    below = [str(each["what"]) for each in named if each["pid"] not in struck]
    return f"gone: {', '.join(direct) or 'nobody'}" + (f", with it {', '.join(dict.fromkeys(below))}" if below else "")


def tell_successor(seen: Observation) -> str:
    named = [f"{each['what']} {each['pid']}" for each in seen.found.get("gone") or ()]
    return f"gone: {', '.join(named) or 'nobody'}, seen by the next supervisor ({seen.found.get('successor')})"


def _ordered(found: Found) -> list[Mapping[str, Any]]:
    order = {name: place for place, name in enumerate(_ORDER)}
    return sorted(found.get("gone") or (), key=lambda each: (order.get(each["what"], len(order)), each["what"]))


def _by_name(found: Found, key: str) -> dict[str, list[tuple[int, int]]]:
    named: dict[str, list[tuple[int, int]]] = {}
    for each in found.get(key) or ():
        named.setdefault(each["what"], []).append((each["pid"], each["start_ticks"]))
    return named
