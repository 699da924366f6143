"""A step of other micro-batches is another window only where its backward passes are others, too."""

from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, edit_ranks, edit_trace, only
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.verify.verdict import Verdict, judge


def told(root: Path, *, passes: bool) -> Verdict:
    """Of a run whose second attempt begins with the first micro-batch of a step alone; `passes`: of two forward passes to each
    backward pass."""
    run = write_script_run(root, kills=SCRIPT_KILLS[:1])

    def together(line: dict[str, Any]) -> dict[str, Any]:
        return {**line, "loss": line["loss"][:1]}

    def lost(line: dict[str, Any]) -> dict[str, Any]:
        cut = {name: line[name][:1] for name in ("batch", "ids", "loss")}
        return {**line, **cut, "grad": "1" * 16, "param": "2" * 16}

    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        for rank in range(3) if passes else ():
            edit_trace(run, leg, attempt, rank, only("step", together))
    edit_ranks(run, "chaos", 2, only("step", lost, step=5))
    return judge(run)


@pytest.mark.parametrize(("passes", "code"), [(True, "forward_pass"), (False, "accumulation_window")])
def test_a_batch_that_goes_through_the_model_besides_is_no_window(tmp_path: Path, passes: bool, code: str) -> None:
    verdict = told(tmp_path, passes=passes)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", code, "yours"), verdict.cause
    assert ("1 forward passes instead of 2" in f"{verdict.hint}") == passes, verdict.hint


@pytest.mark.parametrize("last", [True, False])
def test_the_last_batches_of_a_window_alone_are_those_after_a_save_within_it(tmp_path: Path, last: bool) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])

    def cut(line: dict[str, Any]) -> dict[str, Any]:
        part = slice(-1, None) if last else slice(1)
        held = {name: line[name][part] for name in ("batch", "ids", "loss")}
        return {**line, **held, "grad": "1" * 16, "param": "2" * 16}

    edit_ranks(run, "chaos", 2, only("step", cut, step=5))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "accumulation_window"), verdict.cause
    assert ("without the gradients" in f"{verdict.hint}") == last, verdict.hint


@pytest.mark.parametrize(("skipped", "within"), [(1, True), (2, False)])
def test_a_skip_of_less_than_a_window_may_be_a_place_within_it(tmp_path: Path, skipped: int, within: bool) -> None:
    verdict = judge(write_script_run(tmp_path, kills=SCRIPT_KILLS[:1], bugs=Bugs(skip_off=skipped)))
    assert (verdict.status, verdict.code) == ("FAIL", "batches_skipped"), verdict.cause
    assert ("began with number 2 of these 2" in f"{verdict.hint}") == within, verdict.hint
