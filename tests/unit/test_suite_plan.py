"""What a suite is going to do: which losses it compares, what must not change under it, and a part that no drill belongs to."""

import json
import xml.etree.ElementTree as ET
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path

import pytest
from suites import JOB, night_of, write_suite

from chaosrun import api
from chaosrun.campaign.files import SuiteFolder, SuitePlan
from chaosrun.campaign.history import NightResult, nights, read_history
from chaosrun.campaign.report.pages import junit_text, render_index, render_markdown
from chaosrun.campaign.report.text import render_suite
from chaosrun.campaign.results import DrillResult, SuiteResult, compare_losses
from chaosrun.campaign.suite_plan import Shard, SuiteRequest, plan_suite
from chaosrun.campaign.suite_run import opened
from chaosrun.errors import SpecError, UsageError
from chaosrun.integrations.export import workflow
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import rendered
from chaosrun.verify.trajectory import Trajectory
from tests.unit.run_files import write_info

SUITE = (
    "name: toys\njob: job.yaml\ndrills: [{name: a}, {name: b}, {name: c}, {name: d, faults: ./mine.yaml}]\n"
    "comparison: {atol: 0.5, beyond: [c]}\n"
)
LOSSES = {"a": 1.0, "b": 1.1, "c": 9.0, "d": 0.9}


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    path = write_suite(tmp_path, SUITE)
    (tmp_path / "mine.yaml").write_text("faults: [{kind: kill, mean: 30%}]\n")
    (tmp_path / "job.yaml").write_bytes(JOB.replace("\n", "\r\n").encode())
    return path


def well(name: str, *, rerun: str | None = None) -> DrillResult:
    return DrillResult(name=name, run=RunLayout(Path(name)), status="PASS", expected="PASS", rerun=rerun)


@pytest.fixture
def losses(monkeypatch: pytest.MonkeyPatch) -> None:
    def known(run: RunLayout) -> Trajectory:
        return Trajectory(workers=1, losses=(LOSSES[run.path.name.partition("@")[0]],))

    monkeypatch.setattr("chaosrun.campaign.results.trajectory", known)


def told(agenda: SuitePlan) -> tuple[str | None, list[str]]:
    comparison = agenda.comparison
    return None if comparison is None else comparison.first, [note for note in agenda.notes if "loss" in note]


@pytest.mark.parametrize(
    ("expect", "at", "said", "hint"),
    [
        ("{verdict: FAIL, kind: data oder}", "data oder", "no kind 'data oder'", "did you mean 'data order'?"),
        ("{verdict: FAIL, kind: zz}", "zz", "no kind 'zz'", "there are data order, batch"),
        ("{verdict: FAIL, cause: batchs_repeated}", "batchs", "no cause has the code batchs_r", "did you mean batches_r"),
        ("{verdict: FAIL, cause: zzz_zzz}", "zzz", "no cause has the code zzz_zzz", "see docs/causes.md"),
        ("{verdict: PASS, cause: batches_repeated}", "batches", "batches_repeated is no cause of a PASS", "exact, never_saves"),
        ("{verdict: PASS, kind: rng}", "rng", "nothing differs in a PASS", "expect FAIL"),
        ("{verdict: PASS, exit_code: 3}", "3}", "PASS never has exit code 3", "it has 0"),
        ("{verdict: FAIL, exit_code: 6}", "6}", "FAIL never has exit code 6", "it has 3"),
        ("{verdict: INCONCLUSIVE, exit_code: 77}", "77", "INCONCLUSIVE never has exit code 77", "it has 4 or 5 or 6"),
    ],
)
@pytest.mark.parametrize("where", ["{name: a, expect: EXPECT}", "{name: a, cases: [{when: {workers: 1}, expect: EXPECT}]}"])
def test_what_no_verdict_can_be_is_refused(tmp_path: Path, expect: str, at: str, said: str, hint: str, where: str) -> None:
    drills = f"drills: [{where.replace('EXPECT', expect)}]"
    path = write_suite(tmp_path, f"name: toys\njob: job.yaml\nmatrix: {{workers: [1]}}\n{drills}\n")
    with pytest.raises(SpecError) as caught:
        plan_suite(SuiteRequest(path=path), tmp_path, 0.0)
    assert f"{path}:4:{drills.index(at) + 1}: {said}" in caught.value.message
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    "expect",
    [
        "{verdict: FAIL, kind: data order, cause: step 8, exit_code: 3}",
        "{verdict: FAIL, cause: batches_repeated}",
        "{verdict: FAIL, cause: the buffer running_mean}",
        "{verdict: PASS, cause: within_tolerance, exit_code: 0}",
        "{verdict: INCONCLUSIVE, cause: interrupted, exit_code: 124}",
    ],
)
def test_what_a_verdict_can_be_may_be_expected(tmp_path: Path, expect: str) -> None:
    path = write_suite(tmp_path, f"name: toys\njob: job.yaml\ndrills: [{{name: a, expect: {expect}}}]\n")
    assert len(plan_suite(SuiteRequest(path=path), tmp_path, 0.0).drills) == 1


