"""Scripts with checkpoints and a resume of their own: each way in which that can be wrong is caught, with its cause.

Real drills of `own_resume.py`, and of `own_state.py`, which keeps more, on warm placements. What a restart does wrong it is
told by `resume.args`, so that all are compared with one reference; the right one passes bit for bit, and with two kills.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from chaosrun import api
from chaosrun.errors import UsageError
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills
from tests.oracle.score import Score

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "own_resume.py"
KEEPER = SCRIPT.with_name("own_state.py")
LABELLED = SCRIPT.with_name("own_labels.py")
UNUSUAL = SCRIPT.with_name("own_ways.py")
PASSES = SCRIPT.with_name("own_passes.py")
PIPELINE = SCRIPT.with_name("own_pipeline.py")
GATHERED = SCRIPT.with_name("own_gathered.py")
STEPS, SAVED, KILLED = 15, 6, 8
"""Three epochs of five steps, a checkpoint every three; killed in the middle of the second epoch."""

JOB = """\
name: own
script: {script}
args: [{args}]
workers: {workers}
seed: 1
{more}
resume: {{by: script, args: [{restart}]}}
faults: {{schedule: [{{rank: 1, at_step: {killed}}}{second}]}}
verify: {{confirm: {confirm}}}
timeout: 300s
"""
SECOND = ", {rank: 2, at_step: 14}"
SECOND_OF_TWO = ", {rank: 0, at_step: 14}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """How the verdict must see it."""

    code: str
    says: str
    hints: str = ""
    whose: str = "yours"
    always: bool = False
    """What is wrong is wrong in every attempt, and in the reference, too: how it saves."""
    args: str = ""
    """Of a restart, besides."""
    script: Path = SCRIPT
    stream: bool = False
    killed: int = KILLED


def of_keeper(code: str, says: str, *, always: bool = False, stream: bool = False, killed: int = KILLED) -> Expected:
    return Expected(code=code, says=says, always=always, stream=stream, killed=killed, script=KEEPER)


EXPECTED: dict[str, Expected] = {
    "optimizer": Expected(code="optimizer_state_not_restored", says="weights of step 6, the optimizer of step 0"),
    "rng": Expected(code="rng_not_restored", says="RNG of step 0"),
    "seeds": Expected(code="rng_not_restored", says="RNG of step 0", hints="restored, and then seeded again at own_resume.py:"),
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
    "again-bytes": Expected(code="began_again", says="passed over that of step 6", always=True),
    "again-aside": Expected(code="began_again", says="passed over that of step 6", always=True),
    "raises": Expected(code="never_came_back", says="FileNotFoundError"),
    "ends": Expected(
        code="ended_at_another_step", says="ended at step 10 on rank 0, expected was step 15", args="--epochs, '2'"
    ),
    "late": Expected(code="weights_of_another_step", says="weights of step 7, the optimizer of step 6", always=True),
}
KEPT: dict[str, Expected] = {
    "buffers": of_keeper("buffers_not_restored", "step 9, rank 0, attempt 2, model/1.running_mean"),
    "renamed": of_keeper("weights_not_restored", "weights of no step, the optimizer of step 6"),
    "rounded": of_keeper("weights_not_restored", "RNG of step 6, 0.weight"),
    "moments-rounded": of_keeper("optimizer_state_not_restored", "weights of step 6, the optimizer of no step"),
    "second": of_keeper("optimizer_state_not_restored", "weights of step 6, the optimizer of no step"),
    "order": of_keeper("parameter_order", "parameter 3 is 5.bias"),
    "order-alike": of_keeper("parameter_order", "parameter 4 is 1.bias"),
    "settings": of_keeper("optimizer_settings_not_restored", "step 7, rank 0, attempt 2, 0.weight"),
    "betas": of_keeper("optimizer_settings_not_restored", "step 7, rank 0, attempt 2, 0.weight"),
    "scheduler-twice": of_keeper("lr_scheduler_of_another_step", "step 8, rank 0"),
    "scaler": of_keeper("grad_scaler_not_restored", "step 7, rank 0"),
    "scaler-count": of_keeper("grad_scaler_not_restored", "step 9, rank 0"),
    "average": of_keeper("kept_state_not_restored", "average/n_averaged"),
    "average-of-none": of_keeper("kept_state_not_restored", "average/n_averaged"),
    "average-unsaved": of_keeper("kept_state_not_restored", "the script's AveragedModel", always=True),
    "peak": of_keeper("kept_state_not_restored", "peak"),
    "step-off": of_keeper("kept_state_not_restored", "what decides when it is saved was not restored"),
    "torch-rng": of_keeper("rng_not_restored", "RNG of no step"),
    "numpy": of_keeper("rng_not_restored", "the data of no step"),
    "python": of_keeper("rng_not_restored", "the data of no step"),
    "streams-of-rank-0": of_keeper("rng_of_another_rank", "RNG of no step on rank 1"),
    "rng-of-rank-0": of_keeper("data_of_another_rank", "the data of no step on rank 1"),
    "generator": of_keeper("data_order_not_restored", "the data of no step"),
    "reseeded": of_keeper("data_order_not_restored", "the data of no step"),
    "one-rank": of_keeper("ranks_resume_apart", "rank 0 from step 6, rank 1 from step 3"),
    "text": of_keeper("checkpoint_passed_over", "from step 9 and passed over the complete checkpoint of step 12", killed=13),
    "keeps-by-text": of_keeper("newest_removed", "from step 9; that of step 12", always=True, killed=14),
    "window": of_keeper("accumulation_window", "step 6, rank 0, attempt 2", always=True),
    "buffer": of_keeper("ended_at_another_step", "first difference: batch at step 7", stream=True),
    "stream-draws": of_keeper("data_order_not_restored", "the data of no step", stream=True),
}
"""What a checkpoint has to hold beside weights, an optimizer and a schedule, and how it is chosen."""
NIGHTLY = {*EXPECTED, *KEPT} - {"optimizer", "again", "seeds"}


WAYS = {
    "anew": 10,
    "unfreezes": 10,
    "freezes": 10,
    "phases": 10,
    "phases-built": 10,
    "whole": 6,
    "held": 6,
    "warms-up": 6,
    "draws-anew": 10,
    "copies": 6,
    "shares": 6,
    "zero": 6,
    "on-notice": 10,
    "passes-first": 6,
    "measures-first": 6,
    "measures-due": 6,
    "local": 6,
    "local-own": 8,
    "experts": 6,
    "within-a-step": 6,
}
"""Ways to train and save that are right, and the step that a restart goes on from."""
PASSES_BY_DAY = ("given", "warms-by-hand", "then-closures", "acts")
PASSES_BY_NIGHT = (
    "built-late",  # by day integration/test_scripts.py has what is built after a pass or at the first step
    *("per-sample", "perturbs", "samples", "attacks", "measures", "full-batch", "by-turns"),
    *("given-by-turns", "loads-late"),
)
WAYS_BY_DAY = ("anew", "on-notice", "phases", "whole")
UNUSUAL_AND_WRONG = {
    "assigns": ("weights_not_restored", "tensors that no model has any more"),
    "phases-anew": ("optimizer_state_not_restored", "the optimizer started new, with the weights of step 10"),
    "clips-late": ("weights_not_restored", "they were saved before that"),
    "loses-gradients": ("accumulation_window", "without the gradients that each rank had accumulated before"),
    "experts-of-rank-0": ("weights_of_another_rank", "rank 1 restored what rank 0 holds"),
}


class Drills:
    """Of the script, compared with one undisturbed run as far as that is the same."""

    def __init__(self, folder: Path, warm: WarmDrills) -> None:
        self._folder = folder
        self._warm = warm
        self._references: dict[tuple[Path, bool], str] = {}

    def right(self, script: Path = SCRIPT, *, stream: bool = False) -> api.RunResult:
        result = self._submit(script, args="--stream" if stream else "", second=SECOND if script == SCRIPT else SECOND_OF_TWO)
        self._references.setdefault((script, stream), str(result.run.path))
        return result

    def unusual(self, way: str) -> Verdict:
        late = dict.fromkeys(("unfreezes", "freezes", "anew", "draws-anew", "phases", "phases-built", "phases-anew"), "13")
        at = {**late, "on-notice": "9, kind: preempt", "local-own": "10"}
        return self._submit(UNUSUAL, args=way, killed=at.get(way, KILLED)).verdict

    def passes(self, way: str) -> Verdict:
        return self._submit(PASSES, args=way, killed=13).verdict

    def pipeline(self) -> Verdict:
        return self._submit(PIPELINE).verdict

    def gathered(self, restart: str) -> Verdict:
        return self._submit(GATHERED, restart=restart).verdict

    def labelled(self, way: str) -> Verdict:
        return self._submit(LABELLED, args=way, killed=13).verdict

    def exporting(self, way: str) -> api.RunResult:
        return self._submit(UNUSUAL, args=way, confirm="1")

    def unprimed(self) -> Verdict:
        return self._submit(more="prime_buckets: false").verdict

    def __call__(self, name: str, expected: Expected) -> Verdict:
        wrong = f"--wrong, {name}"
        script, killed = expected.script, expected.killed
        if expected.always:
            return self._submit(script, args=wrong, killed=killed).verdict
        if (script, expected.stream) not in self._references:
            self.right(script, stream=expected.stream)
        reference = self._references[script, expected.stream]
        args, restart = "--stream" if expected.stream else "", ", ".join(filter(None, (wrong, expected.args)))
        return self._submit(script, args=args, restart=restart, killed=killed, reference=reference).verdict

    def _submit(
        self,
        script: Path = SCRIPT,
        *,
        args: str = "",
        restart: str = "",
        killed: int | str = KILLED,
        second: str = "",
        more: str = "",
        reference: str = "auto",
        confirm: str = "false",
    ) -> api.RunResult:
        job = self._folder / "job.yaml"
        told = {"args": args, "restart": restart, "killed": killed, "second": second, "more": more, "confirm": confirm}
        job.write_text(JOB.format(script=script, workers=3 if script == SCRIPT else 2, **told))
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


@pytest.mark.nightly
@pytest.mark.parametrize("stream", [False, True])
def test_the_right_one_that_keeps_more_passes(drills: Drills, *, stream: bool) -> None:
    verdict = drills.right(KEEPER, stream=stream).verdict
    assert (verdict.status, verdict.code, verdict.steps) == ("PASS", "exact", STEPS), verdict.cause


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.nightly) if name in NIGHTLY else name for name in (*EXPECTED, *KEPT)]
)
def test_what_is_wrong_with_its_resume_is_caught(drills: Drills, score: Score, name: str) -> None:
    expected = EXPECTED.get(name) or KEPT[name]
    with score.of(f"own resume: {name}", "by evidence") as outcome:
        verdict = drills(name, expected)
        seen = (verdict.status, verdict.code, verdict.blame.whose)
        said = expected.says in verdict.cause and expected.hints in f"{verdict.hint}"
        outcome.missed = (
            None if said and seen == ("FAIL", expected.code, expected.whose) else f"{seen}: {verdict.cause}; {verdict.hint}"
        )


@pytest.mark.nightly
def test_a_checkpoint_of_the_very_step_of_the_kill_counts(drills: Drills) -> None:
    older = EXPECTED["older"]
    verdict = drills("older", replace(older, killed=SAVED))
    assert (verdict.status, verdict.code) == ("FAIL", older.code) and older.says in verdict.cause, verdict.cause


@pytest.mark.parametrize("way", [pytest.param(way, marks=[pytest.mark.nightly] * (way not in WAYS_BY_DAY)) for way in WAYS])
def test_an_unusual_right_one_passes(drills: Drills, way: str) -> None:
    verdict = drills.unusual(way)
    assert (verdict.status, verdict.code) == ("PASS", "exact"), verdict.cause
    assert verdict.attempts[1].resumed_step == WAYS[way], verdict.attempts


def test_the_stages_of_a_pipeline_come_back(drills: Drills) -> None:
    verdict = drills.pipeline()
    assert (verdict.status, verdict.code, verdict.attempts[1].resumed_step) == ("PASS", "exact", 6), verdict.cause


def test_what_a_rank_lost_is_named_though_another_rank_saves_it(drills: Drills) -> None:
    assert drills.gathered("").status == "PASS"
    verdict = drills.gathered("lost")
    assert (verdict.status, verdict.code) == ("FAIL", "forward_pass") and "rank 1, attempt 2" in verdict.cause, verdict.cause
    assert "the script had counts/samples = 5 (reference: 35), which the restart did not restore" in (verdict.hint or "")


@pytest.mark.parametrize("way", [*PASSES_BY_DAY, *(pytest.param(way, marks=pytest.mark.nightly) for way in PASSES_BY_NIGHT)])
def test_unusual_gradients_and_passes_come_back(drills: Drills, way: str) -> None:
    verdict = drills.passes(way)
    assert (verdict.status, verdict.code) == ("PASS", "exact"), verdict.cause
    assert verdict.steps == STEPS and verdict.attempts[1].resumed_step == 10, verdict.attempts


@pytest.mark.nightly
def test_an_optimizer_whose_phase_is_over_may_be_lost_where_no_step_follows(drills: Drills) -> None:
    verdict = drills.passes("in-phases")
    assert (verdict.status, verdict.code) == ("PASS", "exact"), verdict.cause
    told = "the state of AdamW 2 of 2 was not restored (attempt 2), but no step depended on it"
    assert any(told in warning for warning in verdict.warnings), verdict.warnings
    for way in ("in-phases-and-back", "in-phases-saved"):
        verdict = drills.passes(way)
        assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "optimizer_state_not_restored", "yours"), way
        assert "the optimizer AdamW 2 of 2 started with another state" in (verdict.hint or ""), verdict.hint


@pytest.mark.nightly
def test_streams_that_a_pass_drew_from_before_a_save_are_missed_where_they_are_lost(drills: Drills) -> None:
    verdict = drills.passes("measures-wrongly")
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "rng_not_restored", "yours"), verdict.cause


def test_what_was_lost_is_named_where_a_step_goes_on_after_a_save(drills: Drills) -> None:
    verdict = drills.passes("acts-wrongly")
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "forward_pass", "yours"), verdict.cause
    told = "the script had acted = 1 (reference: 13), which the restart did not restore"
    assert told in (verdict.hint or ""), verdict.hint


@pytest.mark.nightly
def test_a_learning_rate_that_is_set_just_before_each_step_and_counts_anew_is_caught(drills: Drills) -> None:
    verdict = drills.passes("counts-anew")
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "lr_scheduler_not_restored", "yours"), verdict.cause


@pytest.mark.nightly
@pytest.mark.parametrize("way", UNUSUAL_AND_WRONG)
def test_an_unusual_wrong_one_is_caught(drills: Drills, way: str) -> None:
    verdict, (code, told) = drills.unusual(way), UNUSUAL_AND_WRONG[way]
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", code, "yours"), verdict.cause
    assert told in (verdict.hint or ""), verdict.hint


def test_what_is_saved_once_at_the_end_is_compared_where_it_repeats_itself(drills: Drills) -> None:
    """A second undisturbed leg shows which of it the restart has changed: an average that no checkpoint holds, not a clock."""
    result = drills.exporting("exports")
    verdict = result.verdict
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "kept_state_not_restored", "yours"), verdict.cause
    assert "average" in verdict.cause and "final.pt is saved after step 15" in (verdict.hint or "")
    second = result.run.leg("confirm")
    journal = second.journal
    second.attempt(1).trace(0).unlink()
    journal.write_text("".join(line for line in journal.open() if '"leg.finished"' not in line))
    assert api.verify(result.run).status == "FAIL", "a second leg that did not come to its end takes nothing back"
    verdict = drills.exporting("exports-saved").verdict
    assert (verdict.status, verdict.code, verdict.confirmed) == ("PASS", "exact", 1), verdict.cause


@pytest.mark.parametrize(
    "way", ["leaves-late", *(pytest.param(f"leaves-{way}", marks=pytest.mark.nightly) for way in ("pickle", "arrays", "file"))]
)
def test_what_a_script_leaves_in_whatever_file_is_compared(drills: Drills, way: str) -> None:
    verdict = drills.exporting(way).verdict
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "kept_state_not_restored", "yours"), verdict.cause
    assert "left.bin: average" in verdict.cause


@pytest.mark.nightly
def test_what_a_script_leaves_and_restores_passes(drills: Drills) -> None:
    verdict = drills.exporting("leaves-saved").verdict
    assert (verdict.status, verdict.code, verdict.confirmed) == ("PASS", "exact", 0), verdict.cause


@pytest.mark.nightly
@pytest.mark.parametrize(("labels", "said"), [("hashed", "FAIL"), ("sorted", "PASS")])
def test_a_restart_hashes_texts_otherwise(drills: Drills, labels: str, said: str) -> None:
    verdict = drills.labelled(labels)
    assert (verdict.status, verdict.attempts[1].resumed_step) == (said, 10), verdict.cause
    assert said == "PASS" or "depends on hash(), or on the order of a set at own_labels.py:14" in (verdict.hint or ""), (
        verdict.hint
    )
    assert any("another PYTHONHASHSEED, the last 2 (reference: 1): " in warning for warning in verdict.warnings)


def test_one_that_steps_without_an_optimizer_is_told_so(drills: Drills) -> None:
    verdict = drills.unusual("by-hand")
    said = "changes its weights by itself, or a library's own class of optimizer, makes none"
    assert verdict.code == "script_failed" and said in (verdict.hint or ""), verdict.cause


def test_one_that_saves_nothing_is_refused(drills: Drills) -> None:
    with pytest.raises(UsageError, match="nothing to resume from"):
        drills("never", Expected(code="", says="", always=True))


@pytest.mark.nightly
def test_the_raw_truth_of_three_ranks(drills: Drills) -> None:
    verdict = drills.unprimed()
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "bucket_layout", "library"), verdict.cause
