"""When the supervisor strikes: a clock that is turned by hand, and hands that only write down whom they were to strike."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from chaosrun.cluster.messages import AgentDied, Exited
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.node_evidence import EndNote
from chaosrun.faults.outside import StrikeOrder
from chaosrun.processes import ProcessIdentity
from chaosrun.records.events import FaultObserved, JournalEvent
from chaosrun.records.heartbeat import Heart
from chaosrun.records.history import journal_events
from chaosrun.records.journal import Journal
from chaosrun.records.layout import LegLayout
from chaosrun.records.markers import Marker, Note, read_marker, write_marker, write_note
from chaosrun.supervise.observations import Observations
from chaosrun.supervise.striking import LOOK_EVERY_S, WITNESS_LIMIT_S, OutsideFaults
from tests.records import read_lines
from tests.unit.events import event

if TYPE_CHECKING:
    from chaosrun.cluster.workers import ClusterWorkers

TICK_S = 0.5
START_S = 1000.0


class Hands:
    """Ranks 0 and 1 on node n0, rank 2 on n1."""

    def __init__(self) -> None:
        self.running = {0: (100, 7), 1: (101, 7), 2: (102, 7)}
        self.gone: set[int] = set()
        self.deaf: set[int] = set()
        self.unanswered: set[int] = set()
        self.struck: list[list[tuple[str, str, int]]] = []
        self.lost: list[str] = []
        self.avoided: dict[str, str] = {}

    def node_of(self, rank: int) -> str:
        return "n1" if rank == 2 else "n0"

    def identify_rank(self, attempt: int, rank: int, *, listening: bool = False) -> tuple[int, int] | None:
        return None if listening and rank in self.deaf else self.running.get(rank)

    def strike(self, orders: Sequence[StrikeOrder]) -> list[bool | None]:
        self.struck.append([(order.fault.id, order.fault.kind, order.victim.pid) for order in orders])
        return [None if order.fault.rank in self.unanswered else order.fault.rank not in self.gone for order in orders]

    def lose(self, node: str) -> None:
        self.lost.append(node)

    def avoid(self, node: str, why: str) -> None:
        self.avoided[node] = why

    def is_on_own_node(self, rank: int) -> bool:
        return rank == 2

    def head(self) -> ProcessIdentity | None:
        return None


class Bench:
    """An outside_faults on a leg of its own, whose journal is read back."""

    def __init__(self, folder: Path, *faults: Fault) -> None:
        self.leg = LegLayout(folder)
        self.now = START_S
        self.plan = FaultPlan(seed=0, faults=faults)
        self.hands = Hands()
        self.journal = Journal(self.leg.journal, clock=lambda: self.now)
        self.outside_faults = self._make()

    @classmethod
    def started(cls, folder: Path, *faults: Fault) -> "Bench":
        bench = cls(folder, *faults)
        bench.start(1)
        return bench

    def _make(self) -> OutsideFaults:
        self.observations = Observations(self.leg, self.plan, self._record)
        known = {"leg": self.leg, "plan": self.plan, "observations": self.observations}
        return OutsideFaults(**known, workers=cast("ClusterWorkers", self.hands), clock=lambda: self.now)

    def _record(self, event: JournalEvent, *, durable: bool = True) -> None:
        self.journal.append(event, durable=durable)

    def start(self, attempt: int) -> None:
        self.outside_faults.attempt_started(attempt)
        self.journal.append(event("attempt.started", attempt=attempt, pids={}, address=""))

    def successor(self) -> None:
        past = journal_events(self.leg.journal)
        self.outside_faults = self._make()
        self.observations.observed = {event.fault for event in past if isinstance(event, FaultObserved)}
        self.outside_faults.take_over(past, self.now)

    def look(self, at_s: float, *, running: bool = True) -> tuple[str, AgentDied] | None:
        self.now = START_S + at_s
        return self.outside_faults.look(running=running)

    def struck(self) -> list[str]:
        return [fault for orders in self.hands.struck for fault, _, _ in orders]

    def told(self) -> list[tuple[str, str]]:
        return [(r["event"], r["fault"]) for r in read_lines(self.leg.journal) if r["event"].startswith("fault.")]

    def arrive(self, fault: str, rank: int, *, attempt: int = 1) -> None:
        pid = self.hands.running[rank][0]
        assert write_marker(self.leg, fault, rank=rank, attempt=attempt, pid=pid, ticks=7, phase="step", step=5)

    def witness(self, fault: str, **found: Any) -> None:
        write_note(self.leg, fault, EndNote(**{"node": "n0", **found}))


def timed(name: str, after_s: float, **more: Any) -> Fault:
    return Fault(**{"id": name, "kind": "kill", "rank": 1, "phase": None, "after_s": after_s, "source": "test", **more})


def parked(name: str, kind: Any, rank: int = 1, **more: Any) -> Fault:
    return Fault(id=name, kind=kind, rank=rank, phase="step", at_step=5, source="test", **more)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "chaos"


def test_a_fault_is_waited_for_exactly_and_claimed_and_told_before_it_strikes(folder: Path) -> None:
    bench = Bench(folder, timed("F1", 2.0))
    assert bench.outside_faults.patience_s(TICK_S, running=True) == TICK_S, "no clock runs before the first start"
    bench.start(1)
    bench.look(1.75)
    assert bench.outside_faults.patience_s(TICK_S, running=True) == pytest.approx(0.25)
    assert bench.outside_faults.patience_s(TICK_S, running=False) == TICK_S
    assert bench.struck() == []
    claimed_before: list[Any] = []
    strike = bench.hands.strike

    def look_first(orders: Sequence[StrikeOrder]) -> list[bool | None]:
        claimed_before.append((read_marker(bench.leg, "F1"), bench.told()))
        return strike(orders)

    bench.hands.strike = look_first
    bench.look(2.0)
    assert bench.hands.struck == [[("F1", "kill", 101)]]
    ((marker, told),) = claimed_before
    assert (marker.rank, marker.pid, marker.start_ticks, marker.phase) == (1, 101, 7, None)
    assert told == [("fault.requested", "F1")]
    bench.look(3.0)
    assert bench.struck() == ["F1"], "an id strikes once"


def test_a_rank_that_does_not_run_is_struck_in_its_next_attempt(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0), timed("F2", 1.0, rank=2))
    del bench.hands.running[1]
    bench.look(1.5, running=False)
    assert bench.struck() == []
    bench.look(1.5)
    assert bench.struck() == ["F2"], "another one does not wait for it"
    bench.hands.running[1] = (201, 9)
    bench.look(1.6)
    assert bench.struck() == ["F2"], "the attempt is ending already"
    bench.observations.see("F2", Marker(attempt=1, rank=2, pid=102, time_s=0.0), how="death", found=Note())
    bench.outside_faults.attempt_stopped()
    bench.start(2)
    bench.look(2.0)
    assert bench.hands.struck[-1] == [("F1", "kill", 201)]
    assert read_marker(bench.leg, "F1").attempt == 2  # type: ignore[union-attr]


def test_the_faults_of_a_group_strike_in_one_go_and_one_that_spares_the_job_waits_for_nobody(folder: Path) -> None:
    group = [timed(f"F{rank}", 1.0, rank=rank, group="g/3") for rank in range(3)]
    bench = Bench.started(folder, *group, timed("F9", 1.0, rank=0, kind="pause"))
    bench.look(1.0)
    (orders,) = bench.hands.struck
    assert sorted(fault for fault, _, _ in orders) == ["F0", "F1", "F2", "F9"]


def test_a_rank_is_not_given_a_notice_that_it_would_die_of(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0, kind="preempt"))
    bench.hands.deaf.add(1)
    bench.look(1.0)
    assert bench.struck() == []
    assert bench.outside_faults.patience_s(TICK_S, running=True) == LOOK_EVERY_S
    bench.hands.deaf.clear()
    bench.look(1.1)
    assert bench.struck() == ["F1"]


def test_a_rank_that_trains_is_given_notice_whether_it_has_a_handler_or_not(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0, kind="preempt"))
    bench.hands.deaf.add(1)
    beat = bench.leg.attempt(1).heartbeat(1)
    beat.parent.mkdir(parents=True, exist_ok=True)
    heart = Heart()
    heart.open(beat)
    for step, struck in ((0, []), (1, ["F1"])):
        heart.beat("forward", step)
        bench.look(1.0 + step)
        assert bench.struck() == struck


def test_a_strike_that_found_nobody_is_withdrawn_and_comes_again(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0))
    bench.hands.gone.add(1)
    bench.look(1.0)
    assert bench.told() == [("fault.requested", "F1"), ("fault.withdrawn", "F1")]
    assert read_marker(bench.leg, "F1") is None
    bench.hands.gone.clear()
    bench.start(2)
    bench.look(1.5)
    assert bench.struck() == ["F1", "F1"]


def test_a_strike_whose_answer_was_lost_is_not_withdrawn_before_its_attempt_is_over(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0))
    bench.hands.unanswered.add(1)
    bench.look(1.0)
    assert bench.told() == [("fault.requested", "F1")]
    assert read_marker(bench.leg, "F1") is not None
    bench.outside_faults.attempt_stopped()
    assert bench.told()[1:] == [("fault.withdrawn", "F1")]


def test_what_was_not_seen_when_its_attempt_had_ended_strikes_again(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0), timed("F2", 1.0, kind="pause"), parked("F3", "node", attempt=1))
    bench.look(1.0)
    bench.outside_faults.attempt_stopped()
    # The pause needs no end of the attempt to be seen.
    assert [told for told in bench.told() if told[0] == "fault.withdrawn"] == [("fault.withdrawn", "F1")]
    bench.start(2)
    bench.look(1.5)
    assert bench.struck() == ["F1", "F2", "F1"]


def test_a_supervisor_that_takes_over_keeps_the_clock_and_the_lost_nodes(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 10.0), parked("F2", "drain"))
    bench.arrive("F2", 1)
    bench.look(1.0)
    bench.witness("F2")
    assert bench.look(2.0)
    bench.hands.avoided.clear()
    bench.now = START_S + 8.0
    bench.successor()
    assert bench.hands.avoided.keys() == {"n0"}
    bench.start(2)
    bench.look(9.5)
    assert bench.outside_faults.patience_s(TICK_S, running=True) == pytest.approx(0.5)
    assert bench.struck() == ["F2"]
    bench.look(10.0)
    assert bench.struck() == ["F2", "F1"]


def test_a_node_is_lost_when_its_witness_has_spoken(folder: Path) -> None:
    bench = Bench.started(folder, parked("F1", "node"))
    assert bench.look(0.1) is None
    assert bench.outside_faults.patience_s(TICK_S, running=True) == LOOK_EVERY_S, "a rank may come to its point"
    bench.arrive("F1", 1)
    assert bench.look(0.2) is None
    assert bench.hands.struck == [[("F1", "node", 101)]]
    assert bench.outside_faults.is_terminating("n0")
    assert not bench.outside_faults.is_terminating("n1")
    assert bench.outside_faults.patience_s(TICK_S, running=False) == LOOK_EVERY_S
    bench.witness("F1", gone=[])
    lost = bench.look(0.3, running=False)
    assert lost is not None
    node, how = lost
    assert (node, how.fault) == ("n0", "F1")
    assert bench.hands.lost == ["n0"]
    assert bench.hands.avoided == {}, "chaosrun's own processes went, the node may be used again"
    assert bench.told() == [("fault.requested", "F1"), ("fault.observed", "F1")]
    assert not bench.outside_faults.is_terminating("n0")
    assert bench.look(0.4) is None


def test_a_witness_that_does_not_speak_proves_nothing(folder: Path) -> None:
    bench = Bench.started(folder, parked("F1", "raylet"))
    bench.arrive("F1", 1)
    bench.look(0.0)
    assert bench.look(WITNESS_LIMIT_S - 0.1) is None
    assert bench.look(WITNESS_LIMIT_S + 0.1)
    seen = [record for record in read_lines(bench.leg.journal) if record["event"] == "fault.observed"]
    assert [record["found"]["problem"] for record in seen] == ["its witness did not speak"]


def test_a_node_at_which_two_faults_arrive_ends_once(folder: Path) -> None:
    bench = Bench.started(folder, *(parked(f"F{rank}", "node", rank) for rank in range(3)))
    for rank in range(3):
        bench.arrive(f"F{rank}", rank)
    bench.look(0.2)
    assert bench.hands.struck == [[("F0", "node", 100), ("F2", "node", 102)]], "F1 shares its node with F0"
    bench.witness("F0")
    bench.witness("F2", node="n1")
    assert {node for at_s in (0.3, 0.4) for node, _ in [bench.look(at_s) or ("", None)]} == {"n0", "n1"}
    observed = [fault for event, fault in bench.told() if event == "fault.observed"]
    assert sorted(observed) == ["F0", "F1", "F2"]


def test_ranks_that_leave_while_a_node_is_drained_leave_on_its_notice(folder: Path) -> None:
    bench = Bench(folder, parked("F1", "drain"))
    left = Exited(attempt=1, rank=1, pid=101, exit_code=85, died_s=0.0)
    bench.start(1)
    assert bench.outside_faults.of_death(left) is None
    bench.arrive("F1", 1)
    bench.look(0.1)
    assert bench.outside_faults.of_death(left) == "F1"
    assert bench.outside_faults.of_death(Exited(attempt=1, rank=1, pid=101, exit_code=1, died_s=0.0)) is None
    write_note(bench.leg, "F1", EndNote(final=False, told=(0, 1)))
    assert bench.look(0.2) is None, "its witness has not spoken"


def test_a_marker_that_is_half_written_is_looked_at_again(folder: Path) -> None:
    bench = Bench.started(folder, parked("F1", "agent"))
    bench.leg.faults.mkdir(parents=True)
    marker = bench.leg.faults / "F1.json"
    marker.write_text('{"v": 1, "fau')
    bench.look(0.1)
    assert bench.struck() == []
    about = {"rank": 1, "attempt": 1, "pid": 101, "start_ticks": 7, "phase": "step", "step": 5, "time_s": 0.0}
    marker.write_text(json.dumps({"v": 1, "fault": "F1", **about}))
    bench.look(0.2)
    assert bench.struck() == ["F1"]


def test_the_node_under_the_supervisor_itself_cannot_be_taken_away(folder: Path) -> None:
    assert "rank 2 is on the node that the supervisor itself" in (
        Bench(folder, parked("F1", "raylet", 2)).outside_faults.misplaced() or ""
    )
    assert Bench(folder / "a", parked("F1", "raylet", 1), parked("F2", "node", 2)).outside_faults.misplaced() is None


def test_a_fault_that_comes_while_the_leg_runs_strikes_like_a_planned_one(folder: Path) -> None:
    bench = Bench(folder, timed("F1", 5.0))
    assert bench.outside_faults.elapsed_s() == 0.0
    bench.start(1)
    bench.look(1.0)
    assert bench.outside_faults.elapsed_s() == 1.0
    late = timed("F2", bench.outside_faults.elapsed_s(), rank=0)
    bench.observations.add(late)
    bench.outside_faults.add([late])
    bench.look(1.0, running=False)
    assert bench.struck() == [], "not before its rank runs"
    bench.look(1.1)
    assert bench.struck() == ["F2"] and bench.told() == [("fault.requested", "F2")]
    assert read_marker(bench.leg, "F2").rank == 0  # type: ignore[union-attr]
    bench.look(6.0)
    assert bench.struck() == ["F2"], "F1 waits for the next attempt, which F2 began"
    bench.start(2)
    bench.look(6.1)
    assert bench.struck() == ["F2", "F1"]


def test_one_that_came_late_waits_for_all_of_its_group(folder: Path) -> None:
    bench = Bench.started(folder)
    bench.look(1.0)
    group = [timed(f"F{number + 1}", 1.0, rank=number, group="G1/2") for number in range(2)]
    for fault in group:
        bench.observations.add(fault)
    bench.outside_faults.add(group)
    gone = bench.hands.running.pop(1)
    bench.look(1.1)
    assert bench.struck() == []
    bench.hands.running[1] = gone
    bench.look(1.2)
    assert [len(orders) for orders in bench.hands.struck] == [2]


def test_a_fault_granted_before_its_supervisor_died_strikes_under_the_next(folder: Path) -> None:
    bench = Bench.started(folder)
    bench.look(3.0)
    # In plan.json, and no more than that.
    bench.plan = FaultPlan(seed=0, faults=(timed("F1", 3.0),))
    bench.successor()
    bench.outside_faults.attempt_started(2)
    bench.look(3.1)
    assert bench.struck() == ["F1"]


def test_what_leaves_its_rank_alive_is_told_as_soon_as_it_is_over(folder: Path) -> None:
    bench = Bench.started(folder, timed("F1", 1.0, kind="pause"))
    bench.look(1.0)
    bench.look(1.5)
    assert bench.told() == [("fault.requested", "F1")]
    write_note(bench.leg, "F1", Note(final=False))
    bench.look(1.6)
    assert bench.told() == [("fault.requested", "F1")]
    write_note(bench.leg, "F1", Note())
    bench.look(1.7)
    bench.look(1.8)
    assert bench.told() == [("fault.requested", "F1"), ("fault.observed", "F1")]
