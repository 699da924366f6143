"""Scripts with checkpoints and a resume of their own: each way in which that can be wrong is caught, with its cause.

Real drills of `own_resume.py`, on one warm placement. What a restart does wrong it is told by `resume.args`, so that all are
compared with one reference; the right one passes bit for bit, at three ranks and with two kills.
"""

from dataclasses import dataclass
from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.errors import UsageError
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills
from tests.oracle.score import Score

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "own_resume.py"
STEPS, SAVED, KILLED = 15, 6, 8
"""Three epochs of five steps, a checkpoint every three; killed in the middle of the second epoch."""

JOB = """\
name: own
script: {script}
args: [{args}]
workers: 3
seed: 1
{more}
resume: {{by: script, args: [{restart}]}}
faults: {{schedule: [{{rank: 1, at_step: {killed}}}{second}]}}
verify: {{confirm: false}}
timeout: 300s
"""
SECOND = ", {rank: 2, at_step: 14}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How the verdict must see it."""

    code: str
    says: str
    whose: str = "yours"
    always: bool = False
    """What is wrong is wrong in every attempt, and in the reference, too: how it saves."""
    args: str = ""
    """Of a restart, besides."""


EXPECTED: dict[str, Expected] = {
    "optimizer": Expected(code="optimizer_state_not_restored", says="weights of step 6, the optimizer of step 0"),
    "rng": Expected(code="rng_not_restored", says="RNG of step 0"),
    "draws": Expected(code="rng_not_restored", says="RNG of no step"),
    "scheduler": Expected(code="lr_scheduler_not_restored", says="step 8, rank 0"),
    "weights": Expected(code="weights_not_restored", says="weights of step 0, the optimizer of step 6"),
    "weights-alone": Expected(code="optimizer_state_not_restored", says="the optimizer of step 0, the data of step 0"),
    "epoch": Expected(code="sampler_epoch_not_set", says="the data of step 1"),
    "skips": Expected(code="batches_skipped", says="the data of step 7"),
    "repeats": Expected(code="batches_repeated", says="the data of step 5"),
    "mixed": Expected(code="optimizer_state_of_another_step", says="weights of step 6, the optimizer of step 3"),
    "mixed-on-one-rank": Expected(code="optimizer_state_of_another_step", says="rank 1, attempt 2, which began with weights"),
    "older": Expected(code="checkpoint_passed_over", says="from step 3 and passed over the complete checkpoint of step 6"),
    "again": Expected(code="began_again", says="passed over that of step 6"),
    "raises": Expected(code="never_came_back", says="FileNotFoundError"),
    "ends": Expected(
        code="ended_at_another_step", says="ended at step 10 on rank 0, the reference at step 15", args="--epochs, '2'"
    ),
    "late": Expected(code="weights_of_another_step", says="weights of step 7, the optimizer of step 6", always=True),
}
NIGHTLY = EXPECTED.keys() - {"optimizer", "again", "raises"}


class Drills:
    """Of the script, compared with one undisturbed run as far as that is the same."""

    def __init__(self, folder: Path, warm: WarmDrills) -> None:
        self._folder = folder
        self._warm = warm
        self._reference: str | None = None

    def right(self) -> api.RunResult:
        return self._submit(second=SECOND)

    def unprimed(self) -> Verdict:
        return self._submit(more="prime_buckets: false").verdict

    def __call__(self, name: str, expected: Expected) -> Verdict:
        wrong = f"--wrong, {name}"
        if expected.always:
            return self._submit(args=wrong).verdict
        if self._reference is None:
            self._reference = str(self.right().run.path)
        restart = ", ".join(filter(None, (wrong, expected.args)))
        return self._submit(restart=restart, reference=self._reference).verdict

    def _submit(
        self, *, args: str = "", restart: str = "", second: str = "", more: str = "", reference: str = "auto"
    ) -> api.RunResult:
        job = self._folder / "job.yaml"
        job.write_text(JOB.format(script=SCRIPT, args=args, restart=restart, killed=KILLED, second=second, more=more))
        return self._warm(job, root=self._folder, reference=reference)


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("own"), warm_drills)


def test_the_right_one_passes_bit_for_bit(drills: Drills) -> None:
    verdict = drills.right().verdict
    assert (verdict.status, verdict.code, verdict.resume_by, verdict.steps) == ("PASS", "exact", "script", STEPS), verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, SAVED, 12]
    assert {check.name for check in verdict.checks if check.status != "pass"} == set()
    assert any("prime_buckets: false" in warning for warning in verdict.warnings)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in EXPECTED]
)
def test_what_is_wrong_with_its_resume_is_caught(drills: Drills, score: Score, name: str) -> None:
    expected = EXPECTED[name]
    with score.of(f"own resume: {name}", "by evidence") as outcome:
        verdict = drills(name, expected)
        seen = (verdict.status, verdict.code, verdict.blame.whose)
        said = expected.says in verdict.cause
        outcome.missed = None if said and seen == ("FAIL", expected.code, expected.whose) else f"{seen}: {verdict.cause}"


def test_one_that_saves_nothing_is_refused(drills: Drills) -> None:
    with pytest.raises(UsageError, match="nothing to resume from"):
        drills("never", Expected(code="", says="", always=True))


@pytest.mark.nightly
def test_the_raw_truth_of_three_ranks(drills: Drills) -> None:
    verdict = drills.unprimed()
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "bucket_layout", "library"), verdict.cause
