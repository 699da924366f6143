"""What the records tell of a restart's time, and what they do not."""

from pathlib import Path
from typing import Any

import pytest

from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import read_run, recorded_leg
from chaosrun.verify.lineage import lineage
from chaosrun.verify.recovery_times import RecoveryTimes, recoveries_of, work_of
from chaosrun.verify.verdict import judge
from tests.unit.legs import drop, edit_journal, edit_ranks, edit_trace, only, put


def recovery_times(run: RunLayout) -> tuple[RecoveryTimes, ...]:
    return recoveries_of(read_leg(recorded_leg(run, read_run(run), "chaos")))


def chaos(run: RunLayout) -> LegHistory:
    return read_leg(run.leg("chaos"))


def known(times: RecoveryTimes) -> set[str]:
    return {phase for phase, seconds in times.phases.items() if seconds is not None}


def test_the_phases_of_a_recovery_follow_each_other(exact: RunLayout) -> None:
    # By the clock of legs.py, half a second a look: the death, its record; the sighting, two exits seen and recorded, the stop;
    # starting, started, three ranks that enter and hold their state in turn; then the steps.
    first, *others = recovery_times(exact)
    assert len(others) == 2
    phases = {"detect": 1.0, "stop": 3.0, "start": 3.5, "restore": 0.5, "first_step": 0.5}
    assert first == RecoveryTimes(attempt=2, phases=phases, total_s=8.5)
    for times in (first, *others):
        assert sum(filter(None, times.phases.values())) == times.total_s


def test_the_account_of_the_attempts_has_the_same_totals(exact: RunLayout) -> None:
    totals = {attempt.attempt: attempt.recovery_s for attempt in judge(exact).attempts}
    assert totals == {1: None} | {times.attempt: times.total_s for times in recovery_times(exact)}


def test_a_trace_that_does_not_tell_when_the_restore_began_leaves_that_open(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("start", put(entered_s=None)))
    first = recovery_times(run)[0]
    assert known(first) == {"detect", "stop", "first_step"}
    assert first.total_s == 8.5


def test_a_rank_that_wrote_nothing_may_have_been_the_last(run: RunLayout) -> None:
    run.leg("chaos").attempt(2).trace(2).write_text("")
    assert known(recovery_times(run)[0]) == {"detect", "stop"}


def test_an_attempt_without_a_step_has_no_recovery(run: RunLayout) -> None:
    edit_ranks(run, "chaos", 2, only("step", drop))
    first = recovery_times(run)[0]
    assert first.total_s is None
    assert known(first) == {"detect", "stop", "start", "restore"}


def test_clocks_that_disagree_give_no_negative_times(run: RunLayout) -> None:
    edit_journal(run, "chaos", only("worker.exited", lambda line: {**line, "died_s": line["died_s"] + 1.5}))
    assert recovery_times(run)[0].phases["detect"] is None


def test_a_hang_begins_with_its_silence(run: RunLayout) -> None:
    before = recovery_times(run)[0]
    hang = {"event": "hang.declared", "first": 1, "ranks": [], "silent_s": 30.0}
    edit_journal(run, "chaos", lambda line: {**line, **hang} if line["event"] == "fault.observed" else line)
    after = recovery_times(run)[0]
    detect_s = before.phases["detect"]
    assert after.phases["detect"] == 30.0
    assert before.total_s is not None and detect_s is not None and before.phases["stop"] is not None
    # It was declared half a second after the record of the death that it stands in for.
    assert after.total_s == before.total_s - detect_s - 0.5 + 30.0


def test_what_nobody_was_left_to_see_begins_with_the_last_recorded_step(run: RunLayout) -> None:
    seen = recovery_times(run)[0]
    edit_journal(run, "chaos", lambda line: None if line["event"] == "worker.exited" and line["attempt"] == 1 else line)
    lost_node = recovery_times(run)[0]
    assert lost_node.phases["detect"] is not None and lost_node.phases["stop"] == 0.0
    assert known(lost_node) == known(seen) and lost_node.phases["start"] == seen.phases["start"]
    # And of a supervisor that died, too, its successor takes note.
    taken_over = {"event": "supervisor.resumed", "supervisor_pid": 2}

    def succeed(line: dict[str, Any]) -> dict[str, Any]:
        stopped = line["event"] == "attempt.stopped" and line["attempt"] == 1
        return {**{key: line[key] for key in ("v", "time_s")}, **taken_over} if stopped else line

    edit_journal(run, "chaos", succeed)
    assert recovery_times(run)[0] == lost_node


