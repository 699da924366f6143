"""State that no digest holds must not yield an early PASS over a run that fails as a whole.

Real drills of `hidden.py`, which counts its steps in some place that no checkpoint holds, and reads the count once, after
the early verdict would have been given. The job is said to repeat itself, as it does undisturbed. Early or to the end: no PASS.
"""

from pathlib import Path

import pytest

from chaosrun.api import RunResult
from chaosrun.campaign.results import surprises
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.spec.suite import Expectation
from chaosrun.supervise.early_end import has_repeated
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills
from tests.oracle.hidden import LATE, WHERE

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "hidden.py"
SETTLES, STEPS = 6, 24
"""By workers of two ranks with 8 batches an epoch each."""
JOB = """\
name: hidden
script: {script}
args: [{args}]
workers: 2
seed: 1
checkpoint: {{every_steps: 3}}
faults: {{schedule: [{{rank: 1, at_step: 4}}]}}
verify: {{confirm: false}}
timeout: 300s
"""
BY_DAY = frozenset({"closure"})
"""A file is met by day in test_where_it_begins."""


class Drills:
    """`drills(where)`: the verdict to the end, and the early one, on the same reference."""

    def __init__(self, folder: Path, warm: WarmDrills) -> None:
        self._folder, self._warm = folder, warm

    def __call__(self, where: str) -> tuple[Verdict, Verdict, RunLayout]:
        whole = self.whole(where)
        early = self.early(whole.run, where)
        return whole.verdict, early.verdict, early.run

    def whole(self, where: str, *args: str) -> RunResult:
        whole = self._warm(self._job(where, args), root=self._folder, early="watch")
        reference = whole.run.leg("reference")
        if not reference.repeats.exists():
            has_repeated(reference, whole.run.run_id)
        return whole

    def early(self, whole: RunLayout, where: str, *args: str, on_difference: str = "stop") -> RunResult:
        job, overrides = self._job(where, args), [f"verify.on_difference={on_difference}"]
        return self._warm(job, root=self._folder, overrides=overrides, reference=str(whole.path), early="always")

    def _job(self, where: str, args: tuple[str, ...]) -> Path:
        job = self._folder / f"{where}.yaml"
        job.write_text(JOB.format(script=SCRIPT, args=", ".join(["--hides", where, *args])))
        return job


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("hidden"), warm_drills)


def test_a_training_that_hides_nothing_settles(drills: Drills) -> None:
    whole, early, run = drills("nothing")
    assert (whole.status, whole.code, whole.steps) == ("PASS", "exact", STEPS), whole.cause
    assert (early.status, early.code, early.steps, early.outcome) == ("PASS", "settled", SETTLES, "settled"), early.cause
    assert early.settled == f"settled at step {SETTLES} of {STEPS}: complete state equal"
    chaos = read_leg(run.leg("chaos"))
    assert {trace.steps.last for trace in chaos.traces if trace.attempt == 2} == {SETTLES}


def test_a_difference_ends_the_leg_one_checkpoint_later(drills: Drills) -> None:
    whole = drills.whole("nothing", "--spoils", "weights")
    stopped, gone_on = (drills.early(whole.run, "nothing", "--spoils", "weights", on_difference=do) for do in ("stop", "go_on"))
    assert [(each.verdict.outcome, each.verdict.steps) for each in (whole, stopped, gone_on)] == [
        ("completed", STEPS),
        ("differed", SETTLES + 3),
        ("completed", STEPS),
    ]
    for verdict in (whole.verdict, stopped.verdict, gone_on.verdict):
        assert (verdict.status, verdict.cause, verdict.divergence) == ("FAIL", whole.verdict.cause, whole.verdict.divergence)
        assert verdict.divergence and verdict.divergence.step == 4


def test_what_differs_and_comes_back_is_no_pass(drills: Drills) -> None:
    """At the first checkpoint after the restart it is another one, at all later ones the reference's: a step between may have
    read it, and where that shows later."""
    whole = drills.whole("nothing", "--spoils", "passing")
    early = drills.early(whole.run, "nothing", "--spoils", "passing").verdict
    assert (early.status, early.outcome, early.steps) == ("FAIL", "completed", STEPS), early.cause
    assert early.divergence == whole.verdict.divergence and early.divergence and early.divergence.step == SETTLES


def test_the_control_names_what_no_early_verdict_sees(drills: Drills) -> None:
    """The negative control of the control: a count in memory of native code, which docs/exactness.md says is not seen."""
    whole, early, _ = drills("native code")
    assert (early.status, early.code) == ("PASS", "settled"), "if it is seen by now, the control needs another secret"
    assert (whole.status, whole.code, whole.blame.whose) == ("FAIL", "settled_too_early", "chaosrun"), whole.cause
    for expected in (Expectation(verdict="PASS"), Expectation(verdict="FAIL")):
        assert "at step 6 all that chaosrun digests was equal, and yet: " in " ".join(surprises(expected, whole))


@pytest.mark.parametrize(
    "where", [where if where in BY_DAY else pytest.param(where, marks=pytest.mark.nightly) for where in WHERE]
)
def test_what_no_digest_holds_yields_no_early_pass(drills: Drills, where: str) -> None:
    whole, early, _ = drills(where)
    if where == "workers":  # nothing was hidden there, and nobody could have told
        assert (whole.status, early.status, early.outcome) == ("PASS", "PASS", "completed"), early.cause
        return
    assert (whole.status, whole.divergence and whole.divergence.step) == ("FAIL", LATE), whole.cause
    assert whole.code != "settled_too_early", whole.cause
    assert early.status == "FAIL" and early.outcome in ("completed", "differed"), early.cause
