"""A count of batches to skip is off only where all that is seen is a shifted stretch of the reference's order."""

from pathlib import Path
from typing import Any

import pytest
from legs import BATCHES_PER_EPOCH, Bugs, edit_trace, only
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.records.layout import RunLayout
from chaosrun.verify.verdict import judge

BEGAN = 8
"""So many batches of the first epoch were done."""


def shuffle_from(run: RunLayout, step: int) -> None:
    """From this step on the batches are no recorded ones, as of a buffer that is filled anew."""

    def strange(line: dict[str, Any]) -> dict[str, Any]:
        return line if line["step"] < step else {**line, "batch": [f"{line['step']}-{number}" for number in (0, 1)]}

    for rank in range(3):
        edit_trace(run, "chaos", 2, rank, only("step", strange))


@pytest.mark.parametrize(
    ("off", "broken_from", "code", "says"),
    [
        (1, None, "batches_skipped", "the count of batches to skip on resume is off by 1"),
        (-2, None, "batches_repeated", "the count of batches to skip on resume is off by -2"),
        (BATCHES_PER_EPOCH - BEGAN, None, "batches_skipped", "the rest of the epoch before, 2 batches, was left out"),
        (-BEGAN, None, "batches_repeated", "8 batches repeated, as those already done were not skipped"),
        (-2, 6, "data_order_not_restored", "the batches begin as at step 4, and then are others"),
    ],
    ids=["skips one", "repeats two", "rest of the epoch", "the epoch again", "broken off"],
)
def test_what_was_seen_tells_whether_a_count_was_off(
    tmp_path: Path, off: int, broken_from: int | None, code: str, says: str
) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(skip_off=off, with_ids=False), kills=SCRIPT_KILLS[:1])
    if broken_from:
        shuffle_from(run, broken_from)
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert says in f"{verdict.hint}"
    assert ("count of batches" in says) == ("count of batches" in f"{verdict.hint}")
