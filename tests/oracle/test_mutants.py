"""The oracle is itself tested: every way in which a restart can go wrong is caught, and the right thing is blamed for it.

Real drills of `train.py`, all on one warm placement, compared with one reference. Each mutant runs blind, with the worker's
own comparison of what it restored taken out, so that nothing but the verdict can notice; those that the worker should have
noticed run with it, too. Caught means: FAIL, of that cause, at that step, on those ranks.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills
from tests.oracle.mutants import EVERY_STEPS, MUTANTS
from tests.oracle.score import Score

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "train.py"
STEPS = {2: 15, 3: 12}
"""By workers: 3 epochs of 5 or 4 steps. On each of 3 workers 7 batches, 2 of them a step, the last one alone."""
RESTORED = 2 * EVERY_STEPS
"""In the middle of the second epoch."""
KILLED = RESTORED + 1
RESUMED = RESTORED + 1
"""The first step after the restore."""
NEXT_SAVED = RESTORED + EVERY_STEPS
EVERYWHERE = (0, 1, 2)

JOB = """\
name: oracle
script: {script}
args: [{args}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: {every}}}
faults: {{schedule: [{{rank: 1, at_step: {killed}}}]}}
verify: {{confirm: false}}
timeout: 300s
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How the verdict must see a mutant."""

    cause: str
    kind: str
    tensor: str | None = None
    ranks: tuple[int, ...] = EVERYWHERE
    step: int = RESUMED
    hint: str = ""
    worker: str | None = None
    """The component and the value that the worker itself must name; None where what it restores is right, or not compared."""
    args: tuple[str, ...] = ()


def state(cause: str, kind: str, worker: str, tensor: str, *, ranks: tuple[int, ...] = EVERYWHERE, hint: str = "") -> Expected:
    return Expected(cause=cause, kind=kind, tensor=tensor, ranks=ranks, hint=hint, worker=f"{worker} .* '{re.escape(tensor)}'")


def data(cause: str, hint: str) -> Expected:
    return Expected(cause=cause, kind="data order", hint=hint)


RNG = "RNG not restored"
CONTENTS = Expected(cause="batch contents", kind="batch", hint="same samples have other contents")
MOMENTS = "optimizer state not restored"
FIRST = "0/state/0.bias/"

EXPECTED: dict[str, Expected] = {
    "rng-python": state(RNG, "rng", "rng", "python", hint="random stream of python"),
    "rng-numpy": state(RNG, "rng", "rng", "numpy", hint="random stream of numpy"),
    "rng-torch": state(RNG, "rng", "rng", "torch", hint="random stream of torch"),
    "rng-all": Expected(cause=RNG, kind="rng", tensor="python", hint="freshly seeded", worker="rng"),
    "rng-of-one-rank": Expected(cause=RNG, kind="rng", ranks=(1,), hint="ranks 0, 2 are as they should be", worker="rng"),
    "rng-swapped": Expected(cause="RNG of another rank", kind="rng", ranks=(0, 1), hint="what rank 1 holds", worker="rng"),
    "rng-of-rank-0": Expected(cause="RNG of another rank", kind="rng", ranks=(1, 2), hint="what rank 0 holds", worker="rng"),
    "evaluation-draws": Expected(cause="RNG drifted", kind="rng", step=RESUMED + 1, hint="random stream of numpy"),
    "early-draw": Expected(cause="RNG drifted", kind="rng", hint="random stream of torch"),
    "epoch-not-set": data("sampler epoch not set", "those of epoch 0 at the same place"),
    "epoch-ahead": data("sampler epoch ahead", "those of epoch 2 at the same place"),
    "skip-one-more": data("1 batch skipped", "off by 1"),
    "skip-one-less": data("1 batch repeated", "off by -1"),
    "skip-nothing": data("4 batches repeated", "already done were not skipped"),
    "data-seed": data("data order not restored", "no recorded step saw this batch"),
    "shares-swapped": Expected(cause="data of another rank", kind="data order", ranks=(0, 1), hint="rank 1's of step 7"),
    "sample-rng-seed": CONTENTS,
    "sample-rng-epoch": CONTENTS,
    "other-contents": CONTENTS,
    "hash-order": CONTENTS,
    "optimizer-empty": state(MOMENTS, "optimizer", "optimizer", FIRST + "exp_avg"),
    "optimizer-exp-avg": state(MOMENTS, "optimizer", "optimizer", FIRST + "exp_avg"),
    "optimizer-exp-avg-sq": state(MOMENTS, "optimizer", "optimizer", FIRST + "exp_avg_sq"),
    "optimizer-step-reset": state(MOMENTS, "optimizer", "optimizer", FIRST + "step"),
    "optimizer-step-off": state(MOMENTS, "optimizer", "optimizer", FIRST + "step"),
    "optimizer-swapped": state(
        "optimizer state under other names", "optimizer", "optimizer", "0/state/1.bias/exp_avg", hint="each other's names"
    ),
    "rate-overwritten": state("learning rate not restored", "learning rate", "optimizer", "0/param_groups/0/lr"),
    "decay-overwritten": state("optimizer settings not restored", "optimizer", "optimizer", "0/param_groups/0/weight_decay"),
    "scheduler-forgotten": state("LR scheduler not restored", "learning rate", "scheduler", "0/_last_lr/0"),
    "scheduler-ahead": state("LR scheduler not restored", "learning rate", "scheduler", "0/last_epoch"),
    "scaler": Expected(
        cause="GradScaler not restored", kind="optimizer", hint="loss scale", worker="optimizer .* 'scaler/", args=("--scaler",)
    ),
    "tensor-forgotten": state("weights not restored", "weights", "model", "6.bias", hint="loaded in part"),
    "bit-of-one-rank": state("weights not restored", "weights", "model", "0.weight", ranks=(1,)),
    "batchnorm-mean-of-one-rank": state("buffers not restored", "buffers", "buffers", "1.running_mean", ranks=(1,)),
    "batchnorm-count": state("buffers not restored", "buffers", "buffers", "1.num_batches_tracked"),
    "average-forgotten": state("registered state not restored", "registered", "registered", "average/0.bias"),
    "clip-forgotten": state("registered state not restored", "registered", "registered", "clip/mean"),
    "clip-on-rank-0-alone": state(
        "registered state not restored", "registered", "registered", "clip/mean", ranks=(1, 2), hint="rank 0 is as it should be"
    ),
    "stale-gradient": Expected(cause="gradient", kind="gradient", hint="stale ones were left"),
    "evaluation-mode": Expected(cause="forward pass", kind="loss", hint="another mode"),
    "late-optimizer": Expected(cause="optimizer update", kind="optimizer", hint="changed after the restore"),
    "late-rate": Expected(cause="learning rate", kind="learning rate", hint="no recorded step"),
    "late-weight": Expected(cause="forward pass", kind="loss", hint="changed after the restore", ranks=(1,)),
    "late-clip": Expected(cause="gradient", kind="gradient", hint="no checkpoint holds"),
    "late-buffer": Expected(cause="buffers drifted", kind="buffers", tensor="1.running_mean", ranks=(1,), step=NEXT_SAVED),
    "late-average": Expected(cause="registered state drifted", kind="registered", tensor="average/0.bias", step=NEXT_SAVED),
    "position-batch-off": Expected(cause="position not restored", kind="position", hint="resumed at epoch 1 batch 5"),
    "position-miscounted": Expected(cause="position not restored", kind="position", hint="resumed at epoch 1 batch 5"),
    "position-step-off": Expected(cause="position not restored", kind="position", hint="resumed from step 7 after restoring"),
    "position-epoch-off": Expected(cause="position not restored", kind="position", hint="resumed at epoch 0 batch 4"),
    "micro-step-off": data("accumulation window", "1 instead of 2 micro-batches"),
    "older-checkpoint": Expected(cause="another checkpoint restored", kind="position", hint="the state of step 3"),
    "older-state": Expected(cause="weights of another step", kind="weights", hint="after step 3", worker="model"),
    "mixed-checkpoint": Expected(
        cause="optimizer state of another step", kind="optimizer", hint="held after step 3", worker="optimizer"
    ),
    "unprimed": Expected(cause="gradient reduction (bucket layout)", kind="gradient", hint="not primed"),
}

WORKER_NOTICES = [name for name, expected in EXPECTED.items() if expected.worker is not None]


class Drills:
    """`drills(*args)`: the verdict on the script with these arguments, compared with the control's reference."""

    def __init__(self, folder: Path, warm: WarmDrills, workers: int) -> None:
        self._folder = folder
        self._warm = warm
        self._workers = workers
        self._references: dict[tuple[str, ...], str] = {}

    def __call__(self, mutation: tuple[str, ...], args: tuple[str, ...] = ()) -> Verdict:
        if args not in self._references:
            self._references[args] = str(self.control(args).run.path)
        return self._submit((*mutation, *args), reference=self._references[args]).verdict

    def control(self, args: tuple[str, ...] = ()) -> api.RunResult:
        """The script without a mutant passes, with nothing left out that can be compared."""
        result = self._submit(args)
        verdict = result.verdict
        assert verdict.status == "PASS", verdict.cause
        assert {check.name for check in verdict.checks if check.status != "pass"} == set()
        assert (verdict.steps, [attempt.resumed_step for attempt in verdict.attempts]) == (STEPS[self._workers], [0, RESTORED])
        return result

    def _submit(self, args: tuple[str, ...], reference: str = "auto") -> api.RunResult:
        job = self._folder / "job.yaml"
        words = ", ".join(args)
        job.write_text(JOB.format(script=SCRIPT, args=words, workers=self._workers, every=EVERY_STEPS, killed=KILLED))
        return self._warm(job, root=self._folder, reference=reference)


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("oracle"), warm_drills, workers=3)


