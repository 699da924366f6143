"""Several drills at once: what begins when, and what becomes of all when one fails or somebody interrupts."""

import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, cast

import pytest
from suites import DRILL

from chaosrun.campaign.planned_drill import PlannedDrill
from chaosrun.campaign.results import DrillResult
from chaosrun.campaign.scheduler import PlacementPool, RunningSupervisors, Scheduler, Shape
from chaosrun.errors import InterruptedRunError
from chaosrun.supervise.interrupts import Interrupts
from chaosrun.supervise.run import Listener
from chaosrun.supervise.supervisor import Supervisor


def drills(*names: str, **about: Any) -> list[PlannedDrill]:
    """Each with a reference of its own, unless it is said."""
    return [replace(DRILL, name=name, base=name, reference=about.pop("reference", name), **about) for name in names]


@dataclass
class Room:
    """Stands for places: so many workers fit."""

    size: int
    used: int = 0
    most: int = 0
    log: list[str] = field(default_factory=list)
    interrupts: Interrupts = field(default_factory=Interrupts)
    signal_at: int = 0
    """As a place is asked for the so manieth time; 0: never."""

    def take(self, shape: Shape, *, fresh: bool) -> Any:
        self.signal_at -= 1
        if self.signal_at == 0:
            with self.interrupts.postponed():  # Ray is asked for agents
                signal.raise_signal(signal.SIGTERM)
        if self.used and self.used + shape.workers > self.size:
            return None
        self.used += shape.workers
        self.most = max(self.most, self.used)
        return self

    def give_back(self, shape: Shape, cluster: Any, *, sound: bool) -> None:
        self.used -= shape.workers
        if not sound:
            self.log.append("place closed")

    def clear(self) -> None:
        self.log.append("cleared")


@dataclass
class Stage:
    """Carries drills out: each waits until `go` says so, where it is given."""

    room: Room
    act: Callable[[PlannedDrill, Listener], None] = lambda drill, listen: None
    told: list[tuple[str, str]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    beside: dict[str, set[str]] = field(default_factory=dict)
    ok: Callable[[str], bool] = lambda name: True
    lock: threading.Lock = field(default_factory=threading.Lock)
    supervisors: RunningSupervisors = field(default_factory=RunningSupervisors)

    @property
    def began(self) -> list[str]:
        return [name for event, name in self.told if event == "drill.began"]

    def hear(self, record: dict[str, Any]) -> None:
        self.told.append((record["event"], record["drill"]))

    def run(self, wanted: list[PlannedDrill], *, at_once: int = 9, fail_fast: bool = False) -> None:
        running: set[str] = set()

        def carry(drill: PlannedDrill, place: Any, watch: Any, listen: Listener) -> tuple[DrillResult, bool]:
            with self.lock:
                self.supervisors = watch
                running.add(drill.name)
                self.beside[drill.name] = {*running}
            try:
                self.act(drill, listen)
            finally:
                with self.lock:
                    running.discard(drill.name)
            surprises = () if self.ok(drill.name) else ("no",)
            return DrillResult(name=drill.name, run=None, status="PASS", expected="PASS", surprises=surprises), True

        def on_result(drill: PlannedDrill, result: DrillResult) -> bool:
            assert self.told[-1] == ("drill.left", drill.name)
            self.ended.append(drill.name)
            return result.ok or not fail_fast

        Scheduler(carry=carry, pool=cast(PlacementPool, self.room), at_once=at_once, tell=self.hear, on_result=on_result).run(
            [drill.task for drill in wanted]
        )
        assert self.room.used == 0


def test_all_are_carried_out_as_many_at_once_as_fit() -> None:
    both = threading.Barrier(2)

    def act(drill: PlannedDrill, listen: Listener) -> None:
        both.wait(10)

    stage = Stage(Room(4), act=act)
    stage.run(drills("a", "b", "c", "d", workers=2))
    assert stage.began == ["a", "b", "c", "d"] and sorted(stage.ended) == ["a", "b", "c", "d"]
    assert stage.room.most == 4


def test_no_more_than_was_asked_for() -> None:
    stage = Stage(Room(9))
    stage.run(drills("a", "b", "c"), at_once=1)
    assert stage.ended == ["a", "b", "c"] and stage.room.most == 1
    assert all(names == {name} for name, names in stage.beside.items())


def test_one_that_is_too_large_is_tried_all_the_same() -> None:
    # Whoever wants the resources tells what is missing, better than anybody here could.
    stage = Stage(Room(2))
    stage.run(drills("a", workers=5))
    assert stage.ended == ["a"]


@pytest.mark.parametrize("event", ["leg.started", "supervisor.resumed"])
def test_a_reference_is_made_once(event: str) -> None:
    made, waited = threading.Event(), threading.Event()

    def act(drill: PlannedDrill, listen: Listener) -> None:
        if drill.name == "a":
            assert waited.wait(10)  # `other` has begun, `b` has not
            assert "b" not in stage.began
            listen({"event": "supervisor.resumed", "leg": "reference"})
            listen({"event": event, "leg": "chaos"})
            assert made.wait(10)  # now `b` runs beside
        elif drill.name == "b":
            made.set()
        else:
            waited.set()

    stage = Stage(Room(9), act=act)
    shared = [replace(drill, reference="same") for drill in drills("a", "b")]
    stage.run([*shared, *drills("other")])
    assert stage.began == ["a", "other", "b"]


def test_what_takes_others_along_runs_alone() -> None:
    stage = Stage(Room(9))
    stage.run([*drills("a", "b"), *drills("head", kinds=("kill", "head")), *drills("c")])
    assert sorted(stage.ended) == ["a", "b", "c", "head"]
    assert stage.beside["head"] == {"head"} and stage.room.log == ["cleared"]
    assert stage.began.index("c") > stage.began.index("head")


def test_fail_fast_begins_no_more() -> None:
    stage = Stage(Room(1), ok=lambda name: name != "b")
    stage.run(drills("a", "b", "c", "d"), at_once=1, fail_fast=True)
    assert stage.began == ["a", "b"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a bug")])
def test_what_is_under_way_ends_in_order(error: BaseException) -> None:
    entered = threading.Event()

    def act(drill: PlannedDrill, listen: Listener) -> None:
        if drill.name == "a":
            assert entered.wait(10)
            raise error
        entered.set()

    stage = Stage(Room(9), act=act)
    with pytest.raises(type(error)):
        stage.run(drills("a", "b"))
    # What ended all the same counts, and its place is given back.
    assert stage.ended == ["b"] and stage.room.used == 0


@dataclass(eq=False)
class Interruptible:
    """Stands for a supervisor."""

    interrupted: threading.Event

    def interrupt(self) -> None:
        self.interrupted.set()


@pytest.mark.parametrize("asked", [1, 2, 3])
def test_a_signal_while_agents_are_got_interrupts(asked: int) -> None:
    """The third time there is no room: nothing begins, and all that runs is waited for."""

    def act(drill: PlannedDrill, listen: Listener) -> None:
        interrupted = threading.Event()
        stage.supervisors.watch()(cast(Supervisor, Interruptible(interrupted)))
        assert interrupted.wait(10)

    stage = Stage(Room(2, signal_at=asked), act=act)
    with pytest.raises(InterruptedRunError), stage.room.interrupts:
        stage.run(drills("a", "b", "c", "d"))
    assert sorted(stage.ended) == stage.began == ["a", "b"][:asked]
