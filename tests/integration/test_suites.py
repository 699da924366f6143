"""A suite for real: drills at once on one Ray, each verdict as expected, its pages, and going on where it was cut short."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.campaign.files import SuiteFolder
from chaosrun.campaign.history import read_history
from chaosrun.campaign.report.text import render_suite
from chaosrun.campaign.results import SuiteResult
from chaosrun.campaign.suite_plan import SuiteRequest
from chaosrun.errors import InterruptedRunError
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import rendered
from tests.conftest import REPOSITORY
from tests.e2e.drills import eventually, reached, write_job

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
        return api.suite(SuiteRequest(path=self.file), root=self.root, on_event=self.events.append, **options)

    def heard(self) -> list[str]:
        names = [(record["event"], record.get("drill", record.get("name", ""))) for record in self.events]
        return [f"{event} {name}".strip() for event, name in names if event != "drill.at"]


@pytest.fixture(scope="module")
def suite(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Suite:
    return Suite(tmp_path_factory.mktemp("suite"))


def test_two_at_once_and_one_table(suite: Suite) -> None:
    result = suite.result
    assert result.as_expected and result.exit_code == 0, result.to_json()
    assert [(drill.status, drill.landed, drill.restarts) for drill in result.drills] == [("PASS", 1, 1), ("FAIL", 1, 1)]
    # Neither waited for the other.
    names = [drill.name for drill in result.drills]
    assert suite.heard()[0] == "suite.started"
    assert sorted(suite.heard()[1:3]) == sorted(f"drill.began {name}" for name in names)
    # Of each it is told what it is at.
    at = {(record["drill"], record["of_leg"], record["attempt"]) for record in suite.events if record["event"] == "drill.at"}
    legs = (("reference", 1), ("chaos", 1), ("chaos", 2))
    assert at == {*((name, *leg) for name in names for leg in legs), (names[1], "confirm", 1)}
    table = rendered(render_suite(result), width=160, colour=False)
    assert "data order at step 8, rank 0: expected samples [5], seen [1]" in " ".join(table.split())
    assert {run.status for run in api.list_runs(suite.root)} == {"PASS", "FAIL"}
    # What every drill leaves, and what the suite does: each can be told without the other.
    told: Any = result.to_json()
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
    events = ("drill.began", "drill.left", "suite.ended")
    assert sorted(suite.heard()[1:]) == sorted(f"{event} {name}" for event in events for name in runs)


def test_a_job_that_changed_is_not_gone_on_with(suite: Suite) -> None:
    agenda = suite.folder.load()
    changed: Any = agenda.to_json()
    changed["files"] = dict.fromkeys(changed["files"], "another")
    copy = SuiteFolder(suite.folder.path.parent / "protocols-copy")
    copy.path.mkdir()
    write_durably(copy.file, json.dumps(changed).encode())
    with pytest.raises(api.UsageError, match="has changed since the suite began"):
        suite.run(resume="protocols-copy")


class Held:
    """A suite whose drills are held at the fourth step of their legs under faults, until they are let go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = folder / "root"
        trouble = f"go = [Path({str(folder)!r}, name) for name in (Path(order.leg_path).parent.name, 'all')]\n" + (
            "while order.leg == 'chaos' and step >= 4 and not any(map(Path.exists, go)): time.sleep(0.05)"
        )
        write_job(folder, trouble, "faults: {schedule: [{rank: 1, at_step: 2}]}", "recovery: {hang_timeout: 300s}")
        drills = ", ".join(f"{{name: {name}, set: {{faults.seed: {seed}}}}}" for seed, name in enumerate("ab"))
        (folder / "held.yaml").write_text(f"name: held\njob: job.yaml\ndrills: [{drills}]\n")

    def run(self, *, fail_fast: bool = False, only: tuple[str, ...] = (), **options: Any) -> SuiteResult:
        wish = SuiteRequest(path=self.folder / "held.yaml", fail_fast=fail_fast, only=only)
        return api.suite(wish, root=self.root, **options)

    def held(self, name: str) -> RunLayout:
        """Its run, once it is held."""

        def there() -> RunLayout | None:
            time.sleep(0.1)  # what is waited for happens in this very process
            for summary in api.list_runs(self.root):
                run = RunLayout(summary.path)
                seed = json.loads(run.run_json.read_text())["spec"]["faults"]["seed"]
                if "ab"[seed] == name and reached(run.leg("chaos"), 2, 4):
                    return run
            return None

        return eventually(there)

    def let_go(self, run: RunLayout) -> None:
        (self.folder / run.run_id).touch()

    @contextmanager
    def beside(self, do: Callable[[], None]) -> Iterator[None]:
        """In another thread, as another process would. When it fails, nothing is held any longer."""
        failures: list[BaseException] = []

        def work() -> None:
            try:
                do()
            except BaseException as error:
                failures.append(error)
                (self.folder / "all").touch()

        thread = threading.Thread(target=work)
        thread.start()
        yield
        thread.join()
        if failures:
            raise failures[0]


