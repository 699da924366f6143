"""Plans that failed: kept exactly, repeated first, given up when they have passed often enough."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from suites import DRAWN as JOB
from suites import write_suite

from chaosrun.campaign.kept_plans import PASSES, KeptPlans, reruns
from chaosrun.campaign.planned_drill import PlannedDrill, plan_drills
from chaosrun.campaign.results import DrillResult
from chaosrun.campaign.suite_plan import SuiteRequest, plan_suite
from chaosrun.campaign.suite_run import opened
from chaosrun.errors import SpecError, UsageError
from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.spec.job_file import load_job
from chaosrun.spec.suite import load_suite

SUITE = "name: toys\njob: job.yaml\ndrills:\n  - {name: a}\n  - {name: b, matrix: {workers: [1, 2], faults: [torture, spot]}}\n"


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    return write_suite(tmp_path, SUITE, JOB)


def outcome(drill: PlannedDrill, folder: Path, *, ok: bool) -> DrillResult:
    """Of a run that had the drill's plan."""
    run = RunLayout(folder / "runs" / "toy-1")
    run.path.mkdir(parents=True, exist_ok=True)
    job = load_job(Path(drill.job), drill.overrides)
    run.plan_json.write_text(json.dumps(make_plan(job.spec).to_json()))
    surprises = () if ok else ("FAIL where PASS was expected",)
    status = "PASS" if ok else "FAIL"
    return DrillResult(name=drill.name, run=run, status=status, expected="PASS", cause="weights", surprises=surprises)


def test_a_seed_gives_each_drill_its_own_faults(suite: Path) -> None:
    loaded = load_suite(suite)
    first, again, other = (plan_drills(loaded.drills, seed) for seed in (1, 1, 2))
    assert first == again
    assert len({drill.seed for drill in first}) == len(first)
    assert all(one.plan != two.plan for one, two in zip(first, other, strict=True))
    for drill in first:
        # What is written down brings the same plan about.
        job = load_job(Path(drill.job), drill.overrides)
        assert make_plan(job.spec).seed == drill.seed and len(make_plan(job.spec).faults) == drill.faults
    # Without one the seeds are those of the files.
    assert {drill.seed for drill in plan_drills(loaded.drills)} == {0}


def test_a_drill_that_cannot_be_planned_is_named_with_its_place(suite: Path) -> None:
    suite.write_text(
        "name: toys\njob: job.yaml\ndrills:\n  - {name: fine}\n"
        "  - {name: b, matrix: {workers: [1, 2]}, set: {faults.schedule: [{rank: 1, at_step: 4, phase: reduce}]}}\n"
        "  - {name: c, set: {max_steps: null}, faults: spot}\n"
    )
    with pytest.raises(SpecError) as caught:
        plan_drills(load_suite(suite).drills)
    told = str(caught.value)
    assert "toys.yaml:5:5: drill 'b[workers=1]' cannot be planned: " in told and "rank 1 does not exist" in told
    assert "toys.yaml:6:5: drill 'c' cannot be planned: faults.preset: preset spot: the job's length is not known" in told
    assert "fine" not in told.replace("name: fine", "") and "b[workers=2]" not in told


@pytest.mark.parametrize("name", ["a", "b[workers=2,faults=torture]", "b[workers=1,faults=spot]"])
def test_a_failure_is_repeated_exactly_until_it_has_passed(suite: Path, tmp_path: Path, name: str) -> None:
    loaded = load_suite(suite)
    kept = KeptPlans.next_to(tmp_path / "history" / "toys.jsonl")
    drill = next(drill for drill in plan_drills(loaded.drills, 1) if drill.name == name)
    kept.take(outcome(drill, tmp_path, ok=False), drill, suite="toys.yaml", night="2026-11-20")
    assert kept.folder == tmp_path / "history" / "toys.kept"
    tonight = plan_drills(loaded.drills, 2)
    again, notes = reruns(kept.read()[0], loaded.drills, tonight)
    assert [each.name for each in again] == [f"{name}@2026-11-20-{drill.plan[:6]}"] and notes == []
    repeated = again[0]
    assert (repeated.drill, repeated.rerun, repeated.plan) == (name, "2026-11-20", drill.plan)
    # The faults are said one by one: nothing is drawn.
    assert not any("preset" in override or "random" in override for override in repeated.overrides)
    # Passing once, and failing again, begins the count anew.
    for night, ok in [("2026-11-21", True), ("2026-11-22", True), ("2026-11-22", False)]:
        kept.take(outcome(repeated, tmp_path, ok=ok), repeated, suite="toys.yaml", night=night)
    (still,) = kept.read()[0]
    assert (still.night, still.passed) == ("2026-11-20", ())
    for number in range(PASSES):
        for _ in range(PASSES):  # however often in a night
            assert len(kept.read()[0]) == 1
            kept.take(outcome(repeated, tmp_path, ok=True), repeated, suite="toys.yaml", night=f"2026-11-{number + 23}")
            if number == PASSES - 1:
                break
    assert kept.read() == ([], [])


