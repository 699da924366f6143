"""Where a chaos leg is to begin, and what a reference keeps for that."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from legs import KILLS, write_run

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.run_file import Early, read_run
from chaosrun.spec.model import JobSpec
from chaosrun.supervise import beginning
from chaosrun.supervise.workers import order_template

LATE = KILLS[1]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    run = write_run(tmp_path_factory.mktemp("whole"), kills=(LATE,), steps=12)
    run.leg("reference").repeats.write_text("{}")
    return run


def spec_of(run: RunLayout, **changes: dict[str, Any]) -> JobSpec:
    told = read_run(run).spec
    return JobSpec.model_validate({**told, **{part: {**told.get(part, {}), **values} for part, values in changes.items()}})


@pytest.mark.parametrize(
    ("asked", "early", "kept"),
    [
        ("auto", "always", beginning.EVERY_ONE),
        ("auto", "watch", beginning.EVERY_ONE),
        ("auto", "long", 3),
        ("auto", "never", 3),
        ("all", "never", beginning.EVERY_ONE),
        (7, "always", 7),
        (2, "always", 3),
    ],
)
def test_a_reference_keeps_as_many_checkpoints_as_are_asked_for(run: RunLayout, asked: Any, early: Early, kept: int) -> None:
    spec = spec_of(run, checkpoint={"keep_reference": asked, "keep": 3})
    for leg, expected in (("reference", kept), ("chaos", 3)):
        template = order_template(leg, run.leg(leg), spec, read_run(run), reference=None)
        assert beginning.keeping(template, spec, early).keep == expected


@pytest.mark.parametrize(
    ("begin", "early", "there"),
    [
        ("auto", "always", True),
        ("auto", "watch", False),
        ("auto", "never", False),
        ("auto", "long", False),
        ("fault", "never", True),
        ("beginning", "always", False),
    ],
)
def test_it_goes_by_one_rule_with_early_ends(run: RunLayout, begin: str, early: Early, there: bool) -> None:
    assert beginning.wanted(spec_of(run, verify={"begin": begin}), early, run.leg("reference")) is there


@pytest.mark.parametrize(
    ("fault", "changes", "why"),
    [
        (replace(LATE, at_step=None, occurrence=2, phase="reduce"), {}, "no fault has a step"),
        (replace(LATE, phase="restore.end"), {}, "may strike before any checkpoint"),
        (replace(LATE, phase="rendezvous"), {}, "may strike before any checkpoint"),
        (LATE, {"verify": {"losses": {"rtol": 1e-3}}}, "a tolerance was given"),
        (LATE, {"resume": {"by": "script"}}, "a script that resumes by itself"),
        (LATE, {}, "what its script does outside"),
    ],
)
def test_what_cannot_be_judged_from_there_begins_at_the_beginning(
    run: RunLayout, tmp_path: Path, fault: Fault, changes: dict[str, Any], why: str
) -> None:
    plan = replace(FaultPlan.read(run.plan_json), faults=(fault,))
    chaos = LegLayout(tmp_path / "chaos")
    began = beginning.begin(read_run(run), spec_of(run, **changes), plan, run.leg("reference"), chaos)
    assert why in began.why and not began.states
    assert not chaos.checkpoints.exists()
