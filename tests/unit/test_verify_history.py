"""Reading a leg back: what is tolerated, what becomes a problem, and the lineage through restarts."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from legs import drop, edit_trace, only, put

from chaosrun import api
from chaosrun.errors import UsageError
from chaosrun.records.heartbeat import Heart
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.trace_blocks import frames
from chaosrun.verify.lineage import lineage
from chaosrun.verify.verdict import judge
from tests.records import read_lines, torn, write_lines


def test_reads_everything_a_leg_wrote(run: RunLayout) -> None:
    history = read_leg(run.leg("chaos"))
    assert history.problems == ()
    assert [attempt.number for attempt in history.attempts] == [1, 2, 3, 4]
    assert [attempt.resume_step for attempt in history.attempts] == [0, 4, 8, 8]
    assert history.outcome == "completed"
    assert sorted(history.ends) == [0, 1, 2]
    trace = history.trace(2, 1)
    assert trace is not None and list(trace.steps) == [5, 6, 7, 8, 9]
    assert trace.tensor(1) == "block.weight"


def test_lineage_cuts_what_was_rolled_back(run: RunLayout) -> None:
    chain = lineage(read_leg(run.leg("chaos")))
    assert {rank: sorted(steps) for rank, steps in chain.steps.items()} == {rank: list(range(1, 13)) for rank in range(3)}
    assert [chain.steps[0][step].attempt for step in (4, 5, 8, 9, 12)] == [1, 2, 2, 4, 4]
    assert sorted({(record.attempt, record.step) for record in chain.tails}) == [
        (1, 5),
        (1, 6),
        (2, 9),
        (3, 9),
        (3, 10),
        (3, 11),
        (3, 12),
    ]
    assert chain.repeated == ()


def test_lineage_shows_a_step_recorded_twice(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(2).trace(0)
    lines = list(read_lines(path))
    write_lines(path, [*lines, next(line for line in lines if line["kind"] == "step" and line["step"] == 6)])
    assert [(record.rank, record.step) for record in lineage(read_leg(run.leg("chaos"))).repeated] == [(0, 6)]


def test_torn_last_line_is_tolerated(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(1).trace(1)
    record = torn(path)
    with path.open("ab") as file:
        file.write(record)
    history = read_leg(run.leg("chaos"))
    trace = history.trace(1, 1)
    assert history.problems == ()
    assert trace is not None and trace.steps.last == 6


def test_trace_of_a_rank_killed_before_its_first_line(run: RunLayout) -> None:
    run.leg("chaos").attempt(3).trace(0).write_bytes(b"\0\x30\x95\x8d\xa4kind\xa5sta")
    history = read_leg(run.leg("chaos"))
    trace = history.trace(3, 0)
    assert history.problems == ()
    assert trace is not None and trace.start is None


def test_damaged_middle_line_is_a_problem_and_what_came_before_is_kept(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(2).trace(1)
    records = list(frames(path.read_bytes()))
    data = bytearray(path.read_bytes())
    data[records[2][0] + 2] ^= 0xFF
    path.write_bytes(data)
    history = read_leg(run.leg("chaos"))
    trace = history.trace(2, 1)
    assert len(history.problems) == 1 and f"{path}: record 4" in history.problems[0]
    assert trace is not None and list(trace.steps) == [5]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (only("step", put(loss=["0.5.1"]), step=9), "loss"),
        (only("step", put(loss=[]), step=9), "loss"),
        (only("step", put(batch=[]), step=9), "batch"),
        (only("step", put(rng=""), step=9), "rng"),
        (only("step", put(lr=[]), step=9), "gradients without lr"),
        (only("step", put(grad="", grads=""), step=9), "0 gradients of 3 tensors"),
        (only("step", put(params="AAAA"), step=9), "0.75 parameters of 3 tensors"),
        (only("step", put(params="?"), step=9), "params"),
        (only("step", put(grads="AAAAAA=="), step=9), "gradients of 3 tensors"),
        (only("step", lambda line: {key: value for key, value in line.items() if key != "param"}, step=9), "param"),
        (only("start", drop), "out of place"),
        (only("start", put(v=7)), "version 7"),
        (only("checkpoint", put(step=7)), "checkpoint step-00000008 is said to be of step 7"),
        (only("start", put(pid=999)), "its trace is of process 999"),
        (only("start", put(rank=0)), "says it is of attempt 2 rank 0"),
        (only("start", put(tensors=[])), "of 0 tensors"),
        (only("step", put(kind="stop"), step=9), "Invalid value 'stop' at `kind`"),
    ],
)
def test_malformed_line_is_a_problem(
    run: RunLayout, edit: Callable[[dict[str, Any]], dict[str, Any] | None], complaint: str
) -> None:
    edit_trace(run, "chaos", 2, 1, edit)
    problems = read_leg(run.leg("chaos")).problems
    assert problems and complaint in problems[0]


@pytest.mark.parametrize("attempt", [1, 2, 3])
@pytest.mark.parametrize(("stage", "kept"), [("forward", True), ("after", True), ("record", False)])
def test_steps_that_a_trace_has_lost_are_a_problem_also_where_they_were_rolled_back(
    run: RunLayout, attempt: int, stage: str, kept: bool
) -> None:
    leg = run.leg("chaos")
    place = leg.attempt(attempt)
    records = list(read_lines(place.trace(1)))
    done = [line["step"] for line in records if line["kind"] == "step"]
    heart = Heart()
    heart.open(place.heartbeat(1))
    heart.beat(stage, done[-1] + (stage != "after"))
    assert not read_leg(leg).problems
    last = done[-2] if kept else 0
    kept_lines = [line for line in records if line["kind"] == "start" or (line["kind"] == "step" and line["step"] <= last)]
    write_lines(place.trace(1), kept_lines if kept else [])
    told = f"attempt {attempt}: the trace of rank 1 {f'ends at step {last}' if kept else 'is missing, or empty'}, its heartbeat"
    assert f"{told} is at step {done[-1]}" in read_leg(leg).problems[0]
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("INCONCLUSIVE", "records_damaged", "machine"), verdict.cause


@pytest.mark.parametrize("lost", ["chaos/attempts/001", "chaos/attempts/002", "reference/attempts/001"])
def test_lost_folders_are_no_difference(run: RunLayout, lost: str) -> None:
    shutil.rmtree(run.path / lost)
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("INCONCLUSIVE", "records_damaged", "machine"), verdict.cause


def test_a_malformed_step_of_a_whole_block_is_seen_where_it_is_compared(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 1, only("step", put(lr=[]), step=6))
    assert not read_leg(run.leg("chaos")).problems
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "records_damaged") and "gradients without lr" in verdict.cause


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"seq":3', '"seq":4', "a record is missing"),
        ('"v":2,"seq":2', '"v":7,"seq":2', "version 7"),
        ('"v":2,"seq":2', '"v":1,"seq":2', "written by another chaosrun (version 1,"),
        ('"outcome":"completed"', '"outcome":"fine"', "Invalid enum value 'fine' at `outcome`"),
        ('"armed":["F1","F2","F3"]', '"armed":null', "armed"),
        ('"pids":{"0"', '"pids":{"zero"', "pids"),
        ('"event":"leg.started"', '"event":7', "at `event`"),
        ('"attempt":1,"reason":"a rank', '"attempt":8,"reason":"a rank', "attempt 8 left records"),
    ],
)
def test_malformed_journal_is_a_problem(run: RunLayout, old: str, new: str, complaint: str) -> None:
    path = run.leg("chaos").journal
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    problems = read_leg(run.leg("chaos")).problems
    assert any(complaint in problem for problem in problems)


def test_attempt_that_the_journal_never_started_is_a_problem(run: RunLayout) -> None:
    run.leg("chaos").attempt(9).path.mkdir()
    assert any("attempt 9" in problem for problem in read_leg(run.leg("chaos")).problems)


def test_leg_that_does_not_exist(tmp_path: Path) -> None:
    history = read_leg(RunLayout(tmp_path).leg("chaos"))
    assert history.attempts == () and history.outcome is None and history.ends == {}
    assert history.problems == ("journal.jsonl is missing",)


def test_finished_only_when_nothing_follows(run: RunLayout) -> None:
    path = run.leg("chaos").journal
    last = path.read_text().splitlines()[-1]
    sequence = len(path.read_text().splitlines()) + 1
    with path.open("a") as file:
        file.write(f'{{"v":2,"seq":{sequence},"time_s":1.0,"event":"supervisor.resumed","supervisor_pid":2}}\n')
    assert "leg.finished" in last
    assert read_leg(run.leg("chaos")).outcome is None


def test_a_file_that_cannot_be_read_is_no_bug(run: RunLayout) -> None:
    trace = run.leg("chaos").attempt(1).trace(1)
    trace.unlink()
    trace.mkdir()
    with pytest.raises(UsageError, match=r"rank-1\.trace cannot be read: Is a directory"):
        api.verify(run)


@pytest.mark.parametrize("leg", ["reference", "chaos"])
@pytest.mark.parametrize("lost", ["all", "journal", "end"])
def test_a_run_that_had_its_verdict_has_not_just_not_ended(run: RunLayout, leg: str, lost: str) -> None:
    """Nor can it be resumed: a verdict is removed first."""
    folder, journal = run.leg(leg).path, run.leg(leg).journal
    match lost:
        case "all":
            shutil.rmtree(folder)
        case "journal":
            journal.unlink()
        case _:
            journal.write_bytes(journal.read_bytes()[:-20])
    verdict = judge(run)
    assert verdict.status == "INCONCLUSIVE"
    assert verdict.code == ("records_damaged" if lost == "journal" else "not_finished")
    run.verdict_json.write_text("{}")
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "records_damaged")
    assert verdict.blame.whose == "machine"
