"""Augmentation in `__getitem__`, killed within an epoch: exact where its draws are keyed on the sample, named where not."""

from collections.abc import Callable
from pathlib import Path

import pytest

from chaosrun.api import RunResult
from chaosrun.records.history import read_leg
from tests.conftest import WarmDrills, job_file

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "randomness" / "train.py"
STEPS = 15
"""3 epochs of 5 batches on each of 2 workers. Killed in the middle of the second and the third epoch, past a checkpoint."""
JOB = """\
name: randomness
script: {script}
args: [{args}]
workers: 2
seed: 1
deterministic: {deterministic}
checkpoint: {{every_steps: 2}}
faults: {{schedule: [{{rank: 1, at_step: 7}}, {{rank: 0, at_step: 13}}]}}
verify: {{confirm: false}}
timeout: 300s
"""
Drill = Callable[..., RunResult]

LOADERS = {
    0: ([], ["--loader-workers 1 --persistent --prefetch 4"], ["--loader-workers 3"]),
    "few": ([], ["--loader-workers 2 --persistent --prefetch 4"]),
    1: ([], ["--loader-workers 1"], ["--loader-workers 3 --persistent --prefetch 4"]),
}
EVERY_LOADER = [
    f"--loader-workers {workers}{persistent} --prefetch {prefetch}"
    for workers in (1, 3)
    for persistent in ("", " --persistent")
    for prefetch in (1, 4)
]


@pytest.fixture
def drill(warm_drills: WarmDrills, tmp_path: Path) -> Drill:
    def run(*args: str, deterministic: str = "strict") -> RunResult:
        words = [word for arg in args for word in arg.split()]
        text = JOB.format(script=SCRIPT, args=", ".join(words), deterministic=deterministic)
        return warm_drills(job_file(text, tmp_path), root=tmp_path / "root")

    return run


def batches(result: RunResult) -> list[list[tuple[str, ...]]]:
    """Digests of the reference's batches, by rank and step."""
    (attempt,) = read_leg(result.run.leg("reference")).attempts
    return [[step.batch for step in trace.steps.values()] for _, trace in sorted(attempt.traces.items())]


def assert_exact(result: RunResult) -> None:
    verdict = result.verdict
    assert verdict.status == "PASS", verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 6, 12]
    assert verdict.warnings == ()
    traces = read_leg(result.run.leg("chaos")).attempts[0].traces
    assert [trace.probe.items if trace.probe else None for _, trace in sorted(traces.items())] == ["independent", None]


@pytest.mark.parametrize(
    ("augment", "loaders"),
    [
        ("sample_rng", LOADERS["few"]),
        pytest.param("sample_rng", LOADERS[0], marks=pytest.mark.nightly),
        pytest.param("reproducible", LOADERS[1], marks=pytest.mark.nightly),
    ],
)
def test_samples_that_are_keyed_come_back_whatever_loads_them(
    drill: Drill, augment: str, loaders: tuple[list[str], ...]
) -> None:
    seen = []
    for loader in loaders:
        result = drill(f"--augment {augment}", *loader)
        assert_exact(result)
        seen.append(batches(result))
    assert [len(steps) for steps in seen[0]] == [STEPS, STEPS]
    # Not only like themselves after a restart: the same bytes from any number of loader workers, persistent or not.
    assert len(seen) >= 2 and all(each == seen[0] for each in seen)
    # And augmented: an epoch is no repetition of another.
    assert len({digest for steps in seen[0] for step in steps for digest in step}) == 2 * STEPS


@pytest.mark.nightly
@pytest.mark.parametrize("loader", EVERY_LOADER)
@pytest.mark.parametrize("augment", ["sample_rng", "reproducible"])
def test_every_loader(drill: Drill, augment: str, loader: str) -> None:
    assert_exact(drill(f"--augment {augment}", loader))


@pytest.mark.parametrize(
    ("args", "seen"),
    [
        # Without loader workers the loader has drawn ahead (R5), with them their streams are in no checkpoint (R6).
        pytest.param("--augment global", "depends on the global RNG (python and numpy and torch)", id="R5"),
        pytest.param("--augment global --loader-workers 2", "depends on the global RNG", id="R6", marks=pytest.mark.nightly),
        pytest.param("--augment own", "differs from one fetch to the next", id="R4", marks=pytest.mark.nightly),
    ],
)
def test_samples_that_cannot_come_back_are_named_before_and_after(drill: Drill, args: str, seen: str) -> None:
    verdict = drill(args).verdict
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3), verdict.cause
    assert verdict.divergence is not None
    # The first step after the restore, on both ranks, and nothing before it.
    assert (verdict.divergence.kind, verdict.divergence.cause) == ("batch", "batch contents")
    assert (verdict.divergence.step, verdict.divergence.attempt, verdict.divergence.ranks) == (7, 2, (0, 1))
    assert seen in verdict.divergence.hint
    assert "chaosrun.sample_rng(index)" in verdict.divergence.hint
    (warning,) = verdict.warnings
    assert seen in warning


def test_loader_workers_that_draw_the_same_numbers_are_reported(drill: Drill) -> None:
    result = drill("--loader-workers 2 --alike")
    # The samples of this script do not draw from numpy's global stream: no question of exactness.
    assert result.verdict.status == "PASS", result.verdict.cause
    (warning,) = result.verdict.warnings
    assert warning.startswith("loader workers 0 and 1 of rank 0 draw the same numpy numbers")
    assert "worker_init_fn" in warning


def test_an_operation_without_a_deterministic_implementation_is_an_error_that_names_it(drill: Drill) -> None:
    result = drill("--scatter")
    verdict = result.verdict
    assert (verdict.status, verdict.exit_code, verdict.outcome) == ("INCONCLUSIVE", 4, "user_error")
    assert "put_ has no deterministic implementation" in verdict.cause
    assert "deterministic: strict" in verdict.cause
    assert verdict.hint is not None and "deterministic: warn" in verdict.hint
    # Tried once more, as with any error of a script, and no more.
    assert len(read_leg(result.run.leg("reference")).attempts) == 2


@pytest.mark.parametrize(("deterministic", "warned"), [("warn", True), pytest.param("off", False, marks=pytest.mark.nightly)])
def test_such_an_operation_runs_where_the_job_allows_it(drill: Drill, deterministic: str, warned: bool) -> None:
    result = drill("--scatter", deterministic=deterministic)
    assert result.verdict.status == "PASS", result.verdict.cause
    log = result.run.leg("reference").attempt(1).log(0).read_text()
    assert ("put_ does not have a deterministic implementation" in log) == warned
    environment = read_leg(result.run.leg("reference")).environment
    assert environment is not None and environment["deterministic"] == deterministic
