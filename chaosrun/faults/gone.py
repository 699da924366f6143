"""What shows that a node went, or the supervisor and Ray's head: who was struck, who was seen gone, by pid and start time.

Pure. The note of a node's end is written by `faults.witness`, that of the supervisor's by `faults.control_plane`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from chaosrun.faults.seen import Found, Problem, ProblemCode, Seen

if TYPE_CHECKING:
    from chaosrun.records.events import FaultRequested
    from chaosrun.records.history import LegHistory

SOMEBODY_LEFT = ProblemCode("somebody_left", "it is not said that nobody was left: {left}")
NOT_STRUCK = ProblemCode("not_struck", "the {what} was not struck")
NOT_SEEN_GONE = ProblemCode("not_seen_gone", "the {what} was not seen gone")
OTHERS_STRUCK = ProblemCode("others_struck", "others were struck too: {others}")
STRUCK_NOT_GONE = ProblemCode("struck_not_gone", "some that were struck were not seen gone")
OTHER_RANK_GONE = ProblemCode("other_rank_gone", "process {pid} of rank {rank} was not seen gone")
OTHER_AGENT_GONE = ProblemCode("other_agent_gone", "the agent, process {agent}, was not seen gone")
OTHER_NODE = ProblemCode("other_node", "node {node} was ended, rank {rank} was on {here}")
OTHER_SUPERVISOR = ProblemCode("other_supervisor", "process {struck} was struck, the supervisor was process {writers}")
OTHER_SUCCESSOR = ProblemCode("other_successor", "it was not the supervisor that took over who says so")

_ORDER = ("raylet", "head", "supervisor", "agent", "fork server")
BELOW = ("agent", "fork server", "{rank}")
"""What goes with an agent."""


def ended(struck: tuple[str, ...], gone: tuple[str, ...], *, alone: bool = False) -> Callable[[Seen], Problem | None]:
    """What has to be seen of a fault that strikes these and, where `alone`, nobody else, and ends those."""

    def shows(seen: Seen) -> Problem | None:
        hit, over = _by_name(seen.found, "struck"), _by_name(seen.found, "gone")
        rank = f"rank {seen.fault.rank}"
        if seen.found.get("left") != []:
            return SOMEBODY_LEFT(left=seen.found.get("left"))
        for missing, listed, expected in ((NOT_STRUCK, hit, struck), (NOT_SEEN_GONE, over, gone)):
            if lacking := next((what for name in expected if (what := name.format(rank=rank)) not in listed), None):
                return missing(what=lacking)
        if alone and set(hit) - set(struck):
            return OTHERS_STRUCK(others=", ".join(sorted(set(hit) - set(struck))))
        if not {who for each in hit.values() for who in each} <= {who for each in over.values() for who in each}:
            return STRUCK_NOT_GONE()
        return _wrong_agent(seen, over) if seen.fault.facts.evidence == "node" else None

    return shows


def _wrong_agent(seen: Seen, over: Mapping[str, list[tuple[int, int]]]) -> Problem | None:
    if seen.pid not in {pid for pid, _ in over.get(f"rank {seen.fault.rank}", ())}:
        return OTHER_RANK_GONE(pid=seen.pid, rank=seen.fault.rank)
    agent = seen.found.get("agent")
    return None if agent in {pid for pid, _ in over.get("agent", ())} else OTHER_AGENT_GONE(agent=agent)


def wrong_place(seen: Seen, asked: "FaultRequested", chaos: "LegHistory") -> Problem | None:
    """Why it was not the node where that rank was, or the supervisor that wrote the journal then; None when it was."""
    found, before = seen.found, [record for record in chaos.journal if record["seq"] < asked["seq"]]
    if seen.fault.facts.evidence == "node":
        placed = [record["nodes"] for record in before if record["event"] == "placement.acquired"]
        here = [node for node, about in (placed[-1] if placed else {}).items() if seen.fault.rank in about["ranks"]]
        if found.get("node") in here:
            return None
        return OTHER_NODE(node=found.get("node"), rank=seen.fault.rank, here=", ".join(here) or "no known node")
    writers = [record["supervisor_pid"] for record in before if record["event"] in ("leg.started", "supervisor.resumed")]
    struck = [pid for pid, _ in _by_name(found, "struck").get("supervisor", ())]
    if struck != writers[-1:]:
        return OTHER_SUPERVISOR(struck=struck, writers=writers[-1:])
    after = [
        record["supervisor_pid"]
        for record in chaos.journal
        if record["event"] == "supervisor.resumed" and record["seq"] > asked["seq"]
    ]
    return None if found.get("successor") in after[:1] else OTHER_SUCCESSOR()


def tell_node(seen: Seen) -> str:
    """Who went, by name."""
    named = dict.fromkeys(str(each["what"]) for each in _ordered(seen.found) if each["what"] != "process below")
    return f"gone: {', '.join(named)}"


def tell_one(seen: Seen) -> str:
    """The one that was struck by its pid, whoever went with it by a name."""
    struck = {each["pid"] for each in seen.found.get("struck") or ()}
    named = [each for each in _ordered(seen.found) if each["what"] != "process below"]
    direct = [f"{each['what']} {each['pid']}" for each in named if each["pid"] in struck]
    below = [str(each["what"]) for each in named if each["pid"] not in struck]
    return f"gone: {', '.join(direct) or 'nobody'}" + (f", with it {', '.join(dict.fromkeys(below))}" if below else "")


def tell_successor(seen: Seen) -> str:
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