def test_work_done_twice_is_counted_apart(exact: RunLayout) -> None:
    leg = chaos(exact)
    work = work_of(leg, lineage(leg))
    assert work.lost_steps == judge(exact).lost_steps == 7
    traces = [(attempt.number, attempt.traces[2]) for attempt in leg.attempts]
    steps_s = {(number, step): record.time_s for number, trace in traces for step, record in trace.steps.items()}
    # A step's time runs from the last rank's record of the one before to the last rank's record of it.
    assert work.kept_s + work.lost_s == pytest.approx(
        sum(
            time_s - steps_s.get((attempt, step - 1), leg.trace(attempt, 2).start.time_s)  # type: ignore[union-attr]
            for (attempt, step), time_s in steps_s.items()
        )
    )
    first = next(record for record in leg.journal if record.event == "attempt.starting")
    assert work.wall_s == leg.journal[-1].time_s - first.time_s
    assert work.goodput is not None and 0 < work.goodput < 1


def test_what_comes_before_the_first_attempt_is_counted_apart(run: RunLayout) -> None:
    """Ray's start falls into the disturbed leg where the reference comes from the cache."""
    leg = chaos(run)
    warm = work_of(leg, lineage(leg))
    edit_journal(run, "chaos", only("leg.started", lambda line: {**line, "time_s": line["time_s"] - 100}))
    leg = chaos(run)
    cold = work_of(leg, lineage(leg))
    assert (warm.before_s, cold.before_s) == (0.5, 100.5)
    assert (cold.wall_s, cold.goodput) == (warm.wall_s, warm.goodput)


def test_an_interruption_is_not_the_legs_time(run: RunLayout) -> None:
    leg = chaos(run)
    whole_s = work_of(leg, lineage(leg)).wall_s
    assert whole_s is not None
    stopped = next(record for record in leg.journal if record.event == "attempt.stopped")
    edit_journal(run, "chaos", lambda line: _paused(line, stopped.time_s))
    leg = chaos(run)
    # Less the half second between the two records whose places the pause took.
    assert work_of(leg, lineage(leg)).wall_s == whole_s - 0.5


def test_an_interruption_is_no_part_of_a_recovery(run: RunLayout) -> None:
    """An hour between the end of the first attempt and `chaosrun resume`."""
    kinds = {1049.0: "attempt.stopped", 1050.0: "leg.finished", 1050.5: "supervisor.resumed"}
    about = {"attempt": 1, "reason": "interrupted", "outcome": "interrupted", "message": None, "supervisor_pid": 2}

    def pause(line: dict[str, Any]) -> dict[str, Any]:
        earlier = 3600 if line["time_s"] <= 1050.0 else 0
        kind = kinds.get(line["time_s"], line["event"])
        died = {"died_s": line["died_s"] - earlier} if "died_s" in line else {}
        return {**line, **(about if kind != line["event"] else {}), **died, "event": kind, "time_s": line["time_s"] - earlier}

    edit_journal(run, "chaos", pause)
    first = recovery_times(run)[0]
    assert first.phases == {"detect": 1.0, "stop": 1.5, "start": 4.5, "restore": 0.5, "first_step": 0.5}
    assert first.total_s == 8.0


def _paused(line: dict[str, object], at_s: float) -> dict[str, object]:
    """An hour between the first attempt's end and the next supervisor, who takes the place of the next attempt's decision."""
    later = {**line, "time_s": float(str(line["time_s"])) + (3600 if float(str(line["time_s"])) > at_s else 0)}
    if line["time_s"] == at_s:
        return {**later, "event": "leg.finished", "outcome": "interrupted", "message": None}
    if line["event"] == "attempt.starting" and line["attempt"] == 2:
        return {**later, "event": "supervisor.resumed", "supervisor_pid": 2}
    return later


def test_a_leg_that_never_began_has_no_goodput(tmp_path: Path) -> None:
    leg = read_leg(RunLayout(tmp_path).leg("chaos"))
    work = work_of(leg, lineage(leg))
    assert (work.kept_s, work.lost_s, work.wall_s, work.goodput) == (0.0, 0.0, None, None)
    assert recoveries_of(leg) == ()
