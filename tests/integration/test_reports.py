"""The reports of a real drill: which every drill gets, and that their numbers are the records'."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from junitparser import JUnitXml
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer

from chaosrun import api, cli
from chaosrun.records.layout import RunLayout
from chaosrun.verify.schema import verdict_schema
from chaosrun.verify.verdict import Verdict
from tests.conftest import REPOSITORY
from tests.records import read_lines

pytestmark = pytest.mark.ray


@dataclass
class Session:
    """One drill on probe: killed after step 27, with checkpoints after every tenth."""

    root: Path
    result: api.RunResult

    @property
    def run(self) -> RunLayout:
        return self.result.run

    @property
    def verdict(self) -> Verdict:
        return self.result.verdict

    def steps(self, leg: str, attempt: int, rank: int = 1) -> list[dict[str, Any]]:
        return [line for line in read_lines(self.run.leg(leg).attempt(attempt).trace(rank)) if line["kind"] == "step"]


@pytest.fixture(scope="module")
def drill(local_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Session:
    root = tmp_path_factory.mktemp("reports")
    result = api.submit(REPOSITORY / "jobs" / "probe" / "job.yaml", root=root)
    assert result.verdict.status == "PASS", result.verdict.cause
    return Session(root, result)


def test_every_drill_gets_its_reports(drill: Session) -> None:
    assert drill.result.unwritten == ()
    run = drill.run
    assert all(path.stat().st_size > 1000 for path in (run.report_html, run.report_md, run.junit_xml))
    assert not [path.name for path in run.path.iterdir() if path.name.endswith(".tmp") or "error" in path.name]


def test_its_verdict_is_what_the_schema_says(drill: Session) -> None:
    value = json.loads(drill.run.verdict_json.read_text())
    jsonschema.Draft202012Validator(verdict_schema()).validate(value)
    assert value["blame"] == {"whose": "nobody", "likely": False, "part": None, "reason": "the job recovered exactly"}


def test_the_evidence_names_the_process(drill: Session) -> None:
    pid = next(read_lines(drill.run.leg("chaos").attempt(1).trace(1)))["pid"]
    (fault,) = drill.verdict.faults
    assert (fault.kind, fault.evidence) == ("kill", f"pid {pid}: SIGKILL")
    assert f"pid {pid}: SIGKILL" in drill.run.report_md.read_text()


def test_junit(drill: Session) -> None:
    (suite,) = JUnitXml.fromfile(str(drill.run.junit_xml))
    assert (suite.name, suite.failures, suite.errors) == ("probe", 0, 0)
    assert suite.tests == 2 + len(drill.verdict.checks)
    told = {entry.name: entry.value for entry in suite.properties()}
    assert told | {"workers": "2", "seed": "1", "verdict": "PASS", "lost_steps": str(drill.verdict.lost_steps)} == told


def test_tensorboard_shows_every_step_once(drill: Session, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert cli.main(["report", drill.run.run_id, "--root", str(drill.root), "--format", "tensorboard"]) == 0
    place = Path(capsys.readouterr().out.strip())
    reader = EventMultiplexer(size_guidance={"scalars": 0, "tensors": 0})
    reader.AddRunsFromDirectory(str(place))
    reader.Reload()
    assert sorted(reader.Runs()) == ["chaos", "chaos/replayed-attempt-1", "reference"]
    losses = {run: {event.step: event.value for event in reader.Scalars(run, "loss")} for run in reader.Runs()}
    assert list(losses["chaos"]) == list(losses["reference"]) == list(range(1, drill.verdict.steps + 1))
    assert losses["chaos"] == losses["reference"]
    assert list(losses["chaos/replayed-attempt-1"]) == [line["step"] for line in drill.steps("chaos", 1) if line["step"] > 20]
    by_rank = [[float.fromhex(line["loss"][0]) for line in drill.steps("reference", 1, rank)] for rank in (0, 1)]
    assert list(losses["reference"].values()) == pytest.approx([sum(pair) / 2 for pair in zip(*by_rank, strict=True)])
    assert {event.value for event in reader.Scalars("chaos", "loss_difference_ulp")} == {0.0}
