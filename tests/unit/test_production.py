"""A run in production held against itself: restarts that come back wrongly are told with step, rank and tensor, and judging one
looks at what it does again, however long the run is."""

import json
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from legs import Bugs, edit_journal, edit_trace, only, put, write_run
from run_files import tell, write_info
from script_legs import SCRIPT_KILLS, Habits, write_script_run
from test_verify_began import BUGS

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault
from chaosrun.records.events import Judgement, RecoveryAgreed, RecoveryDiverged, RecoveryUnjudged
from chaosrun.records.heartbeat import Heart
from chaosrun.records.history import LegHistory, journal_events, read_leg
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.trace_reader import read_trace
from chaosrun.records.traces import RankTrace
from chaosrun.report import follow
from chaosrun.report.metrics import RunCollector, served
from chaosrun.report.sentences import sentence
from chaosrun.report.view import read_view
from chaosrun.spec.model import JobSpec
from chaosrun.supervise import judging
from chaosrun.supervise.judging import RecoveryJudge
from chaosrun.verify import production
from chaosrun.verify.confirm import NO_FAULTS
from chaosrun.verify.production import Account, Recovery, judge_recovery, judge_run
from chaosrun.verify.verdict import judge
from chaosrun.verify.warnings import warnings
from tests.integration.object_server import free_port
from tests.long_runs import write_long_run
from tests.unit.events import event

RESTARTS = (2, 3, 4)
"""Attempts of `write_run` after the first: they go on from steps 4, 8 and 8, and do 5 and 6, 9 and 10, 9 to 12 again."""


SPEAKS_OF_A_REFERENCE = ("reference", "undisturbed", "fault-free", "chaos leg")
"""Words that mean nothing in a run in production."""


def leg_of(run: RunLayout) -> tuple[LegLayout, JobSpec]:
    """Its disturbed leg, as that of a run in production."""
    return run.leg("chaos"), JobSpec.model_validate(json.loads(run.run_json.read_bytes())["spec"])


def judged(run: RunLayout, attempt: int, since: int = 1) -> Recovery:
    leg, spec = leg_of(run)
    return judge_recovery(read_leg(leg), attempt, spec, NO_FAULTS, since=since)


def judged_live(run: RunLayout) -> list[Judgement]:
    """What a supervisor tells of attempts that are over."""
    leg, spec = leg_of(run)
    judge = RecoveryJudge(leg, spec)
    judge.take_over(journal_events(leg.journal))
    return judge.close()


def account(run: RunLayout) -> Account:
    leg, spec = leg_of(run)
    return judge_run(read_leg(leg), spec, NO_FAULTS)


