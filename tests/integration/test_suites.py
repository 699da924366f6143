"""A suite for real: drills on one Ray, each verdict as expected, one table."""

from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.report.output import rendered
from chaosrun.report.suite import render_suite
from tests.conftest import REPOSITORY


@pytest.mark.ray
def test_the_protocols_of_the_seed_in_one_table(local_ray: None, tmp_path: Path) -> None:
    heard: list[str] = []
    result = api.suite(
        REPOSITORY / "configs" / "resume-protocols.yaml",
        only=["seedable", "skip"],
        root=tmp_path / "root",
        on_event=lambda record: heard.append(record["event"]),
    )
    assert result.as_expected and result.exit_code == 0
    assert [drill.verdict.status for drill in result.drills if drill.verdict] == ["PASS", "FAIL"]
    assert heard.count("drill.starting") == 2
    table = rendered(render_suite(result), width=120, colour=False)
    assert "data order at step 8, rank 0: expected samples [5], seen [1]" in " ".join(table.split())
    assert {run.status for run in api.list_runs(tmp_path / "root")} == {"PASS", "FAIL"}
