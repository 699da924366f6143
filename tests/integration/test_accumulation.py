"""Gradient accumulation that counts items: the same losses however the global batch is cut, and exact under kills."""

import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.campaign.planned_drill import plan_drills
from chaosrun.campaign.results import SuiteResult, compare_losses, drill_result
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.spec.suite import load_suite
from chaosrun.verify.trajectory import LossDifference, compare_trajectories, trajectory
from chaosrun.verify.verdict import Verdict
from tests.conftest import REPOSITORY, WarmDrills, job_file

pytestmark = pytest.mark.ray

SUITE = REPOSITORY / "configs" / "accumulation.yaml"
CAUSAL_LM = REPOSITORY / "jobs" / "causal_lm" / "job.yaml"
SCRIPT = Path(__file__).parent / "accumulation" / "train.py"
ATOL = 1e-5

JOB = """\
name: windows
script: {script}
args: [{args}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: 4}}
faults: {{schedule: [{faults}]}}
timeout: 300s
"""


class Drills:
    """`drills(workers, batch size, accumulation, *args)`: a drill of the script `accumulation/train.py`."""

    def __init__(self, warm: WarmDrills, folder: Path) -> None:
        self._warm = warm
        self._folder = folder

    def __call__(
        self, workers: int, batch_size: int, accumulation: int, *args: object, faults: str = "{rank: 0, at_step: 10}"
    ) -> api.RunResult:
        words = ["--batch-size", batch_size, "--accumulation", accumulation, *args]
        text = JOB.format(script=SCRIPT, args=", ".join(map(str, words)), workers=workers, faults=faults)
        return self._warm(job_file(text, self._folder), root=self._folder)


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(warm_drills, tmp_path_factory.mktemp("windows"))


def assert_exact(verdict: Verdict) -> None:
    assert verdict.status == "PASS", verdict.cause
    assert all(fault.landed for fault in verdict.faults)


def differences(runs: Mapping[str, RunLayout]) -> dict[str, LossDifference]:
    """Of every run's losses from the first one's."""
    found = {name: trajectory(run) for name, run in runs.items()}
    first = next(iter(found))
    return {name: compare_trajectories(found[first], losses, atol=ATOL) for name, losses in found.items() if name != first}


def reference(run: RunLayout) -> LegHistory:
    return read_leg(run.reference)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_five_ways_to_cut_the_global_batch(warm_drills: WarmDrills, tmp_path: Path) -> None:
    suite = load_suite(SUITE)
    assert {drill.name for drill in suite.drills} > {"1x8x1", "1x4x2", "2x4x1", "2x2x2", "4x1x2"}
    runs, results = {}, []
    for drill, planned in zip(suite.drills, plan_drills(suite.drills), strict=True):
        done = warm_drills(drill.job.path, root=tmp_path, overrides=drill.overrides)
        assert_exact(done.verdict)
        # Killed at step 18 of 24, in the middle of the second of two epochs.
        assert [attempt.resumed_step for attempt in done.verdict.attempts] == [0, 15]
        runs[drill.name] = done.run
        results.append(drill_result(planned, done.run, done.verdict, took_s=0.0))
    assert suite.spec.comparison is not None
    result = compare_losses(SuiteResult(name=suite.spec.name, drills=tuple(results)), suite.spec.comparison)
    naive = [name for name in runs if name.startswith("naive")]
    found = differences(runs)
    print({name: f"{entry.largest:.2e}" for name, entry in found.items()})
    assert naive and {name for name, entry in found.items() if not entry.within} == {*naive}
    # The control is beyond at once, and not by a hair.
    assert [found[name].first_beyond for name in naive] == [1]
    assert all(found[name].mean > 100 * ATOL for name in naive)
    assert result.as_expected
    # What a step counted is on record, the same in every shape; the naive loop counts nothing.
    counted = {
        name: {step: record.items for step, record in reference(run).attempts[0].traces[0].steps.items()}
        for name, run in runs.items()
    }
    assert all(counted[name] == counted["1x8x1"] for name in runs if name not in naive)
    assert None not in counted["1x8x1"].values()
    assert all({*counted[name].values()} == {None} for name in naive)