def test_of_a_part_is_said_what_is_not_compared(suite: Path, tmp_path: Path) -> None:
    assert told(plan_suite(SuiteRequest(path=suite), tmp_path, 0.0)) == ("a", [])
    first, notes = told(plan_suite(SuiteRequest(path=suite, only=("a", "b")), tmp_path, 0.0))
    assert first == "a" and notes == ["the losses are compared of a, b alone: c, d left out"]
    for only, why in ((("b", "c"), "drill a is not in this part of the suite"), (("a",), "a alone is in this part")):
        first, notes = told(plan_suite(SuiteRequest(path=suite, only=only), tmp_path, 0.0))
        assert first is None and len(notes) == 1 and why in notes[0]


def test_shards_keep_together_what_is_compared(suite: Path, tmp_path: Path) -> None:
    shards = [plan_suite(SuiteRequest(path=suite, shard=Shard(number, 3)), tmp_path, 0.0) for number in (1, 2, 3)]
    assert sorted(len(shard.drills) for shard in shards) == [0, 0, 4]
    for shard in shards:
        assert any("all drills belong to one of the 3 shards" in note for note in shard.notes)
        assert (shard.comparison is not None) == bool(shard.drills)
    suite.write_text(SUITE.partition("comparison")[0])
    assert not any(plan_suite(SuiteRequest(path=suite, shard=Shard(1, 3)), tmp_path, 0.0).notes)


def test_the_first_is_the_suites_whatever_ran_first(suite: Path, tmp_path: Path, losses: None) -> None:
    """A kept plan is begun before all others, and what failed last night before what did not."""
    comparison = plan_suite(SuiteRequest(path=suite), tmp_path, 0.0).comparison
    assert comparison is not None
    ran = (well("b@2026-11-20", rerun="2026-11-20"), well("c"), well("d"), well("a"), well("b"))
    whole = compare_losses(SuiteResult(name="toys", drills=ran), comparison)
    assert whole.as_expected and whole.first == "a" and [entry.name for entry in whole.compared] == ["c", "d", "b"]


def test_nothing_is_read_again_at_the_end(suite: Path, tmp_path: Path, losses: None) -> None:
    with night_of(suite, tmp_path / "root") as night:
        suite.write_text("- broken")
        result = night.result({name: well(name) for name in "abcd"})
        assert result.first == "a" and [entry.control for entry in result.compared] == [False, True, False]
        # A script that was edited meanwhile is told: not every drill had the same.
        assert not any("has changed" in note for note in result.notes)
        (tmp_path / "train.py").write_text("import sys\n")
        assert any("train.py has changed while the suite ran" in note for note in night.result({}).notes)


@pytest.mark.parametrize("odd", [False, True])
def test_a_comparison_that_fails_is_seen_everywhere(suite: Path, tmp_path: Path, losses: None, odd: bool) -> None:
    if odd:
        suite.write_text(SUITE.replace("beyond: [c]", "beyond: [d]"))
    with night_of(suite, tmp_path / "root") as night:
        result = night.result({name: well(name) for name in "abcd"})
        assert result.exit_code == (3 if odd else 0)
        known = nights(read_history(Path(night.plan.history)).entries)
    page = render_index(result, known, tmp_path)
    assert ("the losses are not as expected</h1>" in page) == odd
    assert [entry.ok for entry in known[-1].drills.values()] == [not odd]
    junit = ET.fromstring(junit_text(replace(result, drills=())))
    (compared,) = junit.findall("testsuite[@name='comparison']")
    assert compared.get("tests") == "3"
    failed = [case.get("name") for case in compared.iter("testcase") if case.find("failure") is not None]
    assert failed == (["c", "d"] if odd else [])


def test_the_exported_workflow_keeps_the_suites_junit() -> None:
    kept = [line.strip() for line in workflow("toys.yaml", suite=True).splitlines() if line.strip().startswith(".chaosrun/**/")]
    assert any(fnmatch(f".chaosrun/suites/x/{SuiteFolder(Path()).junit_xml.name}", pattern) for pattern in kept), kept


def test_junit_has_a_case_for_all_that_keeps_a_suite_from_passing() -> None:
    drills = (DrillResult(name="a", run=None, status=None, expected="PASS", error="no", surprises=("no",)),)
    junit = ET.fromstring(junit_text(SuiteResult(name="x", drills=drills, left=("b",), not_compared="drill a was not run")))
    suites = {suite.get("name"): suite for suite in junit.findall("testsuite")}
    assert list(suites) == ["a", "b", "comparison"]
    assert suites["b"].find("testcase/skipped") is not None
    error = suites["comparison"].find("testcase/error")
    assert error is not None and "drill a was not run" in str(error.get("message"))


