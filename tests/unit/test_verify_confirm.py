"""The second undisturbed run: when it is wanted, and what it clears or blames."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, drop, edit_journal, edit_ranks, edit_trace, only, put, write_run

from chaosrun.errors import UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.report.facts import read_facts
from chaosrun.report.next_commands import next_commands
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.drill import has_ended
from chaosrun.verify.confirm import fault_free_difference, worth_confirming
from chaosrun.verify.verdict import judge

SPEC = JobSpec.model_validate({"name": "toy", "script": "train.py", "workers": 3})


def confirm(run: RunLayout) -> str | None:
    found = fault_free_difference(run.leg("reference"), run.leg("confirm"), SPEC)
    return found and f"{found[1]}: {found[0]}"


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    """A run with a second undisturbed leg, equal to the first."""
    run = write_run(tmp_path)
    shutil.copytree(run.leg("reference").path, run.leg("confirm").path)
    return run


def test_two_equal_undisturbed_legs_clear_the_job(run: RunLayout) -> None:
    assert confirm(run) is None


def test_unprimed_buckets_are_not_called_irreproducible(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(primed=False))
    shutil.copytree(run.leg("reference").path, run.leg("confirm").path)
    assert judge(run).status == "FAIL"
    assert confirm(run) is None


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (only("step", put(grad="0" * 16), step=9), "gradient: gradient at step 9, rank 1"),
        (only("step", drop, step=9), "lineage: rank 1 lacks step 9"),
        (only("step", put(rng=None), step=9), "records: "),
        (only("end", drop), "completed: the confirm leg has no end record of rank 1"),
        (only("end", put(position={"epoch": 0, "batches": 0, "step": 12})), "final_position"),
    ],
)
def test_a_difference_is_named(run: RunLayout, edit: Any, words: str) -> None:
    edit_trace(run, "confirm", 1, 1, edit)
    difference = confirm(run)
    assert difference is not None and words in difference


def test_confirming_is_for_differences_between_complete_legs(tmp_path: Path, run: RunLayout) -> None:
    assert not worth_confirming(judge(run))
    assert worth_confirming(judge(write_run(tmp_path / "inexact", bugs=Bugs(keep_rng=False), reference_bugs=Bugs())))
    assert worth_confirming(judge(write_run(tmp_path / "random", bugs=Bugs(random_script=True))))
    edit_journal(run, "chaos", only("leg.finished", put(outcome="user_error")))
    assert not worth_confirming(judge(run))


def test_a_difference_says_how_often_the_job_repeated_itself(tmp_path: Path) -> None:
    inexact = Bugs(keep_rng=False)
    for confirmed, told in ((0, ""), (1, "; without faults, the job repeats itself: 2 of 2"), (3, ": 4 of 4")):
        run = write_run(tmp_path / str(confirmed), bugs=inexact, reference_bugs=Bugs(), confirmed=confirmed)
        reason = judge(run).blame.reason
        assert reason.endswith(told) and ("repeats itself" in reason) == bool(told)
    assert "repeats itself" not in judge(write_run(tmp_path / "sound", confirmed=1)).blame.reason
    with pytest.raises(UsageError, match=r"run\.json is damaged: .*confirmed"):
        judge(write_run(tmp_path / "damaged", confirmed="often"))


def test_a_missing_confirming_run_is_told_and_resumed(tmp_path: Path) -> None:
    """As after Ctrl-C in it, or without a place for it: a FAIL whose premise nobody has looked at."""
    run = write_run(tmp_path, bugs=Bugs(keep_rng=False), reference_bugs=Bugs())

    def told() -> tuple[list[str], list[str], bool]:
        verdict = judge(run)
        assert verdict.status == "FAIL"
        commands = next_commands(verdict, run, read_facts(run), None)
        warnings = [each.split("(verify.confirm) ")[1] for each in verdict.warnings if each.startswith("not confirmed")]
        return warnings, [each.label for each in commands if each.label == "resume"], has_ended(run)

    assert told() == (["has not begun"], ["resume"], False)
    run.verdict_json.write_text(json.dumps(judge(run).to_json()))
    shutil.copytree(run.leg("reference").path, run.leg("confirm").path)
    assert told() == ([], [], True)
    for outcome, how, can_go_on in (
        ("resources", "ended: resources", True),
        ("interrupted", "was interrupted", True),
        ("user_error", "ended: user error", False),
    ):
        edit_journal(run, "confirm", only("leg.finished", put(outcome=outcome)))
        assert told() == ([how], ["resume"] * can_go_on, not can_go_on)
    run.run_json.write_text(json.dumps({**json.loads(run.run_json.read_text()), "confirmed": 1}))
    assert told()[:2] == ([], [])


def test_of_two_restores_of_one_checkpoint_one_that_agrees_decides(tmp_path: Path) -> None:
    """Attempts 3 and 4 go on from step 8: the job does not repeat itself where only one of them differs."""
    run = write_run(tmp_path / "one", bugs=Bugs(), reference_bugs=Bugs())
    edit_ranks(run, "chaos", 3, only("step", put(loss=[(9.5).hex()] * 2), step=10))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("INCONCLUSIVE", "job_not_repeatable")
    assert (
        "from step-00000008, loss differs from the reference at step 10 rank 0 attempt 3, but not in attempt 4" in verdict.cause
    )
    assert verdict.blame.part == "script"
    # The control: every restore differs, and a lone one has nothing to be compared with.
    edit_ranks(run, "chaos", 4, only("step", put(loss=[(9.75).hex()] * 2), step=10))
    assert judge(run).status == "FAIL"
    alone = write_run(tmp_path / "alone", bugs=Bugs(), reference_bugs=Bugs())
    edit_trace(alone, "chaos", 2, 0, only("step", put(loss=[(9.5).hex()] * 2), step=6))
    assert judge(alone).status == "FAIL"


def test_a_restore_found_inexact_is_asked_for_its_premise(tmp_path: Path) -> None:
    """A job that differs before any fault cannot have its restore blamed, whatever the restore found."""
    for name, bugs, status in (("random", Bugs(random_script=True), "INCONCLUSIVE"), ("sound", Bugs(), "FAIL")):
        run = write_run(tmp_path / name, bugs=bugs)
        edit_journal(run, "chaos", only("leg.finished", put(outcome="inexact_restore", message="rank 0: optimizer is not")))
        verdict = judge(run)
        assert (verdict.status, verdict.code) == (
            ("INCONCLUSIVE", "job_not_repeatable") if status == "INCONCLUSIVE" else ("FAIL", "state_changed_on_load")
        )
        assert worth_confirming(verdict) == (status == "INCONCLUSIVE")


def test_an_undisturbed_leg_with_another_parameter_order_is_named_so(run: RunLayout) -> None:
    edit_trace(run, "confirm", 1, 1, only("start", put(tensors=["block.weight", "embed.weight", "head.bias"], param="0" * 16)))
    difference = confirm(run)
    assert difference is not None and difference.startswith("None: the script's parameter order: parameter 0 is block.weight")
