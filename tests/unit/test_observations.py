"""What a supervisor makes of deaths, by the markers of its faults."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaosrun.cluster.messages import Exited
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.landed import fault_problem
from chaosrun.faults.process import NoticeNote
from chaosrun.records import markers
from chaosrun.records.codec import encode
from chaosrun.records.history import LegHistory
from chaosrun.records.layout import LegLayout
from chaosrun.supervise.observations import Observations

RANKS = 60


@pytest.mark.parametrize("group", [None, f"faults.schedule[0] 3/{RANKS}"], ids=["one by one", "all at once"])
def test_a_death_costs_the_same_among_many_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str | None) -> None:
    leg = LegLayout(tmp_path)
    faults = [Fault(id=f"F{n}", rank=n, phase="step", at_step=3, source="a", group=group) for n in range(RANKS)]
    for fault in faults:
        markers.write_marker(leg, fault.id, pid=5_000_000 + fault.rank, ticks=1, rank=fault.rank, attempt=1, group=group)
    recorded: list[object] = []
    seen = Observations(leg, FaultPlan(seed=0, faults=tuple(faults)), lambda event, durable=True: recorded.append(event))
    read: list[Path] = []
    real = markers._read

    def counted(path: Path, decoder: object) -> object:
        read.append(path)
        return real(path, decoder)  # type: ignore[arg-type]

    monkeypatch.setattr(markers, "_read", counted)
    for rank in range(RANKS):
        exited = Exited(attempt=1, rank=rank, pid=5_000_000 + rank, signal=9, died_s=time.time())
        assert seen.of_death(exited) == f"F{rank}"
    assert len(seen.observed) == RANKS
    # Its own marker, note and end record; of a group once those of all.
    assert len(read) <= 3 * RANKS + (RANKS if group else 0)


def test_a_death_is_of_no_fault_of_another_rank_or_process(tmp_path: Path) -> None:
    leg = LegLayout(tmp_path)
    fault = Fault(id="F1", rank=1, phase="step", at_step=3, source="a")
    markers.write_marker(leg, "F1", pid=5_000_001, ticks=1, rank=1, attempt=1)
    seen = Observations(leg, FaultPlan(seed=0, faults=(fault,)), lambda event, durable=True: None)
    for rank, pid, attempt in ((0, 5_000_001, 1), (1, 5_000_002, 1), (1, 5_000_001, 2)):
        exited = Exited(attempt=attempt, rank=rank, pid=pid, signal=9, died_s=time.time())
        assert seen.of_death(exited) is None


def test_others_may_still_be_leaving_on_the_same_notice(tmp_path: Path) -> None:
    leg, pids = LegLayout(tmp_path), {rank: 5_000_000 + rank for rank in range(3)}
    faults = [Fault(id=f"F{rank}", kind="preempt", rank=rank, at_step=3, source="a") for rank in (0, 1)]
    faults.append(Fault(id="F2", kind="kill", rank=2, at_step=3, source="a"))
    for fault in faults:
        about = {"rank": fault.rank, "attempt": 1, "notice": fault.facts.notice}
        markers.write_marker(leg, fault.id, pid=pids[fault.rank], ticks=1, **about)
    seen = Observations(leg, FaultPlan(seed=0, faults=tuple(faults)), lambda event, durable=True: None, by_script=True)
    killed = Exited(attempt=1, rank=2, pid=pids[2], signal=9, died_s=time.time())
    assert seen.of_death(killed) == "F2" and not seen.leaves("F2", killed), "a kill is no notice"
    for rank, others in ((0, True), (1, False)):
        exited = Exited(attempt=1, rank=rank, pid=pids[rank], exit_code=0, died_s=time.time())
        assert seen.of_death(exited) == f"F{rank}" and seen.leaves(f"F{rank}", exited) is others


@pytest.mark.parametrize("by", ["note", "end", None], ids=["it left no end record", "its end record says so", "nobody says so"])
def test_a_notice_that_a_handler_of_an_attached_script_took_has_not_landed(tmp_path: Path, by: str | None) -> None:
    leg = LegLayout(tmp_path)
    fault = Fault(id="F1", kind="preempt", rank=1, phase="step", at_step=3, source="a", options={"grace_s": 1.0})
    leg.attempt(1).path.mkdir(parents=True)
    leg.notes.mkdir(parents=True)
    markers.write_marker(leg, "F1", pid=5_000_001, ticks=1, rank=1, attempt=1, step=3, phase="step", notice=True)
    if by == "note":
        markers.write_note(leg, "F1", NoticeNote(taken=True))
    if by == "end":
        end = markers.WorkerEnd(status="returned", exit_code=0, completed=True, own_sigterm=True)
        leg.attempt(1).end(1).write_bytes(encode(end))
    recorded: list[Any] = []
    seen = Observations(leg, FaultPlan(seed=0, faults=(fault,)), lambda event, durable=True: recorded.append(event))
    assert seen.of_death(Exited(attempt=1, rank=1, pid=5_000_001, exit_code=0, died_s=time.time())) is None
    seen.conclude()
    attempt: Any = SimpleNamespace(number=1, unplanned=())
    history = LegHistory(name="chaos", layout=leg, journal=tuple(recorded), attempts=(attempt,))
    problem = fault_problem(fault, history)
    assert problem and problem.code == ("notice_taken" if by else "nobody_saw")