def test_what_is_planned_anyway_runs_once_and_first(suite: Path, tmp_path: Path) -> None:
    wish = SuiteRequest(path=suite)
    before = plan_suite(wish, tmp_path, 0.0)
    assert before.drills[0].name == "a"
    last = before.drills[-1]
    KeptPlans.next_to(Path(before.history)).take(outcome(last, tmp_path, ok=False), last, suite="toys.yaml", night="2026-11-20")
    after = plan_suite(wish, tmp_path, 0.0)
    assert after.drills == (last, *before.drills[:-1])
    # With fresh faults the failure is one drill more; where its drill does not run, it does not either.
    fresh = plan_suite(SuiteRequest(path=suite, seed=3), tmp_path, 0.0)
    again = f"{last.name}@2026-11-20-{last.plan[:6]}"
    assert [drill.name for drill in fresh.drills][:2] == [again, "a"]
    elsewhere = plan_suite(SuiteRequest(path=suite, seed=3, only=("a",)), tmp_path, 0.0)
    assert [drill.name for drill in elsewhere.drills] == ["a"]
    assert f"kept, and not repeated because its drill does not run here: {again}" in elsewhere.notes


def test_two_failures_of_one_drill_in_one_night_are_two_drills(suite: Path, tmp_path: Path) -> None:
    history = Path(plan_suite(SuiteRequest(path=suite), tmp_path, 0.0).history)
    for seed in (1, 2):
        drill = plan_drills(load_suite(suite).drills, seed)[0]
        KeptPlans.next_to(history).take(outcome(drill, tmp_path, ok=False), drill, suite="toys.yaml", night="2026-11-20")
    agenda = plan_suite(SuiteRequest(path=suite, seed=3), tmp_path, 0.0)
    repeated = [drill for drill in agenda.drills if drill.rerun is not None]
    assert len({drill.name for drill in repeated}) == 2 and [drill.drill for drill in repeated] == ["a", "a"]
    # A copy of a file by another name is no drill more.
    (file, _) = sorted(KeptPlans.next_to(history).folder.iterdir())
    shutil.copy(file, file.with_name("copy.json"))
    assert plan_suite(SuiteRequest(path=suite, seed=3), tmp_path, 0.0).drills == agenda.drills
    with pytest.raises(ValueError, match="one name"):
        replace(agenda, drills=(*agenda.drills, agenda.drills[0]))


def test_a_drill_that_came_to_no_verdict_is_kept(suite: Path, tmp_path: Path) -> None:
    loaded = load_suite(suite)
    kept = KeptPlans.next_to(tmp_path / "toys.jsonl")
    first, second, *_ = plan_drills(loaded.drills, 1)
    for drill in (first, second):
        nothing = DrillResult(name=drill.name, run=None, status=None, expected="PASS", error="no room", surprises=("no room",))
        if drill is second:  # it may be its job file that is the reason
            (suite.parent / "job.yaml").write_text("name: [")
        kept.take(nothing, drill, suite="toys.yaml", night="2026-11-20")
    (suite.parent / "job.yaml").write_text(JOB)
    plans = {plan.drill: plan for plan in kept.read()[0]}
    assert [(plan.cause, plan.run) for plan in plans.values()] == [("no room", None)] * 2
    assert plans[first.name].exact and not plans[second.name].exact
    again, notes = reruns(plans.values(), loaded.drills, plan_drills(loaded.drills, 2))
    assert [drill.plan for drill in again] == [first.plan, second.plan]
    assert len(notes) == 1 and "drawn again from seed" in notes[0] and second.name in notes[0]


def test_the_same_faults_of_another_drill_or_under_other_limits_are_another_plan(suite: Path) -> None:
    suite.write_text(
        "name: toys\njob: job.yaml\ndrills:\n  - {name: a}\n  - {name: b}\n"
        "  - {name: c, matrix: {verify.confirm: [true, false], timeout: [60s, 90s], recovery.max_restarts: [1, 2]}}\n"
    )
    assert len({drill.plan for drill in plan_drills(load_suite(suite).drills)}) == 10
    # The job's place is no part of it: histories are carried from machine to machine.
    copy = suite.parent / "copy"
    shutil.copytree(suite.parent, copy, ignore=lambda *_: ["copy"])
    plans = [[drill.plan for drill in plan_drills(load_suite(each).drills)] for each in (suite, copy / suite.name)]
    assert plans[0] == plans[1]


def test_a_drill_without_faults_is_told(suite: Path, tmp_path: Path) -> None:
    suite.write_text("name: toys\njob: job.yaml\ndrills:\n  - {name: a}\n  - {name: b, faults: {random: {rate: 0.0000001}}}\n")
    for seed in (None, 1):
        notes = plan_suite(SuiteRequest(path=suite, seed=seed), tmp_path, 0.0).notes
        assert notes == ("b: no fault is planned, so nothing about recovery is tested",)