def test_ranks_that_hold_different_parts_of_a_model_have_nothing_to_agree_on(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    for attempt in run.leg("chaos").attempts():
        for rank in range(3):

            def sharded(line: dict[str, Any], rank: int = rank) -> dict[str, Any]:
                return {**line, "sharded": True, "parts": True, "tensors": [f"{name}[{rank}]" for name in line["tensors"]]}

            edit_trace(run, "chaos", attempt, rank, only("start", sharded))
    found = next(check for check in account(run).checks if check.name == "rank_agreement")
    assert (found.status, found.summary) == ("skip", "no two ranks hold the same part of any parameter")


def test_a_script_that_does_not_look_for_its_checkpoint_fails(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(start_over=True))
    found = account(run)
    assert (found.ruling.status, found.ruling.reason.code) == ("FAIL", "began_again"), found.ruling.place
    assert found.divergence is None, "its numbers are right: it trained all over again"
    assert [each.wrong and each.wrong.code for each in found.recoveries] == ["began_again"] * 2
    assert [check.code for check in found.checks if check.name.startswith("recovery_")] == ["began_again"] * 2
    told = judged_live(run)
    assert events_of(told) == [(RecoveryDiverged, 2), (RecoveryDiverged, 3)]
    assert isinstance(told[0], RecoveryDiverged) and (told[0].code, told[0].step) == ("began_again", 1)


@pytest.mark.parametrize(
    ("written", "bugs", "codes"),
    [
        (write_script_run, Bugs(stale_checkpoint=True), [None, "checkpoint_passed_over", None]),
        (write_run, Bugs(start_over=True), ["wrong_resume_point"] * 3),
    ],
)
def test_where_an_attempt_went_on_from_is_judged_as_it_begins(
    tmp_path: Path, written: Any, bugs: Bugs, codes: list[str | None]
) -> None:
    """One after the other: a later one is not excused by an earlier one."""
    leg, spec = leg_of(written(tmp_path, bugs=bugs))
    attempts = read_leg(leg).attempts[1:]
    found = [judge_recovery(read_leg(leg), each.number, spec, NO_FAULTS, begun=True) for each in attempts]
    assert [each.wrong and each.wrong.code for each in found] == codes[: len(attempts)], found
    assert not any(each.divergence or each.problem or each.steps for each in found)


def test_an_attempt_that_only_began_again_does_not_replace_what_was_recorded_before(tmp_path: Path) -> None:
    kills = (10, 6)
    faults = [Fault(id=f"F{at}", rank=1, phase="step", at_step=at, source="faults.schedule[0]") for at in kills]
    found = account(write_script_run(tmp_path, kills=tuple(faults), bugs=Bugs(start_over=True)))
    assert [each.steps for each in found.recoveries] == [6, 10]


def test_to_begin_again_before_the_first_save_is_right(tmp_path: Path) -> None:
    kills = (Fault(id="F1", rank=1, phase="step", at_step=3, source="faults.schedule[0]"),)
    run = write_script_run(tmp_path, kills=kills, bugs=Bugs(start_over=True))
    assert events_of(judged_live(run)) == [(RecoveryAgreed, 2)]
    assert account(run).ruling.status == "PASS"


@pytest.mark.parametrize(
    ("saved", "later", "even", "told"),
    [
        (4, 8, False, None),
        (4, 4, False, "counted 4 in the checkpoint of step 4, from which attempt 2 resumed, but only 4 (scheduler/last_epoch)"),
        (4, 4, True, None),  # the rates never change
        (1, 2, False, None),  # a count of epochs
        (1, 1, False, None),
        (2, 1, False, "but only 1 (scheduler/last_epoch) in what that attempt saved after step 8"),
        (8, 16, False, None),  # twice a step
        (8, 12, False, "but only 12"),
    ],
)
def test_a_schedule_that_is_begun_anew_is_a_warning_where_no_step_shows_it(
    tmp_path: Path, saved: int, later: int, even: bool, told: str | None
) -> None:
    """Its next change comes too late, beyond the steps that were done twice; of these steps nobody knows what is right."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for attempt, step, counted in ((1, 4, saved), (2, 8, later)):
        held = {"scheduler/last_epoch": f"{counted}", "scheduler/_last_lr": "a" * 16}
        held |= {f"scheduler/_schedulers/0/{name}": "0" for name in ("last_epoch", "_last_lr")}
        edit_trace(run, "chaos", attempt, 0, only("save", put(held=held), step=step))
        if even:
            edit_trace(run, "chaos", attempt, 0, only("step", put(lr=["0x1p-3"])))
    found = account(run)
    assert found.ruling.status == "PASS", found.ruling
    warned = [each for each in warnings(found.drill) if "scheduler" in each]
    assert (told in warned[0]) if told else not warned, warned


@pytest.mark.parametrize(("later", "told"), [(22, False), (12, True)])
def test_a_schedule_of_a_run_that_began_with_a_checkpoint_of_an_earlier_one_is_not_behind(
    tmp_path: Path, later: int, told: bool
) -> None:
    """It counts from there: 18 at step 8 are not two for each step."""
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[1:2])
    for attempt, step, counted in ((1, 4, 14), (1, 8, 18), (2, 12, later)):
        held = {"scheduler/last_epoch": f"{counted}", "scheduler/_last_lr": "a" * 16}
        edit_trace(run, "chaos", attempt, 0, only("save", put(held=held), step=step))
    assert any("scheduler counted 18" in each for each in warnings(account(run).drill)) is told


def test_a_checkpoint_that_could_not_be_read_is_told_beside_the_verdict(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    assert not any("set aside" in each for each in warnings(account(run).drill))
    (leg, spec), why = leg_of(run), "step-00000004: MANIFEST.json is damaged"
    history, aside = read_leg(leg), event("checkpoint.quarantined", seq=0, name="step-00000004", step=4, reason=why)
    found = judge_run(replace(history, journal=(aside, *history.journal)), spec, NO_FAULTS)
    assert f"1 checkpoint could not be restored and was set aside: {why}" in warnings(found.drill)


@pytest.mark.parametrize(("digests", "told"), [("a b", ["/job/train.py changed while the run went on"]), ("a", [])])
def test_a_source_edited_while_it_ran_is_told_beside_the_verdict(tmp_path: Path, digests: str, told: list[str]) -> None:
    run = write_script_run(tmp_path)
    run.leg("chaos").inputs.write_text(json.dumps({"/job/train.py": digests}))
    run.leg("chaos").path.rename(run.leg("run").path)
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_bytes()), "kind": "run"}))
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause
    assert [each.partition(":")[0] for each in verdict.warnings if "changed while" in each] == told


def test_no_check_of_a_production_run_speaks_of_an_undisturbed_one(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    edit_trace(run, "chaos", 2, 0, only("save", put(held={"step": "8"}), step=8))
    assert not [each.summary for each in account(run).checks if "undisturbed" in each.summary or "fault-free" in each.summary]


def test_a_script_s_difference_is_the_script_s(tmp_path: Path) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=-2))
    divergence = next(each for attempt in RESTARTS if (each := judged(run, attempt).divergence))
    assert divergence.reason.code == "batches_repeated" and divergence.reason.blame.whose == "yours"


def test_a_script_that_ends_before_what_had_been_done_fails(tmp_path: Path) -> None:
    kills = (Fault(id="F1", rank=1, phase="step", at_step=11, source="faults.schedule[0]"),)
    ruling = account(write_script_run(tmp_path, kills=kills, habits=Habits(ends_at=9))).ruling
    assert (ruling.status, ruling.reason.code) == ("FAIL", "ended_at_another_step"), ruling
    assert ruling.reason.params["expected"] == 11


def test_where_no_step_is_done_twice_it_is_said_what_is_not_known(tmp_path: Path) -> None:
    kills = (Fault(id="F1", rank=1, phase="step", at_step=8, source="faults.schedule[0]"),)
    run = write_script_run(tmp_path, kills=kills)
    ruling = account(run).ruling
    assert ruling.status == "PASS" and "attempt 2 only by weights and optimizer" in ruling.reason.sentence, ruling
    unclaimed, said = (
        ("each equal", "0 steps", "alone, as"),
        "1 restart judged: no step was done twice, so only what was restored",
    )
    assert said in ruling.reason.sentence and not any(each in ruling.reason.sentence for each in unclaimed)
    assert "only the weights and the optimizer that it began with" in sentence(judged_live(run)[0])
    attached = write_run(tmp_path / "attached", kills=kills)
    ruling = account(attached).ruling
    assert ruling.status == "PASS" and "alone" not in ruling.reason.sentence, ruling
    assert said in ruling.reason.sentence and not any(each in ruling.reason.sentence for each in unclaimed)
    assert "only the restored state could be compared" in sentence(judged_live(attached)[0])


def test_a_death_before_the_first_step_costs_nothing(tmp_path: Path) -> None:
    kills = (Fault(id="F1", rank=1, phase="reduce", at_step=1, source="faults.schedule[0]"),)
    found = account(write_run(tmp_path, kills=kills))
    assert [each.words for each in found.recoveries] == ["no step had been done before"]
    assert found.ruling.status == "PASS" and "1 restart, with no step done before" in found.ruling.reason.sentence


def test_a_script_is_not_told_in_production_what_chaosrun_would_restore(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    edit_trace(run, "chaos", 3, 2, only("end", put(step=13)))
    reason = account(run).ruling.reason
    assert reason.code == "ended_at_another_step" and "run.register" not in f"{reason.hint}", reason.hint


def test_right_restarts_agree(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    found = [judged(run, attempt) for attempt in RESTARTS]
    assert [(each.divergence, each.problem, each.judged) for each in found] == [(None, None, "steps")] * 3
    assert [(each.steps, each.last, each.states) for each in found] == [(2, 6, 3), (1, 9, 3), (4, 12, 3)]


@pytest.mark.parametrize(
    ("bugs", "step", "rank", "tensor", "code"),
    [
        (Bugs(keep_rng=False), 5, 0, "torch", "rng_not_restored"),
        (Bugs(keep_optimizer=False), 5, 0, "embed.weight.momentum", "optimizer_state_not_restored"),
        (Bugs(keep_buffers=False), 5, 0, "norm.mean", "buffers_not_restored"),
        (Bugs(weights_off=1e-9), 5, 0, "embed.weight", "weights_not_restored"),
        (Bugs(drifting_rank=1), 5, 1, "embed.weight", "weights_not_restored"),
        (Bugs(skip_off=1), 5, 0, None, "batches_skipped"),
        (Bugs(primed=False), 5, 0, "embed.weight", "bucket_layout"),
    ],
    ids=str,
)
def test_a_wrong_restart_is_told_with_its_place(
    tmp_path: Path, bugs: Bugs, step: int, rank: int, tensor: str | None, code: str
) -> None:
    found = judged(write_run(tmp_path, bugs=bugs), 2).divergence
    assert found is not None
    assert (found.step, found.rank, found.tensor, found.code) == (step, rank, tensor, code)


@pytest.mark.parametrize("written", [write_run, write_script_run])
@pytest.mark.parametrize("bugs", [Bugs(), *BUGS], ids=str)
def test_what_lies_before_a_restart_changes_nothing_of_its_judgement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: Any, bugs: Bugs
) -> None:
    run = written(tmp_path, bugs=bugs)
    near = [judged(run, attempt) for attempt in RESTARTS]
    monkeypatch.setattr(production, "_near", lambda history: history)
    whole = [judged(run, attempt) for attempt in RESTARTS]
    assert near == whole
    assert not any(each.problem for each in whole)
    told = " ".join(f"{each.divergence.cause} {each.divergence.hint}" for each in whole if each.divergence)
    assert not {word for word in SPEAKS_OF_A_REFERENCE if word in told}, told


def test_a_judgement_costs_what_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4,000 steps, as of 400, only the blocks of those that were done twice are looked at."""
    looked_at: list[int] = []
    plain = production.recorded

    def recorded(history: LegHistory, since: int = 1) -> Any:
        looked_at.append(sum(len(trace.blocks) for trace in history.traces))
        return plain(history, since)

    monkeypatch.setattr(production, "recorded", recorded)
    for steps in (400, 4000):
        run = write_long_run(tmp_path / str(steps), steps=steps, workers=2, every_steps=50, kills=(steps // 2 + 7, steps - 8))
        found = judged(run, 3)
        assert (found.divergence, found.steps) == (None, 42), found.words
    assert len(looked_at) == 2 and looked_at[0] == looked_at[1] < 10


def test_one_that_never_began_has_not_finished(tmp_path: Path) -> None:
    """As one that was cancelled while Ray starts: nothing is missing that could be put back."""
    run = RunLayout(tmp_path / "runs" / "run")
    run.path.mkdir(parents=True)
    write_info(run, NO_FAULTS, kind="run", spec={"workers": 2})
    found = judge(run)
    assert (found.status, found.code, found.cause) == ("INCONCLUSIVE", "not_finished", "the run has not finished")
    view = read_view(run, found)
    assert (view.killed, [each.label for each in view.commands]) == ("Nothing: the run never began.", ["look", "resume"])
    tell(run, {"event": "death.unplanned", "attempt": 1, "rank": 1, "step": 7, "reason": "killed"}, leg="run")
    assert judge(run).code == "records_damaged" and read_view(run, found).unplanned == 1


def test_damaged_records_are_no_agreement(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    trace = run.leg("chaos").attempt(1).trace(1)
    trace.write_bytes(trace.read_bytes()[:40])
    found = judged(run, 2)
    assert found.divergence is None
    assert found.states == 2, "of rank 1 nothing was recorded before"


def events_of(found: list[Judgement]) -> list[tuple[type, int]]:
    return [(type(each), each.attempt) for each in found]


class Reads:
    """Counts which traces the judge reads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.of: list[tuple[int, int]] = []
        monkeypatch.setattr(judging, "read_trace", self)

    def __call__(self, path: Path, attempt: int, rank: int, problems: list[str]) -> RankTrace:
        self.of.append((attempt, rank))
        return read_trace(path, attempt, rank, problems)


def test_the_judge_reads_what_is_over_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leg, spec = leg_of(write_run(tmp_path))
    reads, judge = Reads(monkeypatch), RecoveryJudge(leg, spec)
    found: list[Judgement] = []
    for attempt in (1, *RESTARTS):
        judge.began(attempt)
        judge.ended(attempt)
        deadline = judge.close if attempt == 4 else judge.found
        while len(found) < attempt - 1:
            found += deadline()
    assert events_of(found) == [(RecoveryAgreed, attempt) for attempt in RESTARTS]
    assert reads.of.count((1, 0)) == 1


def test_a_later_supervisor_judges_what_was_left(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(keep_rng=False))
    leg, spec = leg_of(run)
    judge = RecoveryJudge(leg, spec)
    past = journal_events(leg.journal)
    judge.take_over([*past, RecoveryUnjudged(attempt=2, why="it ended")])
    found = judge.close()
    assert events_of(found) == [(RecoveryDiverged, 3), (RecoveryDiverged, 4)]
    assert isinstance(found[0], RecoveryDiverged)
    assert (found[0].step, found[0].rank, found[0].tensor) == (9, 0, "torch")


@pytest.mark.parametrize(
    ("of_fourth", "agrees"), [("1", True), (None, True), ("2", False)], ids=["as the one that differed", "mended", "another"]
)
def test_after_one_that_differed_another_may_be_as_it_or_as_those_before(
    tmp_path: Path, of_fourth: str | None, agrees: bool
) -> None:
    """Under `on_divergence: warn`, and after `chaosrun resume`. Attempts 3 and 4 go on from step 8, 2 came to step 10."""
    run = write_run(tmp_path)
    for attempt, digit in ((3, "1"), (4, of_fourth)):
        for rank in range(3):
            if digit is not None:
                edit_trace(run, "chaos", attempt, rank, only("step", put(rng=digit * 16)))
    assert judged(run, 3).divergence is not None
    found = judged(run, 4, since=3)
    assert (found.divergence is None) == agrees, found
    assert found.judged == "steps"


def test_the_metric_of_steps_does_not_fall_to_0_while_a_restart_of_a_script_has_not_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = write_script_run(tmp_path)
    (run.path / "chaos").rename(run.path / "run")
    leg = run.leg("run")

    def steps() -> float:
        return next(each.samples[0].value for each in RunCollector(run).collect() if each.name == "chaosrun_steps")

    *_, before, newest = sorted(leg.attempts())
    assert steps() == 12
    for rank in range(3):
        leg.attempt(newest).trace(rank).unlink()
    lines = [line for line in leg.journal.read_text().splitlines() if '"leg.finished"' not in line]
    leg.journal.write_text("".join(f"{line}\n" for line in lines))
    came_to = min(read_trace(leg.attempt(before).trace(rank), before, rank, []).steps.last for rank in range(3))
    assert steps() == came_to > 0
    monkeypatch.setattr(follow, "AT_A_LOOK", 1)  # of many ranks
    for stage, shown in (("restored", came_to), ("forward", 6)):
        for rank in range(3):
            (heart := Heart()).open(leg.attempt(newest).heartbeat(rank))
            heart.beat(stage, 7)
        assert steps() == shown


@pytest.mark.parametrize(("host", "bound"), [("", "127.0.0.1"), ("0.0.0.0:", "0.0.0.0")])
def test_metrics_are_served_to_this_machine_alone_unless_a_host_is_named(tmp_path: Path, host: str, bound: str) -> None:
    run, port = RunLayout(tmp_path / "run"), free_port()
    write_info(run, kind="run", metrics=f"{host}{port}")
    with served(run):
        listening = {each.laddr.ip for each in psutil.net_connections("tcp4") if each.laddr and each.laddr.port == port}
    assert listening == {bound}


def test_a_port_that_is_taken_is_not_proposed_again(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "run")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        write_info(run, kind="run", metrics=str(taken.getsockname()[1]))
        with pytest.raises(UsageError, match="Address already in use") as caught, served(run):
            pass
    # `resume` takes no --metrics: the port is to be freed.
    assert str(caught.value.hint).startswith("end what listens there")


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("x:y", "y is not a port, a number from 0 to 65535"),
        ("99999", "99999 is not a port"),
        ("localhost:-1", "-1 is not a port"),
        ("localhost:", "localhost: is not a port"),
    ],
)
def test_what_is_no_port_is_told_in_plain_words(tmp_path: Path, asked: str, why: str) -> None:
    run = RunLayout(tmp_path / "run")
    write_info(run, kind="run", metrics=asked)
    with pytest.raises(UsageError, match=f"^metrics cannot be served on {asked}: {why}"), served(run):
        pass


def go_down(run: RunLayout, attempt: int) -> None:
    """The machine goes down in this attempt, and what it has not synced of the attempt is lost; another supervisor goes on."""
    leg = run.leg("chaos")

    def succeed(line: dict[str, Any]) -> dict[str, Any]:
        last = line["event"] == "attempt.stopped" and line["attempt"] == attempt
        return {"v": line["v"], "time_s": line["time_s"], "event": "supervisor.resumed", "supervisor_pid": 2} if last else line

    edit_journal(run, "chaos", succeed)
    for rank in leg.attempt(attempt).path.glob("rank-*.trace"):
        rank.write_bytes(b"")
        rank.with_suffix(".heartbeat").write_bytes(b"")


@pytest.mark.parametrize("by_script", [False, True])
def test_traces_that_went_down_with_the_machine_are_no_mistake_of_the_job(tmp_path: Path, by_script: bool) -> None:
    """A checkpoint that was synced survives the traces of how it was reached."""
    run = write_script_run(tmp_path) if by_script else write_run(tmp_path)
    go_down(run, 2)
    drill, production = judge(run), account(run).ruling
    assert (drill.status, production.status) == ("INCONCLUSIVE", "INCONCLUSIVE")
    for told in (drill.cause, production.headline):
        assert "a machine that goes down loses what it has not yet written to its disk" in f"{told}"
    assert not any(isinstance(each, RecoveryDiverged) for each in judged_live(run))
    # Of the lost files nothing but their names may be left, or not even these.
    for path in run.leg("chaos").attempt(2).path.glob("*.heartbeat"):
        path.unlink()
    told = "the traces of rank 1 end at step 6, but attempt 3 went on from step 8"
    assert any(told in problem for problem in read_leg(run.leg("chaos")).problems)


def test_a_first_attempt_that_left_only_empty_files_is_not_taken_for_one_that_did_nothing(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    go_down(run, 1)
    assert any("attempt 1: the records of rank 0 are empty" in problem for problem in read_leg(run.leg("chaos")).problems)
    for path in run.leg("chaos").attempt(1).path.glob("*.heartbeat"):
        Heart().open(path)
    # A rank that was killed before it trained leaves a heartbeat.
    assert not any("are empty" in problem for problem in read_leg(run.leg("chaos")).problems)