@pytest.fixture(scope="module")
def drills_of_two(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("oracle-of-two"), warm_drills, workers=2)


def missed(verdict: Verdict, expected: Expected) -> str | None:
    """What the verdict does not say as it should; None when the mutant was caught with its cause."""
    found = verdict.divergence
    if (verdict.status, verdict.exit_code, verdict.outcome) != ("FAIL", 3, "completed"):
        return f"{verdict.status} {verdict.exit_code} ({verdict.outcome}): {verdict.cause}"
    if found is None:
        return f"no first difference: {verdict.cause}"
    for name in ("cause", "kind", "step", "ranks"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name} is {getattr(found, name)!r}, not {getattr(expected, name)!r}: {verdict.cause}; {verdict.hint}"
    if expected.tensor is not None and found.tensor != expected.tensor:
        return f"tensor is {found.tensor!r}, not {expected.tensor!r}: {verdict.cause}"
    if not verdict.cause.startswith(expected.cause) or expected.hint not in (verdict.hint or ""):
        return f"{expected.cause!r} or {expected.hint!r} is not said: {verdict.cause}; {verdict.hint}"
    return None


def missed_by_the_worker(verdict: Verdict, expected: Expected) -> str | None:
    """As `missed`, for the comparison that the worker makes before its first step."""
    if (verdict.status, verdict.exit_code, verdict.outcome) != ("FAIL", 3, "inexact_restore"):
        return f"{verdict.status} {verdict.exit_code} ({verdict.outcome}): {verdict.cause}"
    said = re.match(r"rank (\d): (.*)", verdict.cause)
    if said is None or int(said[1]) not in expected.ranks or not re.match(expected.worker or "", said[2]):
        return f"{expected.worker!r} of ranks {expected.ranks} is not named: {verdict.cause}"
    if verdict.attempts[-1].first_step is not None:
        return f"attempt {verdict.attempts[-1].attempt} made a step nevertheless: {verdict.cause}"
    return None


