"""What a checkpoint holds beside model and optimizer is suspected where all else came back."""

from pathlib import Path

import pytest
from legs import Bugs, drop, edit_trace, only
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.verify.verdict import judge

HELD = {"m/block.weight": "1", "m/buffer": "1", "o/state/0/exp_avg": "1", "o/param_groups/0/lr": "1"}


@pytest.mark.parametrize("saved_again", ["otherwise", "alike", "never"])
def test_what_is_saved_beside_model_and_optimizer_is_suspected(tmp_path: Path, saved_again: str) -> None:
    run = write_script_run(tmp_path, bugs=Bugs(keep_buffers=False), kills=SCRIPT_KILLS[:1])
    beside = {"queue/rows": "1", "ptr": "4"}
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        other = saved_again != "alike" and (leg, attempt) == ("chaos", 2)
        held = {**HELD, **beside, **({"ptr": "0", "queue/rows": "2"} if other else {}), "clock": f"{leg}{attempt}"}
        tell = only("save", lambda line, held=held: {**line, "held": {} if line["done"] else held})  # type: ignore[misc]
        edit_trace(run, leg, attempt, 0, tell)
    if saved_again == "never":
        edit_trace(run, "chaos", 2, 0, only("save", drop))
    verdict = judge(run)
    assert (verdict.status, verdict.code, verdict.blame.whose) == ("FAIL", "forward_pass", "yours"), verdict.cause
    told = "beside model and optimizer ckpt-4/model.pt holds ptr, queue, ckpt-4/optimizer.pt holds ptr, queue, which"
    assert (told in f"{verdict.hint}") == (saved_again != "alike"), verdict.hint
