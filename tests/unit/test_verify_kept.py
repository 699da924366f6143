"""What a script's own checkpoints hold beside weights and optimizer: what of it is state, and whose."""

from pathlib import Path
from typing import Any

import pytest
from legs import Bugs, edit_trace, only
from script_legs import write_script_run

from chaosrun.records.traces import ALIVE
from chaosrun.verify.verdict import judge


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("start_step", "PASS"),
        ("meta/init_iter", "PASS"),
        ("session_steps", "PASS"),
        ("steps_since_start", "PASS"),
        ("init_from", "PASS"),
        ("num_updates", "FAIL"),  # those of an average, begun anew
        ("local_step", "FAIL"),  # since a round began
        ("window_start", "FAIL"),
        ("cycle/start_step", "FAIL"),
        ("last_sync", "FAIL"),
        ("phase", "FAIL"),
    ],
)
def test_where_a_process_began_is_no_state_and_what_it_counts_anew_is(tmp_path: Path, name: str, status: str) -> None:
    """By their values they are alike; what tells them apart is the name."""
    run = write_script_run(tmp_path)
    since, texts = name in ("session_steps", "steps_since_start", "num_updates", "local_step"), name in ("init_from", "phase")
    for leg, attempts in (("reference", (0,)), ("chaos", (0, 4, 8))):
        for number, start in enumerate(attempts, 1):

            def told(line: dict[str, Any], start: int = start) -> dict[str, Any]:
                value = ("ckpt" if start else "scratch") if texts else str(line["step"] - start if since else start)
                return {**line, "held": {**line["held"], name: value} if line.get("held") else {}}

            edit_trace(run, leg, number, 0, only("save", told))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
    assert status == "PASS" or name in verdict.cause
    (check,) = (check for check in verdict.checks if check.name == "own_checkpoints")
    assert (check.status, status == "FAIL") == ("fail" if status == "FAIL" else "pass", name in check.summary), check.summary


def test_a_name_alone_does_not_make_state_that_of_a_process(tmp_path: Path) -> None:
    run = write_script_run(tmp_path)
    for leg, attempts in (("reference", (3,)), ("chaos", (3, 8, 8))):  # of the last attempt it should be 9
        for number, value in enumerate(attempts, 1):
            edit = lambda line, value=value: {**line, "held": {"start_step": str(value)} if line.get("held") else {}}  # noqa: E731
            edit_trace(run, leg, number, 0, only("save", edit))
    assert judge(run).code == "kept_state_not_restored"


@pytest.mark.parametrize(
    ("name", "beside", "code"),
    [
        ("scale", "mean", "kept_state_not_restored"),
        ("scale", "_growth_tracker", "grad_scaler_not_restored"),
        ("last_epoch", "lines", "kept_state_not_restored"),
        ("last_epoch", "_last_lr", "lr_scheduler_not_restored"),
        ("last_epoch", "base_lrs/0", "lr_scheduler_not_restored"),
    ],
)
@pytest.mark.parametrize("folder", ["", "own/"])
def test_a_name_of_torchs_is_its_own_where_its_siblings_lie_beside_it(
    tmp_path: Path, folder: str, name: str, beside: str, code: str
) -> None:
    run = write_script_run(tmp_path)
    for leg, attempts in (("reference", (1,)), ("chaos", (1, 2, 3))):
        for attempt in attempts:

            def told(line: dict[str, Any], attempt: int = attempt) -> dict[str, Any]:
                own = {f"{folder}{beside}": "1", f"{folder}{name}": str(7.5 * attempt), "other/_growth_tracker": "1"}
                return {**line, "held": {**line["held"], **own, "other/base_lrs": "1"} if line.get("held") else {}}

            edit_trace(run, leg, attempt, 0, only("save", told))
    assert judge(run).code == code