def test_a_part_without_drills_is_neither_success_nor_failure(suite: Path, tmp_path: Path) -> None:
    empty = next(n for n in (1, 2, 3) if not plan_suite(SuiteRequest(path=suite, shard=Shard(n, 3)), tmp_path, 0.0).drills)
    nothing = SuiteRequest(path=suite, shard=Shard(empty, 3))
    result = api.suite(nothing, root=tmp_path / "root", address="127.0.0.1:1")  # no Ray there
    assert result.exit_code == 0 and not result.as_expected and result.path is not None
    said = f"no drill belongs to shard {empty}/3 of the suite"
    text = rendered(render_suite(result), width=140, colour=False)
    assert f"NOTHING TO DO  {said}" in text and "AS EXPECTED" not in text
    assert "✅" not in render_markdown(result) and "❌" not in render_markdown(result)
    folder = SuiteFolder(result.path)
    page = folder.index_html.read_text()
    assert "As expected</span>" not in page and "toys: nothing to do</h1>" in page
    (case,) = ET.fromstring(folder.junit_xml.read_text()).iter("testcase")
    assert case.find("skipped") is not None
    # Where drills were left, there was something to do.
    assert not SuiteResult(name="toys", drills=(), left=("a",)).empty


@pytest.mark.parametrize("file", ["toys.yaml", "job.yaml", "train.py", "mine.yaml"])
def test_what_changed_is_not_gone_on_with(suite: Path, tmp_path: Path, file: str) -> None:
    root = tmp_path / "root"
    with night_of(suite, root):
        pass
    with opened(root, SuiteRequest(path=suite), "latest") as (_, agenda, _):
        assert len(agenda.drills) == 4
    path = tmp_path / file
    path.write_text(path.read_text() + "# another line\n")
    refused = pytest.raises(UsageError, match=f"{file} has changed since the suite began")
    with refused, opened(root, SuiteRequest(path=suite), "latest"):
        pass


def test_a_job_edited_under_a_suite_is_not_drilled(suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with night_of(suite, root) as night:
        (tmp_path / "job.yaml").write_text(JOB + "seed: 3\n")
        with pytest.raises(UsageError, match="has changed since the suite began"):
            night._run_of(night.plan.drills[0])
    assert not (root / "runs").exists()


def test_a_folder_that_cannot_be_read_keeps_no_other_from_going_on(suite: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    with night_of(suite, root) as night:
        name = night.folder.path.name
    old = SuiteFolder(root / "suites" / "old-20200101-000000")
    old.path.mkdir()
    old.file.write_text(json.dumps({"v": 0}))
    for ref in ("latest", name):
        with opened(root, SuiteRequest(path=suite), ref) as (folder, _, _):
            assert folder.path.name == name
    with pytest.raises(UsageError, match="has version 0"), opened(root, SuiteRequest(path=suite), old.path.name):
        pass


def test_time_is_that_of_all_processes_and_not_what_lies_between(tmp_path: Path) -> None:
    folder = SuiteFolder(tmp_path)
    times = [("suite.began", 100), ("drill.started", 103), ("suite.began", 900), ("drill.started", 904), ("suite.ended", 905)]
    told = [{"event": event, "time_s": time_s, "name": "a", "run": "/r", "result": {}} for event, time_s in times]
    folder.journal.write_text("".join(json.dumps(each) + "\n" for each in told))
    assert folder.progress().took_s == 8


def test_a_preset_for_a_job_of_no_known_length_is_refused_once(suite: Path, tmp_path: Path) -> None:
    suite.write_text(
        "name: toys\njob: job.yaml\nset: {max_steps: null}\n"
        "drills: [{name: a, matrix: {workers: [1, 2], faults: [spot, torture]}}]\n"
    )
    with pytest.raises(SpecError) as caught:
        plan_suite(SuiteRequest(path=suite), tmp_path, 0.0)
    assert str(caught.value).count("cannot be planned") == 1 and "set: {max_steps: 60}" in str(caught.value)


def test_a_surprise_has_the_command_that_repeats_it(suite: Path, tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "runs" / "toy-1")
    run.path.mkdir(parents=True)
    write_info(run, job="/jobs/toy.yaml", overrides=("faults.seed=7",))
    odd = DrillResult(name="a", run=run, status="FAIL", expected="PASS", surprises=("FAIL where PASS was expected",))
    fine = replace(odd, surprises=())
    entry = NightResult.of(odd, plan_suite(SuiteRequest(path=suite), tmp_path, 0.0))
    for drill, shown in ((odd, True), (fine, False)):
        page = render_index(SuiteResult(name="x", drills=(drill,)), nights([entry]), tmp_path)
        assert ("faults.seed=7" in page) == shown
        assert "The last 1 night" not in page