def test_a_night_is_named_by_when_it_was_asked_for(suite: Path, tmp_path: Path) -> None:
    with opened(tmp_path / "root", SuiteRequest(path=suite, asked_s=0.0), None) as (_, agenda, _):
        assert (agenda.night, agenda.by_hand) == ("1970-01-01", False)
    assert plan_suite(SuiteRequest(path=suite, only=("a",)), tmp_path, 0.0).by_hand


def test_a_suite_goes_on_with_its_own_history(suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with opened(root, SuiteRequest(path=suite), None) as (_, agenda, _):
        pass
    with opened(root, SuiteRequest(path=suite, history=Path(agenda.history)), "latest") as (_, again, _):
        assert again == agenda
    refused = pytest.raises(UsageError, match="with another history")
    with refused, opened(root, SuiteRequest(path=suite, history=suite), "latest"):
        pass


def test_a_history_that_cannot_be_written_is_told_before_the_night(suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "suites" / "history" / "toys.jsonl").mkdir(parents=True)
    with pytest.raises(UsageError, match="cannot read the history"), opened(root, SuiteRequest(path=suite), None):
        pass
    assert not list((root / "suites").glob("toys-*"))


def test_what_cannot_be_repeated_is_told(suite: Path, tmp_path: Path) -> None:
    loaded = load_suite(suite)
    kept = KeptPlans.next_to(tmp_path / "toys.jsonl")
    for drill in plan_drills(loaded.drills, 1)[:2]:
        kept.take(outcome(drill, tmp_path, ok=False), drill, suite="toys.yaml", night="2026-11-20")
    whole = json.loads(next(kept.folder.iterdir()).read_bytes())
    damaged = [{"overrides": "faults.seed=1"}, {"overrides": [1]}, {"night": 3}, {"passed": [None]}, {"exact": 1}]
    for number, change in enumerate(damaged):
        (kept.folder / f"damaged-{number}.json").write_text(json.dumps({**whole, **change}))
    (kept.folder / "torn.json").write_text("{")
    plans, notes = kept.read()
    assert len(plans) == 2 and all("cannot be read" in note for note in notes)
    assert [Path(note.split()[3]).stem for note in notes] == [*(f"damaged-{number}" for number in range(len(damaged))), "torn"]
    suite.write_text("name: toys\njob: job.yaml\nset: {max_steps: 3}\ndrills: [{name: b, faults: spot}]\n")
    (suite.parent / "job.yaml").write_text(JOB.replace("max_steps: 40", "max_steps: 3"))
    changed = load_suite(suite)
    again, notes = reruns(plans, changed.drills, plan_drills(changed.drills))
    assert again == [] and len(notes) == 2 and all("is kept, and not repeated: there is no drill" in note for note in notes)
    # One that has its drills, but no room for their faults.
    (suite.parent / "job.yaml").write_text(JOB.replace("workers: 2", "workers: 1").replace("max_steps: 40", "max_steps: 3"))
    suite.write_text(SUITE.replace("faults: [torture, spot]", "faults.random.count: [1]"))
    shorter = load_suite(suite)
    again, notes = reruns([plans[0]], shorter.drills, plan_drills(shorter.drills))
    assert again == [] and len(notes) == 1 and "its plan does not fit the job" in notes[0]
    # Neither is a reason to lose what failed: what was changed may be another branch, or another suite of that name.
    with opened(tmp_path / "root", SuiteRequest(path=suite, history=tmp_path / "toys.jsonl"), None) as (_, agenda, _):
        assert any("is kept, and not repeated" in note for note in agenda.notes)
    assert [plan.plan for plan in kept.read()[0]] == [plan.plan for plan in plans]


def test_a_plan_that_cannot_be_said_fault_by_fault_keeps_its_seed(suite: Path, tmp_path: Path) -> None:
    suite.write_text(
        "name: toys\njob: job.yaml\nset: {workers: 3}\ndrills:\n  - {name: times, faults: {random: {mtbf: 5s}}}\n"
        "  - {name: some, faults: {random: {count: 1, at_once: 2}}}\n"
    )
    loaded = load_suite(suite)
    kept = KeptPlans.next_to(tmp_path / "toys.jsonl")
    for drill in plan_drills(loaded.drills, 5):
        kept.take(outcome(drill, tmp_path, ok=False), drill, suite="toys.yaml", night="2026-11-20")
    again, notes = reruns(kept.read()[0], loaded.drills, plan_drills(loaded.drills, 6))
    planned = sorted(plan_drills(loaded.drills, 5), key=lambda each: each.name)
    assert [each.seed for each in again] == [drill.seed for drill in planned]
    assert [f"drawn again from seed {each.seed}" in note for each, note in zip(again, notes, strict=True)] == [True, True]