@pytest.mark.nightly
def test_a_drill_is_struck_and_cancelled(local_ray: None, tmp_path: Path) -> None:
    suite = Held(tmp_path)

    def meanwhile() -> None:
        run = suite.held("a")
        assert api.ping(run)["run"] == run.run_id
        faults = [fault["id"] for fault in api.inject(run, kind="kill", rank="0")["faults"]]
        assert faults == ["F2"] and all(each.landed for each in api.landings(run, faults, timeout_s=60.0))
        api.cancel(run, timeout_s=60.0)
        with pytest.raises(InterruptedRunError) as ended:
            api.wait(run)
        assert ended.value.hint and f"resume {run.run_id}" in ended.value.hint

    with suite.beside(meanwhile):
        result = suite.run(only=("a",))
    (drill,) = result.drills
    assert (drill.word, drill.exit_code, result.exit_code) == ("cancelled", 130, 6)
    assert not list(suite.root.glob("runs/*/control"))


@pytest.mark.nightly
def test_one_drill_is_cancelled_and_the_one_beside_it_struck(local_ray: None, tmp_path: Path) -> None:
    suite = Held(tmp_path)
    waited: list[api.RunResult] = []

    def meanwhile() -> None:
        a, b = suite.held("a"), suite.held("b")
        assert [api.ping(run)["run"] for run in (a, b)] == [a.run_id, b.run_id]
        api.cancel(a, timeout_s=60.0)
        faults = [fault["id"] for fault in api.inject(b, kind="kill", rank="0")["faults"]]
        assert faults == ["F2"] and all(each.landed for each in api.landings(b, faults, timeout_s=60.0))
        suite.let_go(b)
        waited.append(api.wait(b, timeout_s=60.0))

    with suite.beside(meanwhile):
        result = suite.run()
    assert [(drill.word, drill.exit_code, drill.landed) for drill in result.drills] == [("cancelled", 130, 0), ("PASS", 0, 2)]
    # The other's undisturbed leg was as good for it.
    assert result.exit_code == 6 and result.cached == (1, 0)
    (seen,) = waited
    assert seen.verdict.status == "PASS" and seen.run.report_html.is_file()


@pytest.mark.nightly
@pytest.mark.parametrize("fail_fast", [False, True])
def test_after_a_cancelled_drill_the_suite_goes_on_or_can_be_gone_on_with(
    local_ray: None, tmp_path: Path, fail_fast: bool
) -> None:
    """One after the other: the next one where the cancelled one was."""
    suite = Held(tmp_path)
    runs: list[RunLayout] = []

    def meanwhile() -> None:
        runs.append(suite.held("a"))
        api.cancel(runs[0])
        if not fail_fast:
            runs.append(suite.held("b"))
            suite.let_go(runs[1])

    with suite.beside(meanwhile):
        result = suite.run(at_once=1, fail_fast=fail_fast)
    assert ([drill.word for drill in result.drills], result.left) == (
        (["cancelled"], ("b",)) if fail_fast else (["cancelled", "PASS"], ())
    )

    def let_go() -> None:
        suite.let_go(suite.held("a"))
        if fail_fast:
            suite.let_go(suite.held("b"))

    # With the very run that it had, as one that was cut short.
    with suite.beside(let_go):
        again = suite.run(at_once=1, resume="latest")
    assert again.as_expected and len(again.drills) == 2
    assert [drill.run for drill in again.drills][: len(runs)] == runs
