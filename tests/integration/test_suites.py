"""A suite for real: drills at once on one Ray, each verdict as expected, its pages, and going on where it was cut short."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import rendered
from chaosrun.report.suite import render_suite
from chaosrun.suites.folder import SuiteFolder
from chaosrun.suites.history import read_history
from chaosrun.suites.night import Wish
from chaosrun.suites.results import SuiteResult
from tests.conftest import REPOSITORY

pytestmark = pytest.mark.ray
SUITE = f"""
name: protocols
job: {REPOSITORY / "jobs" / "order" / "job.yaml"}
drills:
  - name: order
    matrix: {{data.resume: [seedable, skip]}}
    expect: PASS
    cases:
      - when: {{data.resume: skip}}
        expect: {{verdict: FAIL, kind: data order, cause: step 8}}
"""


class Suite:
    """One suite, carried out once; every test looks at what it left, or goes on with it."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "root"
        self.file = folder / "protocols.yaml"
        self.file.write_text(SUITE)
        self.events: list[dict[str, Any]] = []
        self.result = self.run()
        assert self.result.path is not None
        self.folder = SuiteFolder(self.result.path)

    def run(self, **options: Any) -> SuiteResult:
        self.events.clear()
        return api.suite(Wish(path=self.file), root=self.root, on_event=self.events.append, **options)

    def heard(self) -> list[str]:
        return [f"{record['event']} {record.get('name', '')}".strip() for record in self.events]


@pytest.fixture(scope="module")
def suite(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("suite"))


def test_two_at_once_and_one_table(suite: Suite) -> None:
    result = suite.result
    assert result.as_expected and result.exit_code == 0, result.to_json()
    assert [(drill.status, drill.landed, drill.restarts) for drill in result.drills] == [("PASS", 1, 1), ("FAIL", 1, 1)]
    # Neither waited for the other.
    names = [drill.name for drill in result.drills]
    assert suite.heard()[:3] == ["suite.started", *(f"suite.drill {name}" for name in names)]
    table = rendered(render_suite(result), width=160, colour=False)
    assert "data order at step 8, rank 0: expected samples [5], seen [1]" in " ".join(table.split())
    assert {run.status for run in api.list_runs(suite.root)} == {"PASS", "FAIL"}
    # What every drill leaves, and what the suite does: each can be told without the other.
    told = result.to_json()
    assert [drill["verdict"]["status"] for drill in told["drills"]] == ["PASS", "FAIL"] and told["v"] == 1
    history = read_history(suite.root / "suites" / "history" / "protocols.jsonl")
    assert {entry.drill: entry.ok for entry in history.entries} == dict.fromkeys(names, True)
    page = suite.folder.index_html.read_text()
    for drill in result.drills:
        assert drill.run is not None and drill.run.report_html.is_file()
        assert f"../../runs/{drill.run.run_id}/report.html" in page
    assert suite.folder.junit_xml.read_text().count("<testsuite ") == 2
    assert "✅ protocols: as expected" in suite.folder.summary_md.read_text()


def test_what_is_done_is_not_done_again(suite: Suite) -> None:
    again = suite.run(resume="latest")
    assert suite.heard() == ["suite.started"]
    assert again.drills == suite.result.drills and again.suite_id == suite.result.suite_id


def test_a_drill_that_was_cut_short_goes_on_and_one_that_had_ended_is_judged(suite: Suite) -> None:
    """As a kill leaves it: of one drill its end was not written down, of the other nothing after its undisturbed leg."""
    runs = {drill.name: drill.run for drill in suite.result.drills}
    lines = [json.loads(line) for line in suite.folder.journal.read_text().splitlines()]
    kept = [line for line in lines if line["event"] == "drill.started"]
    write_durably(suite.folder.journal, b"".join(json.dumps(line).encode() + b"\n" for line in kept) + b'{"v": 1, "se')
    cut = runs["order[data.resume=skip]"]
    assert cut is not None
    cut.verdict_json.unlink()
    shutil.rmtree(cut.leg("chaos").path)
    again = suite.run(resume=suite.result.suite_id[:-2])
    assert again.as_expected
    assert {drill.name: drill.run for drill in again.drills} == runs
    assert RunLayout(cut.path).verdict_json.is_file()
    assert sorted(suite.heard()[1:]) == sorted(f"suite.{what} {name}" for what in ("drill", "ended") for name in runs)


def test_a_job_that_changed_is_not_gone_on_with(suite: Suite) -> None:
    agenda = suite.folder.load()
    changed = agenda.to_json()
    changed["drills"][0]["text"] = "another"
    copy = SuiteFolder(suite.folder.path.parent / "protocols-copy")
    copy.path.mkdir()
    write_durably(copy.file, json.dumps(changed).encode())
    with pytest.raises(api.UsageError, match="has changed since the suite began"):
        suite.run(resume="protocols-copy")
