"""Replicas that drift apart, and epochs in one order: what a verdict says of jobs that recover exactly and train badly."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from legs import STEPS, TENSORS, Edit, edit_journal, edit_ranks, edit_trace, only, put
from script_legs import SCRIPT_KILLS, write_script_run

from chaosrun.records.history import Attempt
from chaosrun.records.layout import RunLayout
from chaosrun.verify import replicas
from chaosrun.verify.replicas import WeightMismatch
from chaosrun.verify.verdict import judge


def edit_all(run: RunLayout, edit: Edit) -> None:
    for leg in ("reference", "chaos"):
        for attempt in run.leg(leg).attempts():
            edit_ranks(run, leg, attempt, edit)


def test_equal_replicas_are_counted(run: RunLayout) -> None:
    agreement = next(check for check in judge(run).checks if check.name == "rank_agreement")
    assert agreement.summary == "3 ranks began 5 attempts with equal weights, and held equal weights after each step"
    assert agreement.evidence["starts"] == 5


def test_replicas_that_drift_undisturbed_fail_without_blame_on_recovery(run: RunLayout) -> None:
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 0, only("step", put(param="0" * 16), step=3))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.code) == ("FAIL", 3, "replicas_drift")
    assert (verdict.blame.whose, verdict.blame.part, verdict.blame.likely) == ("yours", "script", False)
    assert "find_unused_parameters=True" in (verdict.hint or "")
    # Ranks 1 and 2 agree: rank 0 is the one to look at.
    what = "rank 0 has other weights than rank 1 after step 3 of attempt 1"
    assert verdict.cause == f"replicas drifted apart: reference: {what} (in a fault-free run: recovery is not to blame)"


def test_learning_rates_that_differ_between_ranks_are_told_as_why_they_drift(run: RunLayout) -> None:
    """As where each rank gives ReduceLROnPlateau its own loss."""
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 0, only("step", put(param="0" * 16, lr=["0x1p-1"]), step=3))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "replicas_drift")
    assert "learning rates differ in that step (" in f"{verdict.hint}" and "0.5 on rank 0)" in f"{verdict.hint}", verdict.hint


def test_rates_that_differ_in_the_last_digits_are_told_apart(run: RunLayout) -> None:
    for rank, rate in ((0, 0.3), (1, 0.1 + 0.2), (2, 0.1 + 0.2)):
        for leg in ("reference", "chaos"):
            edit_trace(run, leg, 1, rank, only("step", put(param=f"{rank == 0:016x}", lr=[rate.hex()]), step=3))
    hint = f"{judge(run).hint}"
    assert "(0.30000000000000004 on rank 1, 0.3 on rank 0)" in hint, hint


def test_ranks_that_begin_with_other_weights_are_told_so(run: RunLayout) -> None:
    """As timm's average of the weights, which is copied before DDP hands out rank 0's."""
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 0, only("start", put(param="0" * 16)))
        edit_trace(run, leg, 1, 0, only("step", put(param="0" * 16)))
    verdict = judge(run)
    assert (verdict.status, verdict.code) == ("FAIL", "replicas_drift")
    assert "make it after DDP, or broadcast it" in f"{verdict.hint}" and "averages gradients" not in f"{verdict.hint}"


@pytest.mark.parametrize("under_ddp", [False, True])
def test_ranks_that_never_meet_again_are_right_without_ddp_where_each_resumes_itself(tmp_path: Path, under_ddp: bool) -> None:
    """As with gossip, where each rank averages with a neighbour."""
    run = write_script_run(tmp_path)
    if not under_ddp:
        edit_all(run, only("buckets", put(layout=None, primed=False)))

    def own(line: dict[str, Any], kinds: tuple[str, ...]) -> dict[str, Any]:
        if line["kind"] == "end":
            return {**line, "digests": {**line["digests"], "model": {"w": "1" * 16}}}
        return {**line, "param": line["param"][::-1]} if line["kind"] in kinds else line

    for leg in ("reference", "chaos"):
        for attempt in run.leg(leg).attempts():
            kinds = ("start", "step") if attempt > 1 else ("step",)
            edit_trace(run, leg, attempt, 1, partial(own, kinds=kinds))
    verdict = judge(run)
    assert verdict.code == ("replicas_drift" if under_ddp else "exact"), verdict.cause
    assert any("never equal again (right for gossip" in each for each in verdict.warnings) != under_ddp


def test_a_restore_that_makes_drifted_replicas_one_is_not_blamed(run: RunLayout) -> None:
    edit_trace(run, "chaos", 2, 0, only("step", put(param="0" * 16), step=6))
    assert judge(run).cause.startswith("optimizer")
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 0, only("step", put(param="0" * 16), step=3))
    verdict = judge(run)
    assert verdict.cause.startswith("replicas drifted apart")
    assert verdict.divergence is not None
    assert (verdict.divergence.cause, verdict.divergence.hint) == ("not shown to come from the restore", verdict.hint)


def test_a_script_that_failed_after_its_replicas_had_drifted(run: RunLayout) -> None:
    edit_journal(run, "reference", only("leg.finished", put(outcome="user_error", message="rank 0 raised", hint="see the log")))
    assert judge(run).cause == "reference leg: rank 0 raised"
    edit_trace(run, "reference", 1, 2, only("step", put(param="0" * 16), step=3))
    verdict = judge(run)
    assert (verdict.status, verdict.exit_code, verdict.code) == ("INCONCLUSIVE", 4, "replicas_drift")
    assert (verdict.blame.whose, verdict.blame.part) == ("yours", "script")
    what = "rank 2 has other weights than rank 0 after step 3 of attempt 1"
    assert verdict.cause == f"reference leg: the replicas had drifted apart ({what}) when rank 0 raised"


def test_a_shuffled_order_that_comes_again_is_warned_of(run: RunLayout) -> None:
    assert judge(run).warnings == ()
    edit_all(run, only("step", lambda line: {**line, "ids": [[29 * line["batches"] % 23, 7]] * len(line["ids"])}))
    warnings = [sentence for sentence in judge(run).warnings if "shuffled order" in sentence]
    assert len(warnings) == 1 and warnings[0].startswith("epochs 0 and 1 had their samples in the same shuffled order")


def test_a_sequential_order_that_comes_again_is_not(run: RunLayout) -> None:
    edit_all(run, only("step", lambda line: {**line, "ids": [[line["batches"]]] * len(line["ids"])}))
    assert not [sentence for sentence in judge(run).warnings if "shuffled order" in sentence]
    assert judge(run).steps == STEPS


def shard(run: RunLayout, groups: dict[int, str]) -> None:
    """Each rank holds the parts of tensors that `groups` names, and the last tensor whole."""
    for leg in ("reference", "chaos"):
        for attempt in run.leg(leg).attempts():
            for rank, part in groups.items():

                def sharded(line: dict[str, Any], part: str = part) -> dict[str, Any]:
                    names = [f"{name}[{part}]" for name in line["tensors"][:-1]]
                    return {**line, "sharded": True, "parts": True, "tensors": [*names, line["tensors"][-1]]}

                edit_trace(run, leg, attempt, rank, only("start", sharded))


def agreement(run: RunLayout) -> Any:
    return next(check for check in judge(run).checks if check.name == "rank_agreement")


def test_of_sharded_models_those_are_replicas_that_hold_the_same_part(run: RunLayout) -> None:
    shard(run, {0: "0:1", 1: "1:2", 2: "0:1"})
    assert agreement(run).status == "pass"
    # Rank 1 has nobody beside it: its digest of all it holds is its own.
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 1, only("step", put(param="0" * 16), step=3))
    assert agreement(run).status == "pass"
    for leg in ("reference", "chaos"):
        edit_trace(run, leg, 1, 2, only("step", put(param="0" * 16), step=3))
    found = agreement(run)
    assert (found.status, found.evidence["rank"], found.evidence["step"]) == ("fail", 2, 3)


def test_a_tensor_that_is_whole_on_every_rank_is_compared_between_shards(run: RunLayout) -> None:
    shard(run, {0: "0:1", 1: "1:2", 2: "2:3"})
    assert agreement(run).status == "pass"

    def other_last_word(line: dict[str, Any]) -> dict[str, Any]:
        words = line["params"]
        return {**line, "params": words[:-1] + ("0" if words[-1] != "0" else "1")}

    edit_trace(run, "chaos", 2, 1, only("start", other_last_word))
    found = agreement(run)
    assert (found.status, found.evidence["tensor"]) == ("fail", TENSORS[-1])


def test_a_rank_that_outlives_another_is_not_apart_from_it() -> None:
    traces = {rank: SimpleNamespace(steps=SimpleNamespace(last=last), end=None) for rank, last in ((0, 10), (1, 8))}
    parting = SimpleNamespace(step=5, values={0: "a", 1: "b"})
    assert replicas._end_of(cast(Attempt, SimpleNamespace(traces=traces)), cast(WeightMismatch, parting)) == (8, False)
    for trace in traces.values():
        trace.end = "an end"
    assert replicas._end_of(cast(Attempt, SimpleNamespace(traces=traces)), cast(WeightMismatch, parting)) == (10, True)


@pytest.mark.parametrize("layout", [[[2, 1], [0]], [[1, 2], [0]]], ids=["rebuilt", "as made, with find_unused_parameters"])
def test_buckets_that_ddp_leaves_as_they_are_were_not_primed(tmp_path: Path, layout: list[list[int]]) -> None:
    run = write_script_run(tmp_path, kills=SCRIPT_KILLS[:1])
    for leg, attempt in (("reference", 1), ("chaos", 1), ("chaos", 2)):
        edit_ranks(run, leg, attempt, only("buckets", put(layout=layout)))
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause
    assert ("gradient buckets were primed" in " ".join(verdict.warnings)) == (layout[0] == [2, 1])
