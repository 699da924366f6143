"""The zoo's catalogue is whole; and, every night, one of its bugs is seen, and the release without it passes."""

import pytest

from chaosrun.spec.job_file import load_job
from chaosrun.verify.codes import public_codes
from tests.zoo.__main__ import JOBS, PAGE, TAIL, page, write_suite
from tests.zoo.bugs import BUGS


def test_every_bug_has_a_job_a_bad_release_and_a_cause_of_the_table() -> None:
    assert {path.stem for path in JOBS.glob("*.yaml")} == {bug.name for bug in BUGS}
    for bug in BUGS:
        job = load_job(JOBS / f"{bug.name}.yaml")
        assert job.spec.name == bug.name and job.spec.by == "script" and job.spec.faults.schedule
        assert any(drill.verdict == "FAIL" and drill.cause in public_codes() for drill in bug.drills), bug.name
        assert len({drill.of for drill in bug.drills}) == len(bug.drills)


def test_the_page_has_a_row_for_every_bug() -> None:
    written = PAGE.read_text()
    assert written.endswith(TAIL)
    for bug, row in zip(BUGS, page({}).splitlines()[-len(BUGS) - TAIL.count("\n") :], strict=False):
        thread = row.split("|")[2]
        assert bug.url in thread and f"|{thread}| {bug.wrong} |" in written, f"{bug.name}: run `make zoo`"


@pytest.mark.nightly
def test_one_pair_is_told_apart(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate 1.14.0 replays epoch 0, accelerate 1.15.0 does not. Needs the network, or the releases in the cache."""
    from chaosrun.api import suite
    from chaosrun.campaign.suite_plan import SuiteRequest

    path = tmp_path / "zoo.yaml"
    write_suite(path, [bug for bug in BUGS if bug.name == "accelerate-4071"])
    monkeypatch.setenv("CHAOSRUN_ROOT", str(tmp_path / "root"))
    whole = suite(SuiteRequest(path=path))
    assert {result.name: (result.status, result.surprises) for result in whole.drills} == {
        "accelerate-4071-bad": ("FAIL", ()),
        "accelerate-4071-good": ("PASS", ()),
    }