NIGHTLY = frozenset(
    [
        "batchnorm-count",
        "clip-forgotten",
        "clip-on-rank-0-alone",
        "decay-overwritten",
        "early-draw",
        "epoch-ahead",
        "evaluation-draws",
        "hash-order",
        "late-average",
        "late-clip",
        "late-optimizer",
        "late-rate",
        "late-weight",
        "older-state",
        "optimizer-empty",
        "optimizer-exp-avg-sq",
        "optimizer-step-off",
        "optimizer-step-reset",
        "other-contents",
        "position-batch-off",
        "position-epoch-off",
        "position-miscounted",
        "rng-numpy",
        "rng-of-one-rank",
        "rng-of-rank-0",
        "rng-python",
        "rng-torch",
        "sample-rng-epoch",
        "scheduler-ahead",
        "skip-nothing",
        "skip-one-less",
        "tensor-forgotten",
    ]
)
"""Each has a near relative that `make test` meets."""


def test_there_are_mutants_and_each_has_its_cause() -> None:
    assert EXPECTED.keys() == MUTANTS.keys()
    assert EXPECTED.keys() > NIGHTLY
    by_day = [expected for name, expected in EXPECTED.items() if name not in NIGHTLY]
    assert {expected.kind for expected in by_day} == {expected.kind for expected in EXPECTED.values()}
    assert len({expected.cause for expected in by_day}) >= 22
    assert len(WORKER_NOTICES) >= 12


@pytest.mark.parametrize("blind", [("--blind",), pytest.param((), marks=pytest.mark.nightly)])
def test_the_script_without_a_mutant_passes(drills: Drills, blind: tuple[str, ...]) -> None:
    drills.control(blind)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in EXPECTED]
)
def test_a_mutant_is_caught_with_its_cause(drills: Drills, score: Score, name: str) -> None:
    expected = EXPECTED[name]
    with score.of(name, "by the verdict") as outcome:
        outcome.missed = missed(drills(("--mutant", name, "--blind"), expected.args), expected)


def of_two(name: str) -> Expected:
    """On 2 workers other batches come at the same step, so hints name other places."""
    expected = EXPECTED[name]
    ranks = tuple(rank for rank in expected.ranks if rank < 2)
    cause = {"skip-nothing": "2 batches repeated"}.get(name, expected.cause)
    return replace(expected, ranks=ranks, cause=cause, hint="")


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXPECTED)
def test_a_mutant_on_two_workers_is_caught_with_its_cause(drills_of_two: Drills, score: Score, name: str) -> None:
    expected = of_two(name)
    with score.of(f"{name} on 2 workers", "by the verdict on 2 workers") as outcome:
        verdict = drills_of_two(("--mutant", name, "--blind"), expected.args)
        if name == "unprimed":
            # The sum of two has the same bits in either order: the layout alone tells.
            outcome.missed = None if verdict.status == "FAIL" and "another bucket layout" in verdict.cause else verdict.cause
        else:
            outcome.missed = missed(verdict, expected)


@pytest.mark.nightly
@pytest.mark.parametrize("name", WORKER_NOTICES)
def test_a_mutant_is_caught_before_a_step_is_made(drills: Drills, score: Score, name: str) -> None:
    expected = EXPECTED[name]
    with score.of(name, "by the worker") as outcome:
        outcome.missed = missed_by_the_worker(drills(("--mutant", name), expected.args), expected)


def test_every_mutant_was_caught(score: Score) -> None:
    assert score.survivors == []