@pytest.mark.parametrize(
    ("differs", "trained", "code"),
    [
        ("average", ("model",), "kept_state_not_restored"),
        ("model", ("model",), "buffers_not_restored"),
        ("model", (), "buffers_not_restored"),
    ],
)
def test_an_average_of_a_model_has_buffers_of_the_same_name(
    tmp_path: Path, differs: str, trained: tuple[str, ...], code: str
) -> None:
    run = write_script_run(tmp_path)
    for leg, attempts in (("reference", (1,)), ("chaos", (1, 2, 3))):
        for attempt in attempts:

            def told(line: dict[str, Any], lost: int = leg == "chaos" and attempt == 3) -> dict[str, Any]:
                added = {f"{each}/norm.mean": f"{lost and each == differs:016x}" for each in ("average", "model")}
                return {**line, "trained": trained, "held": {**line["held"], **added}} if line.get("held") else line

            edit_trace(run, leg, attempt, 0, only("save", told))
    assert judge(run).code == code


@pytest.mark.parametrize("earlier", [True, False], ids=["saved before the kill, too", "first saved after it"])
def test_a_restart_is_to_load_only_what_an_earlier_save_held(tmp_path: Path, earlier: bool) -> None:
    """An average that is exported at the end can be loaded from nowhere: it has to be in the checkpoints."""
    run = write_script_run(tmp_path)
    for leg, attempts in (("reference", (1,)), ("chaos", (1, 2, 3))):
        for attempt in attempts:

            def told(line: dict[str, Any], lost: int = leg == "chaos" and attempt == 3) -> dict[str, Any]:
                own = {"exported": f"{lost:016x}"} if earlier or line["step"] == 12 else {}
                return {**line, "held": {**line["held"], **own} if line.get("held") else {}}

            edit_trace(run, leg, attempt, 0, only("save", told))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "kept_state_not_restored"), verdict.cause
    assert ("a restart has to load it, too" in f"{verdict.hint}") == earlier, verdict.hint
    assert ("no earlier save held it" in f"{verdict.hint}", "state that no checkpoint holds" in verdict.blame.reason) == (
        not earlier,
    ) * 2


@pytest.mark.parametrize("earlier", [False, True])
def test_what_is_saved_otherwise_after_going_on_from_an_older_checkpoint_is_its_consequence(
    tmp_path: Path, earlier: bool
) -> None:
    """Of the third attempt, which went on from step 4 in the place of 8; what the second one saved is none."""
    run = write_script_run(tmp_path, bugs=Bugs(stale_checkpoint=True))
    edit = lambda line: {**line, "held": {**line["held"], "average": "0" * 16} if line.get("held") else {}}  # noqa: E731
    edit_trace(run, "chaos", 2 if earlier else 3, 0, only("save", edit))
    verdict = judge(run)
    code = "kept_state_not_restored" if earlier else "checkpoint_passed_over"
    assert (verdict.status, verdict.code) == ("FAIL", code), verdict.cause
    assert verdict.divergence is not None and (verdict.divergence.kind, verdict.divergence.code) == ("saved state", code)
    assert earlier or "passed over the complete checkpoint of step 8" in verdict.cause


@pytest.mark.parametrize(
    ("after_a_restart", "status"), [("a b c", "PASS"), ("b c", "FAIL"), ("b", "FAIL"), ("a", "PASS"), (None, "FAIL")]
)
def test_what_a_checkpoint_held_may_be_alive_beside_what_was_made_of_it(
    tmp_path: Path, after_a_restart: str | None, status: str
) -> None:
    run = write_script_run(tmp_path)
    for leg, number, alive in (("reference", 1, "a"), ("chaos", 1, "a"), ("chaos", 2, after_a_restart), ("chaos", 3, "a")):

        def told(line: dict[str, Any], alive: str | None = alive) -> dict[str, Any]:
            beside = {f"{ALIVE}Average": alive} if alive else {}
            return {**line, "held": {**line["held"], **beside} if line.get("held") else {}}

        edit_trace(run, leg, number, 0, only("save", told))
    verdict = judge(run)
    assert verdict.status == status, verdict.cause
