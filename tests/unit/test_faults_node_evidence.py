"""What must be in the records for a node's or a supervisor's end to count as shown: take any part away and it does not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun.faults.fault import Fault
from chaosrun.faults.landed import note_problem
from chaosrun.faults.observed import Observation
from chaosrun.records.events import NodePlace
from chaosrun.records.history import LegHistory
from chaosrun.records.layout import LegLayout
from tests.unit.events import event

Found = dict[str, Any]


def process(what: str, pid: int) -> dict[str, Any]:
    return {"what": what, "pid": pid, "start_ticks": pid * 10}


AGENT, SERVER, RANK_0, RANK_1, RAYLET = (
    process("agent", 50),
    process("fork server", 51),
    process("rank 0", 100),
    process("rank 1", 101),
    process("raylet", 40),
)
BELOW = [AGENT, SERVER, RANK_0, RANK_1]
SUPERVISOR, HEAD = process("supervisor", 10), process("head", 11)
JOURNAL = (
    event(**{"seq": 1, "event": "leg.started", "supervisor_pid": 9}),
    event(**{"seq": 2, "event": "supervisor.resumed", "supervisor_pid": 10}),
    event(**{"seq": 3, "event": "placement.acquired", "nodes": {"n9": NodePlace(ranks=(1,))}}),
    event(**{"seq": 4, "event": "placement.acquired", "nodes": {"n0": NodePlace(ranks=(0, 1)), "n1": NodePlace(ranks=(2,))}}),
    event(**{"seq": 5, "event": "fault.requested"}),
    event(**{"seq": 6, "event": "placement.acquired", "nodes": {"n2": NodePlace(ranks=(0, 1, 2))}}),
    event(**{"seq": 7, "event": "supervisor.resumed", "supervisor_pid": 12}),
    event(**{"seq": 8, "event": "supervisor.resumed", "supervisor_pid": 13}),
)


def shown(kind: Any) -> Found:
    """What a witness writes of a fault that struck rank 1 on node n0."""
    if kind in ("supervisor", "head"):
        struck = [HEAD, SUPERVISOR] if kind == "head" else [SUPERVISOR]
        return {"struck": struck, "gone": list(struck), "left": [], "successor": 12, "problem": None}
    struck = {"agent": [AGENT], "raylet": [RAYLET]}.get(kind, list(BELOW))
    found = {"node": "n0", "agent": 50, "struck": struck, "gone": [RAYLET, *BELOW], "left": [], "problem": None}
    if kind == "drain":
        ends = {rank: {"exit_code": 85, "signal": None} for rank in ("0", "1")}
        found |= {"told": [0, 1], "ends": ends, "waited_s": 0.5, "grace_s": 30.0}
    return found


def problem(kind: Any, found: Any) -> str | None:
    fault = Fault(id="F1", kind=kind, rank=1, at_step=5, source="test")
    chaos = LegHistory(name="chaos", layout=LegLayout(Path("chaos")), journal=JOURNAL)
    seen = Observation.of(fault, event("fault.observed", rank=1, pid=101, how=fault.facts.evidence, found=found))
    assert fault.facts.aftermath is not None
    told = note_problem(seen) or fault.facts.aftermath(seen, event("fault.requested", seq=5), chaos)
    return told and told.words


@pytest.mark.parametrize("kind", ["node", "agent", "raylet", "drain", "supervisor", "head"])
def test_a_whole_record_shows_it(kind: str) -> None:
    assert problem(kind, shown(kind)) is None


def without(key: str, what: str) -> Callable[[Found], Found]:
    return lambda found: {**found, key: [each for each in found[key] if each["what"] != what]}


def put(**values: Any) -> Callable[[Found], Found]:
    return lambda found: {**found, **values}


def end(rank: str, exit_code: int | None, by_signal: int | None, **more: Any) -> Callable[[Found], Found]:
    return lambda found: {**found, "ends": {**found["ends"], rank: {"exit_code": exit_code, "signal": by_signal}}, **more}


@pytest.mark.parametrize(
    ("kind", "change", "told"),
    [
        ("node", lambda _: None, "there is no record"),
        ("node", put(problem="30 s after the strike there still was: agent (50)"), "there still was"),
        ("node", put(left=[AGENT]), "none were left"),
        ("node", lambda found: {key: found[key] for key in found if key != "left"}, "none were left"),
        ("node", without("gone", "agent"), "agent was not seen gone"),
        ("node", without("gone", "fork server"), "fork server was not seen gone"),
        ("node", without("gone", "rank 1"), "rank 1 was not seen gone"),
        ("node", without("struck", "rank 1"), "rank 1 was not struck"),
        ("node", without("gone", "rank 0"), "not seen gone"),
        ("node", put(agent=77), "the agent, process 77, was not seen gone"),
        (
            "node",
            put(gone=[AGENT, SERVER, RANK_0, process("rank 1", 555)], struck=[AGENT, SERVER, process("rank 1", 555)]),
            "101",
        ),
        ("node", put(node="n1"), "rank 1 was on n0"),
        ("node", put(node="n9"), "rank 1 was on n0"),
        ("agent", put(struck=[AGENT, RANK_1]), "others were struck too: rank 1"),
        ("agent", without("gone", "rank 1"), "rank 1 was not seen gone"),
        ("raylet", put(struck=[]), "raylet was not struck"),
        ("raylet", without("gone", "raylet"), "raylet was not seen gone"),
        ("raylet", put(struck=[RAYLET, AGENT]), "others were struck too: agent"),
        ("drain", put(told=[0]), "rank 1 was not told"),
        ("drain", put(ends={}), "not known how rank 0 left"),
        ("drain", end("1", 1, None), "did not leave on the notice: it left with exit code 1"),
        ("drain", end("1", None, 15), "ended by signal 15"),
        ("drain", end("1", None, 9), "before its grace ran out"),
        ("supervisor", put(gone=[]), "supervisor was not seen gone"),
        ("supervisor", put(left=[SUPERVISOR]), "none were left"),
        ("supervisor", put(struck=[process("supervisor", 9)], gone=[process("supervisor", 9)]), "the supervisor was process"),
        ("supervisor", put(successor=13), "was not noted by the supervisor that took over"),
        ("supervisor", put(struck=[SUPERVISOR, HEAD], gone=[SUPERVISOR, HEAD]), "others were struck too: head"),
        ("head", without("struck", "head"), "head was not struck"),
        ("head", without("gone", "head"), "head was not seen gone"),
    ],
)
def test_a_record_that_lacks_something_does_not(kind: str, change: Callable[[Found], Any], told: str) -> None:
    assert told in (problem(kind, change(shown(kind))) or "")


def test_a_rank_that_did_not_go_in_time_may_have_been_killed() -> None:
    late = end("1", None, 9, waited_s=30.0)
    assert problem("drain", late(shown("drain"))) is None