def test_windows_are_exact_where_everything_is_uneven(drills: Drills) -> None:
    # Three workers (from three on the layout of DDP's buckets counts), three micro-batches, dropout, and 110 samples that fill
    # neither the last batch, nor the last round, nor the last window. The kills strike in the short window that ends the first
    # epoch (step 5), at the first step of the next, right after a restore, and inside the all-reduce of a first step.
    faults = (
        "{rank: 1, at_step: 5}, {rank: 2, at_step: 6}, {rank: 0, phase: restore.end}, {rank: 1, at_step: 9, phase: reduce}, "
        "{rank: 2, at_step: 12, phase: checkpoint.precommit}"
    )
    result = drills(3, 3, 3, "--samples", 110, "--dropout", 0.1, faults=faults)
    assert_exact(result.verdict)
    assert (len(result.verdict.faults), result.verdict.steps) == (5, 15)
    steps = [*reference(result.run).attempts[0].traces[0].steps.values()]
    assert [(step.epoch, step.batches, len(step.batch)) for step in steps[3:6]] == [(0, 12, 3), (0, 13, 1), (1, 3, 3)]
    assert {check.name: check.status for check in result.verdict.checks}["bucket_layout"] == "pass"


SHORT = ("--samples", 68, "--epochs", 2)
"""Eight windows of eight samples and one of four."""


@pytest.fixture(scope="module")
def two_by_two_by_two(drills: Drills) -> RunLayout:
    result = drills(2, 2, 2, *SHORT)
    assert_exact(result.verdict)
    return result.run


@pytest.mark.nightly
def test_the_short_window_at_the_end_of_an_epoch(drills: Drills, two_by_two_by_two: RunLayout) -> None:
    whole = drills(1, 8, 1, *SHORT)
    assert_exact(whole.verdict)
    found = differences({"1x8x1": whole.run, "2x2x2": two_by_two_by_two})["2x2x2"]
    assert found.within and found.steps == 18, found
    last = reference(two_by_two_by_two).attempts[0].traces[1].steps[9]
    assert (last.batches, len(last.batch), [len(ids) for ids in last.ids or () if ids is not None]) == (17, 1, [2])


@pytest.mark.nightly
def test_synchronisation_held_back_on_the_wrong_micro_batch(drills: Drills, two_by_two_by_two: RunLayout) -> None:
    # As a published listing has it: the last micro-batch's gradients stay on their rank, and the ranks go apart.
    wrong = drills(2, 2, 2, *SHORT, "--hold-back", "last")
    assert wrong.verdict.status == "FAIL"
    assert re.search(r"replicas drifted apart: reference: rank 1 .* after step 1 of attempt 1", wrong.verdict.cause)
    found = differences({"sound": two_by_two_by_two, "wrong": wrong.run})["wrong"]
    assert found.first_beyond == 2 and found.largest > 100 * ATOL


@pytest.mark.parametrize(("accumulation", "told"), [(1, "1, 0"), pytest.param(2, "2, 1", marks=pytest.mark.nightly)])
def test_ranks_with_different_numbers_of_batches(drills: Drills, accumulation: int, told: str) -> None:
    # A rank that has none at all says so too, or the others would wait for it.
    verdict = drills(2, 4, accumulation, "--samples", 16, "--uneven").verdict
    assert verdict.exit_code == 4
    assert f"the ranks have {told} micro-batches in the same window" in verdict.cause


@pytest.mark.nightly
def test_the_short_window_of_the_language_model(warm_drills: WarmDrills, tmp_path: Path) -> None:
    runs = {}
    for workers, batch_size, accumulation in [(1, 8, 1), (1, 4, 2), (2, 2, 2), (4, 1, 2)]:
        args = ["--batch-size", batch_size, "--accumulation", accumulation, "--documents", 92, "--seed", 1]
        result = warm_drills(
            CAUSAL_LM,
            root=tmp_path,
            overrides=[f"workers={workers}", f"args=[{', '.join(map(str, args))}]", "faults.schedule=[{rank: 0, at_step: 12}]"],
        )
        assert_exact(result.verdict)
        runs[f"{workers}x{batch_size}x{accumulation}"] = result.run
    found = differences(runs)
    assert all(entry.within and entry.steps == 24 for entry in found.values()), found
