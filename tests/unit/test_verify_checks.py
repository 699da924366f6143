"""Every check passes on an exact run, and has a negative control: the thing broken, and the check that sees it."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from legs import KILLS, Bugs, drop, edit_journal, edit_ranks, edit_trace, only, put, write_run

from chaosrun.errors import ResourcesError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.records.codec import changed, convert
from chaosrun.records.events import JournalEvent
from chaosrun.records.history import read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.spec.model import JobSpec
from chaosrun.verify import premises
from chaosrun.verify.check import CheckResult, Drill, passed
from chaosrun.verify.checks import CHECKS, PREMISES, REQUIRED, run_checks
from chaosrun.verify.early_end import EARLY, up_to
from chaosrun.verify.verdict import Verdict, judge_drill
from tests.records import read_lines, write_lines

Break = Callable[[RunLayout], None]


def load(run: RunLayout) -> Drill:
    plan = FaultPlan.from_json(json.loads(run.plan_json.read_bytes()))
    spec = JobSpec.model_validate(json.loads(run.run_json.read_bytes())["spec"])
    drill = Drill.of(read_leg(run.leg("reference")), read_leg(run.leg("chaos")), spec, plan)
    return up_to(drill, 8) if drill.chaos.outcome in EARLY else drill


def checks_of(run: RunLayout) -> dict[str, CheckResult]:
    return {check.name: check for check in run_checks(load(run))}


def test_all_pass_on_an_exact_run(run: RunLayout) -> None:
    checks = run_checks(load(run))
    assert [check.name for check in checks] == [function.__name__ for function in CHECKS]
    assert [(check.name, check.status) for check in checks if check.status != "pass"] == []
    json.dumps([check.to_json() for check in checks], allow_nan=False)


def test_premises_and_required_name_checks() -> None:
    names = {function.__name__ for function in CHECKS}
    assert names >= PREMISES | REQUIRED


def trace(leg: str, attempt: int, edit: Any, ranks: tuple[int, ...] = (1,)) -> Break:
    def broken(run: RunLayout) -> None:
        for rank in ranks:
            edit_trace(run, leg, attempt, rank, edit)

    return broken


def journal(leg: str, edit: Any) -> Break:
    return lambda run: edit_journal(run, leg, edit)


def digests(group: str, change: dict[str, str] | None, *, keep: bool = True, kind: str = "end") -> Any:
    def edit(line: dict[str, Any]) -> dict[str, Any]:
        kept = line["digests"][group] if keep else {}
        return {**line, "digests": {**line["digests"], group: {**kept, **(change or {})}}}

    return only(kind, edit)


def forget_states(run: RunLayout) -> None:
    """What the reference saved, as a version wrote it that did not record it."""
    edit_ranks(run, "reference", 1, only("checkpoint", put(digests=None)))


def opened(leg: str) -> Break:
    def edit(run: RunLayout) -> None:
        record = run.leg(leg).attempt(1).opened(0)
        record.parent.mkdir(parents=True, exist_ok=True)
        record.write_text('{"path": "/books/stats", "left_by": "reference leg", "changed_s": 1.0, "attempt": 1, "rank": 0}\n')

    return edit


def environment(text: str | None) -> Break:
    def broken(run: RunLayout) -> None:
        path = run.leg("chaos").environment
        path.unlink() if text is None else path.write_text(text)

    return broken


def forget_rank(leg: str, rank: int) -> Break:
    def broken(run: RunLayout) -> None:
        for path in run.leg(leg).path.glob(f"attempts/*/rank-{rank}.trace"):
            path.unlink()

    return broken


def empty_traces(leg: str) -> Break:
    def broken(run: RunLayout) -> None:
        for path in run.leg(leg).path.glob("attempts/*/rank-*.trace"):
            path.write_bytes(b"")

    return broken


def stranger(run: RunLayout) -> None:
    folder = run.leg("chaos").attempt(4)
    lines = [{**line, "rank": 3} if "rank" in line else line for line in read_lines(folder.trace(0))]
    write_lines(folder.trace(3), lines)


def twice(run: RunLayout) -> None:
    path = run.leg("chaos").attempt(2).trace(0)
    lines = list(read_lines(path))
    write_lines(path, [*lines, next(line for line in lines if line["kind"] == "step" and line["step"] == 6)])


def flip_checkpoint(leg: str) -> Break:
    def broken(run: RunLayout) -> None:
        path = run.leg(leg).checkpoints / "step-00000012" / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)

    return broken


def no_checkpoint(run: RunLayout) -> None:
    for path in (run.leg("chaos").checkpoints / "step-00000012").iterdir():
        path.unlink()


def forget_plan(run: RunLayout) -> None:
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0).to_json()))


def plan_one_more(run: RunLayout) -> None:
    more = Fault(id="F4", rank=0, phase="step", at_step=11, source="faults.schedule[3]")
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=(*KILLS, more)).to_json()))


def plan_another_step(run: RunLayout) -> None:
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=(replace(KILLS[0], at_step=5), *KILLS[1:])).to_json()))


def of_fault(event: str, fault: str, change: Any) -> Break:
    return journal("chaos", only(event, lambda line: change(line) if line["fault"] == fault else line))


def of_attempt(number: int, change: Any) -> Break:
    return journal("chaos", only("attempt.starting", lambda line: change(line) if line["attempt"] == number else line))


def went_on_after_the_fault(run: RunLayout) -> None:
    """A fault planned for step 5, and a trace that goes on to step 6."""
    edit_journal(run, "chaos", only("fault.requested", lambda line: {**line, "step": 5} if line["fault"] == "F1" else line))
    run.plan_json.write_text(json.dumps(FaultPlan(seed=0, faults=(replace(KILLS[0], at_step=5), *KILLS[1:])).to_json()))


def putting(kind: str) -> Callable[..., Break]:
    """Edits of one rank's records of this kind, or of all its ranks: `putting("step")("chaos", 2, at=7, loss=[])`."""

    def values(leg: str, attempt: int, at: int | None = None, ranks: tuple[int, ...] = (1,), **values: Any) -> Break:
        return trace(leg, attempt, only(kind, put(**values), step=at), ranks)

    return values


put_start, put_step, put_buckets, put_end = map(putting, ("start", "step", "buckets", "end"))


def put_digests(leg: str, attempt: int, *group: Any, **options: Any) -> Break:
    return trace(leg, attempt, digests(*group, **options))


def finished(leg: str, **values: Any) -> Break:
    return journal(leg, only("leg.finished", put(**values)))


all_ranks = (0, 1, 2)
other_words = "AAAAAAAAAAAAAAAA"

NEGATIVE: list[tuple[str, Break, str, str]] = [
    ("records", put_step("chaos", 2, at=6, param=None), "inconclusive", "param"),
    ("records", put_step("reference", 1, at=6, param=None), "inconclusive", "reference: "),
    ("records", environment("{"), "inconclusive", "not JSON"),
    ("completed", journal("chaos", only("leg.finished", drop)), "inconclusive", "chaos leg has not finished"),
    ("completed", finished("reference", outcome="timeout"), "inconclusive", "timeout"),
    ("completed", finished("chaos", outcome="inexact_restore", message="head.bias"), "fail", "head.bias"),
    ("completed", trace("chaos", 4, only("end", drop)), "inconclusive", "no end record of rank 1"),
    ("early_end", finished("chaos", outcome="settled"), "inconclusive", "never shown to repeat"),
    ("completed", put_end("chaos", 4, step=11), "fail", "step 11 on rank 1"),
    ("completed", put_end("reference", 1, ranks=all_ranks, step=0), "inconclusive", "steps 0"),
    ("reference", put_end("reference", 1, step=11), "inconclusive", "ended at steps 11, 12"),
    ("reference", trace("reference", 1, only("step", drop), all_ranks), "inconclusive", "no step was recorded"),
    ("reference", trace("reference", 1, only("step", drop, step=7)), "inconclusive", "rank 1 lacks step 7"),
    ("reference", forget_rank("reference", 2), "inconclusive", "ranks [0, 1]"),
    ("reference", put_start("reference", 1, restored="step-00000004"), "inconclusive", "interrupted"),
    ("reference", put_start("reference", 1, world_size=4), "inconclusive", "world of 4"),
    ("reference", put_start("reference", 1, position={"epoch": 1, "batches": 0, "step": 0}), "inconclusive", "began"),
    (
        "reference",
        journal("reference", only("attempt.started", put(event="fault.requested", fault="F1", rank=0, step=1, phase="step"))),
        "inconclusive",
        "fault struck the reference",
    ),
    ("environment", environment('{"torch": "2.13.0", "threads": 2, "cpu": "AVX2"}'), "inconclusive", "threads was 1, then 2"),
    ("environment", environment('{"torch": "2.13.0", "threads": 1}'), "inconclusive", "cpu"),
    ("environment", environment(None), "inconclusive", "not recorded"),
    (
        "own_files",
        opened("chaos"),
        "inconclusive",
        "the chaos leg read /books/stats, which was written during the reference leg",
    ),
    ("own_files", opened("reference"), "inconclusive", "the reference leg read /books/stats"),
    ("environment", environment("{}"), "inconclusive", "not recorded"),
    (
        "environment",
        put_start("chaos", 2, canary="0" * 16),
        "inconclusive",
        "rank 1 of chaos attempt 2 computes other bits than rank 0 of reference attempt 1",
    ),
    ("reproducible", put_step("chaos", 1, at=2, loss=["0x1p-3", "0x1p-3"]), "inconclusive", "loss differs"),
    ("reproducible", put_start("chaos", 1, param="0" * 16), "inconclusive", "initial weights of rank 1"),
    (
        "reproducible",
        put_digests("chaos", 1, "registered", {"average": "0" * 16}, kind="checkpoint"),
        "inconclusive",
        "the registered state saved at step 4 on rank 1 (average) already differs",
    ),
    ("reproducible", put_start("chaos", 1, rng="0" * 16), "inconclusive", "the RNG of rank 1"),
    ("reproducible", put_start("chaos", 1, restored="step-00000004"), "inconclusive", "from a checkpoint"),
    ("faults_landed", forget_plan, "inconclusive", "F1 was armed, and is not in the plan"),
    ("faults_landed", plan_one_more, "inconclusive", "F4: it never fired"),
    ("faults_landed", plan_another_step, "inconclusive", "F1: it fired on rank 1 at step of step 6, not as planned"),
    ("faults_landed", of_fault("fault.requested", "F2", drop), "inconclusive", "F2: it never fired"),
    ("faults_landed", of_fault("fault.observed", "F2", drop), "inconclusive", "no record shows that it happened"),
    ("faults_landed", of_fault("fault.observed", "F2", put(signal=6)), "inconclusive", "signal 6"),
    ("faults_landed", of_fault("fault.observed", "F2", put(pid=200)), "inconclusive", "process 200 was struck"),
    ("faults_landed", of_fault("fault.observed", "F2", put(attempt=1)), "inconclusive", "seen on rank 2 of attempt 1"),
    ("faults_landed", of_fault("fault.observed", "F2", put(fault="F1")), "inconclusive", "observed 2 times"),
    ("faults_landed", journal("chaos", only("worker.exited", drop)), "inconclusive", "no exit of process 101"),
    ("faults_landed", journal("chaos", only("worker.exited", put(signal=15))), "inconclusive", "no exit of process 101"),
    ("faults_landed", went_on_after_the_fault, "inconclusive", "rank 1 had recorded step 6 last"),
    ("faults_landed", trace("chaos", 1, only("step", drop, step=6)), "inconclusive", "rank 1 had recorded step 5 last"),
    ("faults_landed", trace("chaos", 2, only("step", drop, step=9), (2,)), "inconclusive", "comes after step 9"),
    ("faults_landed", forget_rank("chaos", 0), "inconclusive", "F3: rank 0 left no trace of attempt 3"),
    ("lineage", trace("chaos", 2, only("step", drop, step=7)), "fail", "rank 1 lacks step 7"),
    ("lineage", forget_rank("chaos", 2), "inconclusive", "ranks 2"),
    ("lineage", empty_traces("chaos"), "inconclusive", "ranks 0, 1, 2"),
    ("lineage", empty_traces("reference"), "inconclusive", "no step"),
    ("lineage", stranger, "inconclusive", "ranks 3"),
    ("lineage", twice, "fail", "recorded step 6 again"),
    ("lineage", trace("reference", 1, only("step", drop, step=12), all_ranks), "fail", "continued to step 12"),
    ("resume_points", of_attempt(3, put(resume="step-00000004", resume_step=4)), "fail", "although step 8 had been committed"),
    ("resume_points", of_attempt(2, put(resume=None, resume_step=0)), "fail", "although step 4 had been committed"),
    ("resume_points", of_attempt(2, put(resume="step-00000008", resume_step=8)), "fail", "no attempt before it reached"),
    ("resume_points", of_attempt(2, put(resume_step=5)), "fail", "does not belong"),
    ("resume_points", put_start("chaos", 2, restored=None), "fail", "rank 1 restored None"),
    ("resume_points", put_start("chaos", 2, world_size=2), "fail", "world of 2"),
    ("resume_points", put_start("chaos", 2, position={"epoch": 0, "batches": 6, "step": 4}), "fail", "batch 6"),
    ("resume_points", put_start("chaos", 2, position={"epoch": 1, "batches": 0, "step": 4}), "fail", "epoch 1"),
    ("resume_points", put_start("chaos", 1, position={"epoch": 0, "batches": 2, "step": 0}), "fail", "batch 2"),
    ("resume_points", trace("chaos", 2, only("step", drop, step=5)), "fail", "recorded step 6 first"),
    (
        "checkpointed_state",
        put_digests("chaos", 2, "buffers", {"norm.mean": "0" * 16}, kind="start"),
        "fail",
        "attempt 2 restored another buffers state at step 4 on rank 1: norm.mean differs",
    ),
    (
        "checkpointed_state",
        put_digests("chaos", 2, "registered", {"average": "0" * 16}, kind="checkpoint"),
        "fail",
        "attempt 2 saved another registered state at step 8 on rank 1: average differs",
    ),
    ("checkpointed_state", forget_states, "skip", "recorded in both legs"),
    ("data_order", put_step("chaos", 2, at=7, ids=[[1, 2], [3, 4]]), "fail", "first at step 7 rank 1 attempt 2"),
    ("data_order", put_step("chaos", 2, at=7, batch=["a", "b"]), "fail", "differ in 1 of 36"),
    ("data_order", put_step("chaos", 2, at=7, ids=[[1, 2]]), "fail", "first at step 7"),
    ("data_order", put_step("chaos", 2, at=7, batches=3), "fail", "first at step 7"),
    ("data_order", trace("chaos", 2, only("step", drop, step=7)), "inconclusive", "only 35 of 36"),
    ("data_order", empty_traces("reference"), "inconclusive", "only 0 of 0"),
    ("rng", put_step("chaos", 2, at=7, rng="0" * 16), "fail", "first at step 7"),
    ("rng", empty_traces("chaos"), "inconclusive", "only 0 of 36"),
    ("losses", put_step("chaos", 2, at=7, loss=["0x1p-3", "0x1p-3"]), "fail", "first at step 7"),
    ("losses", put_step("chaos", 2, at=7, loss=["0x1p-3"]), "fail", "first at step 7"),
    ("losses", forget_rank("chaos", 2), "inconclusive", "only 24 of 36"),
    ("lr", put_step("chaos", 2, at=7, lr=["0x1p-3"]), "fail", "first at step 7"),
    ("lr", empty_traces("chaos"), "inconclusive", "only 0 of 36"),
    ("gradients", put_step("chaos", 2, at=7, grad="0" * 16), "fail", "first at step 7"),
    ("gradients", put_step("chaos", 2, at=7, grads=other_words), "fail", "embed.weight"),
    ("gradients", empty_traces("chaos"), "inconclusive", "only 0 of 36"),
    ("parameters", put_step("chaos", 2, at=7, param="0" * 16), "fail", "first at step 7"),
    ("parameters", put_start("chaos", 2, param="0" * 16), "fail", "attempt 2 resumed from step 4"),
    ("parameters", put_start("chaos", 2, tensors=["a", "c", "b"]), "fail", "another order, from number 0"),
    ("parameters", empty_traces("chaos"), "inconclusive", "only 0 of 36"),
    ("rank_agreement", put_step("chaos", 2, at=7, param="0" * 16), "fail", "rank 1 has other weights"),
    ("rank_agreement", put_step("chaos", 2, at=7, param="0" * 16), "fail", "than rank 0 after step 7 of"),
    ("rank_agreement", put_step("chaos", 2, at=7, param="0", params=other_words), "fail", "in embed.weight"),
    ("rank_agreement", put_start("chaos", 2, param="0" * 16), "fail", "attempt 2, from step 4"),
    ("rank_agreement", put_step("reference", 1, at=7, param="0" * 16), "fail", "not to blame"),
    ("replay_agreement", put_step("chaos", 3, at=10, param="0" * 16), "fail", "is not what attempt 3"),
    ("bucket_layout", put_buckets("chaos", 2, layout=[[0, 1, 2]]), "fail", "attempt 2 reduced step 5"),
    ("bucket_layout", put_buckets("chaos", 2, layout=None), "fail", "another bucket layout"),
    ("bucket_layout", trace("chaos", 2, only("buckets", drop)), "inconclusive", "no layout was recorded"),
    ("bucket_layout", put_buckets("chaos", 2, primed=False), "inconclusive", "not primed (attempt 2)"),
    ("final_weights", put_digests("chaos", 4, "model", {"head.bias": "0" * 16}), "fail", "model: head.bias differ on rank 1"),
    ("final_weights", put_digests("chaos", 4, "buffers", {"norm.mean": "0" * 16}), "fail", "buffers: norm.mean"),
    ("final_weights", put_digests("chaos", 4, "model", {"more": "0" * 16}), "fail", "more"),
    ("final_weights", trace("chaos", 4, only("end", drop)), "inconclusive", "no end record"),
    ("final_optimizer", put_digests("chaos", 4, "optimizer", {"head.bias.momentum": "0" * 16}), "fail", "head.bias.momentum"),
    ("final_optimizer", put_digests("chaos", 4, "optimizer", None, keep=False), "fail", "and 2 more"),
    ("final_scheduler", put_digests("chaos", 4, "scheduler", {"0.last_epoch": "0" * 16}), "fail", "0.last_epoch"),
    ("final_rng", put_digests("chaos", 4, "rng", {"torch": "0" * 16}), "fail", "torch"),
    ("final_rng", put_end("chaos", 4, digests={}), "inconclusive", "no rng digests"),
    ("final_registered", put_digests("chaos", 4, "registered", {"average": "0" * 16}), "fail", "average"),
    (
        "final_position",
        put_end("chaos", 4, position={"epoch": 2, "batches": 3, "step": 12}),
        "fail",
        "rank 1 ended at epoch 2 batch 3 step 12, the reference at epoch 2 batch 4 step 12",
    ),
    ("final_position", put_end("reference", 1, ranks=all_ranks, step=11), "inconclusive", "at step 11"),
    ("final_checkpoint", flip_checkpoint("chaos"), "fail", "chaos: step-00000012: model.safetensors"),
    ("final_checkpoint", flip_checkpoint("reference"), "inconclusive", "reference: step-00000012"),
    ("final_checkpoint", no_checkpoint, "fail", "MANIFEST.json is missing"),
    ("final_checkpoint", put_end("chaos", 4, ranks=all_ranks, checkpoint="step-00000008"), "fail", "of step 8"),
    ("final_checkpoint", put_end("chaos", 4, ranks=all_ranks, checkpoint=None), "inconclusive", "no common final checkpoint"),
    ("final_checkpoint", put_end("chaos", 4, ranks=all_ranks, checkpoint="../step-1"), "fail", "not the name of a checkpoint"),
]


@pytest.mark.parametrize(
    ("name", "broken", "status", "words"), NEGATIVE, ids=lambda value: value if isinstance(value, str) else ""
)
def test_check_sees_it_broken(run: RunLayout, name: str, broken: Break, status: str, words: str) -> None:
    broken(run)
    check = checks_of(run)[name]
    assert (check.status, words in check.summary) == (status, True), check.summary


def test_settings_that_the_script_changes_while_it_trains_are_not_of_the_environment(run: RunLayout) -> None:
    environment('{"torch": "2.13.0", "threads": 2}')(run)
    put_start("chaos", 2, canary="0" * 16)(run)
    assert checks_of(run)["environment"].status == "inconclusive"
    run.leg("reference").environment.write_text('{"torch": "2.13.0", "threads": 1, "changed": ["threads"]}')
    assert checks_of(run)["environment"].status == "pass"
    put_start("chaos", 1, canary="0" * 16)(run)
    assert checks_of(run)["environment"].code == "bits_differ"
    # Of a damaged record nothing is taken.
    run.leg("reference").environment.write_text('{"torch": "2.13.0", "threads": 1, "changed": 5}')
    assert checks_of(run)["environment"].code == "environment_differs"


def test_every_check_has_a_negative_control() -> None:
    assert {function.__name__ for function in CHECKS} == {name for name, _, _, _ in NEGATIVE}


@pytest.mark.parametrize(
    ("group", "ranks", "name", "status", "words"),
    [
        ("model", all_ranks, "final_weights", "inconclusive", ""),
        ("rng", all_ranks, "final_rng", "inconclusive", ""),
        ("optimizer", (2,), "final_optimizer", "inconclusive", "ranks 2"),
        *((group, all_ranks, f"final_{group}", "skip", "") for group in ("scheduler", "registered", "optimizer")),
    ],
)
def test_digests_of_nothing_prove_nothing_and_a_job_without_such_state_is_skipped(
    run: RunLayout, group: str, ranks: tuple[int, ...], name: str, status: str, words: str
) -> None:
    for leg, attempt in (("reference", 1), ("chaos", 4)):
        for rank in ranks:
            edit_trace(run, leg, attempt, rank, digests(group, None, keep=False))
    check = checks_of(run)[name]
    assert (check.status, words in check.summary) == (status, True)


def test_what_one_rank_alone_registers_is_compared_there(run: RunLayout) -> None:
    for leg, attempt in (("reference", 1), ("chaos", 4)):
        for rank in (1, 2):
            edit_trace(run, leg, attempt, rank, digests("registered", None, keep=False))
    check = checks_of(run)["final_registered"]
    assert (check.status, check.summary) == ("pass", "1 digests of registered objects on 1 rank are equal")
    edit_trace(run, "chaos", 4, 0, digests("registered", None, keep=False))
    assert checks_of(run)["final_registered"].status == "fail"


def everywhere(run: RunLayout, edit: Any) -> None:
    for leg, attempts in (("reference", (1,)), ("chaos", (1, 2, 3, 4))):
        for attempt in attempts:
            edit_ranks(run, leg, attempt, edit)


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("data_order", {"batch": ["same", "same"]}, "could not be seen"),
        ("gradients", {"grad": "0" * 16, "grads": other_words}, "were not seen"),
        ("parameters", {"param": "0" * 16, "params": other_words}, "never changed"),
        ("losses", {"loss": ["nan", "nan"]}, "NaN from step 1"),
        ("lr", {"lr": [], "grad": "", "grads": ""}, "no learning rate"),
    ],
)
def test_equal_because_nothing_is_seen_is_inconclusive(run: RunLayout, name: str, values: dict[str, Any], words: str) -> None:
    everywhere(run, lambda line: {**line, **{key: value for key, value in values.items() if key in line}})
    check = checks_of(run)[name]
    assert (check.status, words in check.summary) == ("inconclusive", True), check.summary


def test_one_nan_on_the_way_is_no_objection(run: RunLayout) -> None:
    for leg, attempt in (("reference", 1), ("chaos", 2)):
        edit_ranks(run, leg, attempt, only("step", put(loss=["nan", "nan"]), step=7))
    assert checks_of(run)["losses"].status == "pass"


def test_a_step_skipped_by_a_gradient_scaler_is_compared(run: RunLayout) -> None:
    skipped_step = only("step", put(lr=[], grad="", grads=""), step=7)
    edit_ranks(run, "reference", 1, skipped_step)
    assert {name: check.status for name, check in checks_of(run).items() if check.status != "pass"} == {
        "lr": "fail",
        "gradients": "fail",
    }
    edit_ranks(run, "chaos", 2, skipped_step)
    assert all(check.status == "pass" for check in checks_of(run).values())


def test_without_sample_ids_the_bytes_decide(tmp_path: Path) -> None:
    check = checks_of(write_run(tmp_path, bugs=Bugs(with_ids=False)))["data_order"]
    assert (check.status, check.evidence["ids_known"]) == ("pass", False)


def test_resume_point_at_an_epochs_end_in_both_spellings(tmp_path: Path) -> None:
    kills = [Fault(id="F1", rank=0, phase="step", at_step=6, source="faults.schedule[0]")]
    run = write_run(tmp_path, kills=kills, every_steps=5)
    assert checks_of(run)["resume_points"].status == "pass"
    edit_ranks(run, "chaos", 2, only("start", put(position={"epoch": 1, "batches": 0, "step": 5})))
    assert checks_of(run)["resume_points"].status == "pass"


def test_resume_from_a_commit_whose_line_was_lost(tmp_path: Path) -> None:
    kills = [Fault(id="F1", rank=0, phase="checkpoint.postcommit", at_step=8, source="faults.schedule[0]")]
    check = checks_of(write_run(tmp_path, kills=kills))["resume_points"]
    assert check.status == "pass"
    assert check.evidence["points"][1] == {"attempt": 2, "resumed": "step-00000008", "newest_committed": 4}


def test_quarantined_checkpoint_is_not_to_be_resumed_from(tmp_path: Path) -> None:
    run = write_run(tmp_path, bugs=Bugs(stale_checkpoint=True), reference_bugs=Bugs())
    assert checks_of(run)["resume_points"].status == "fail"
    path = run.leg("chaos").journal
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    event = {
        "v": 2,
        "event": "checkpoint.quarantined",
        "time_s": 1.0,
        "name": "step-00000008",
        "reason": "sha256",
        "moved_to": "q",
    }
    out: list[dict[str, Any]] = []
    for line in lines:
        if line["event"] == "attempt.starting" and line["attempt"] > 2:
            out.append(event)
        out.append(line)
    path.write_text("".join(json.dumps({**line, "seq": number}) + "\n" for number, line in enumerate(out, start=1)))
    check = checks_of(run)["resume_points"]
    assert check.status == "pass", check.summary
    # Nobody had planned to spoil it: a PASS says so.
    assert check.summary.endswith("; 2 checkpoints set aside that no fault had damaged: sha256")
    assert check.evidence["unplanned"] == ["step-00000008"] * 2
    spoiled = put(found={"checkpoint": "step-00000008"})
    edit_journal(run, "chaos", only("fault.observed", lambda line: spoiled(line) if line["fault"] == "F2" else line))
    assert checks_of(run)["resume_points"].evidence["unplanned"] == []


def test_a_training_that_a_notice_ended_for_good_is_not_put_down_to_lost_state(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    edit_trace(run, "chaos", 4, 1, only("end", put(step=11)))
    assert checks_of(run)["completed"].code == "ended_at_another_step"
    taken = put(how="note", found={"taken": True, "problem": "taken", "problem_code": "notice_taken"})
    edit_journal(run, "chaos", only("fault.observed", lambda line: taken(line) if line["fault"] == "F2" else line))
    assert checks_of(run)["completed"].code == "ended_on_notice"


def test_what_ended_the_attempt_of_a_fault_that_nobody_saw_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    other = put(event="death.unplanned", rank=0, reason="rank 0 was killed", step=5, error=None)
    edit_journal(run, "chaos", only("fault.observed", lambda line: other(line) if line["fault"] == "F2" else line))
    said = "F2: it was requested, but no record shows that it happened before its attempt was ended: rank 0 was killed"
    assert checks_of(run)["faults_landed"].summary.endswith(said)


RAISED = {"exit_code": 4, "type": "ValueError", "message": "loaded state dict has a different number of parameter groups"}


@pytest.mark.parametrize(
    ("type_", "code"),
    [("KeyError", "reference_raised"), ("Exception", "reference_raised"), ("RuntimeError", "reference_interrupted")],
)
def test_a_reference_that_was_started_again_because_the_script_raised_an_error_is_the_scripts(
    run: RunLayout, type_: str, code: str
) -> None:
    trace("reference", 1, only("start", put(restored="step-00000004")))(run)
    drill = load(run)
    error = {"type": type_, "message": "'bbox'"}
    death = {"event": "death.unplanned", "attempt": 1, "rank": 0, "reason": f"rank 0 raised {type_}: 'bbox'", "error": error}
    last = replace(drill.reference.attempts[-1], unplanned=(convert(death, JournalEvent),))
    check = premises.reference(replace(drill, reference=replace(drill.reference, attempts=(last,))))
    assert check.code == code
    assert check.summary.endswith(f"cannot serve as a reference: rank 0 raised {type_}: 'bbox'")


@pytest.mark.parametrize(
    ("errors", "status"),
    [
        ((RAISED, RAISED), "FAIL"),
        # Killed, refused by the storage, or one of chaosrun's own: the older checkpoint is all that can be asked for.
        ((RAISED, None), "PASS"),
        ((RAISED, {**RAISED, "message": "[Errno 5] Input/output error"}), "PASS"),
        (({**RAISED, "exit_code": 5}, {**RAISED, "exit_code": 5}), "PASS"),
    ],
)
def test_a_whole_checkpoint_that_the_script_does_not_take_back(run: RunLayout, errors: Any, status: str) -> None:
    verdict = _refused(run, errors)
    assert verdict.status == status, verdict.cause
    if status == "FAIL":
        assert verdict.cause == "resume_points: checkpoint step-00000006 is intact but cannot be restored: no"
        assert verdict.hint and "before" in verdict.hint
        assert (verdict.blame.whose, verdict.blame.part, verdict.blame.likely) == ("yours", "script", True)


def _refused(run: RunLayout, errors: Any) -> Verdict:
    """Of a checkpoint that attempts fail to restore with these errors."""
    drill = load(run)
    first, second, *rest = drill.chaos.attempts
    name = "step-00000006"
    death = {"event": "death.unplanned", "attempt": 1, "rank": 1, "reason": "no"}
    tries = [
        replace(
            second,
            number=0,
            resume=name,
            resume_step=6,
            traces={},
            unplanned=(convert({**death, "error": error}, JournalEvent),),
        )
        for error in errors
    ]
    attempts = (first, *tries, replace(second, quarantined=(name,)), *rest)
    return judge_drill(replace(drill, chaos=replace(drill.chaos, attempts=attempts)))


@pytest.mark.parametrize(
    ("through", "last", "told"),
    [
        ("restore", "job/train.py", "train.py:4"),
        ("load_state_dict", "job/train.py", "train.py:4"),
        ("load_state", "job/models/layers.py", "models/layers.py:4"),
        ("restore", "lib/torch/nn/module.py", ""),
        ("restore", "job/venv/lib/site-packages/torch/nn/module.py", ""),
        ("__next__", "job/data.py", ""),
    ],
)
def test_what_of_the_script_raised_an_error_in_the_restore_is_told(run: RunLayout, through: str, last: str, told: str) -> None:
    frames = (("job/train.py", 9, "<module>"), ("lib/any.py", 2588, through), (last, 4, "load_it"))
    text = "".join(f'  File "/{file}", line {line}, in {function}\n    at()\n' for file, line, function in frames)
    errors = ({**RAISED, "traceback": f"Traceback (most recent call last):\n{text}KeyError: 'w'"},) * 2
    hint = f"{_refused(run, errors).hint}"
    assert (f"the script's own code raised it ({told}, in load_it)" in hint) == bool(told), hint
    assert ("script's own code raised it" in hint) == bool(told), hint


@pytest.mark.parametrize(("last", "said"), [(RAISED, "FAIL"), (None, "INCONCLUSIVE")])
def test_a_leg_that_ends_as_the_script_takes_no_checkpoint_back(run: RunLayout, last: Any, said: str) -> None:
    """None: what ended it is not the restore."""
    drill = load(run)
    first, second, *_ = drill.chaos.attempts
    name, death = "step-00000006", {"event": "death.unplanned", "attempt": 1, "rank": 1, "reason": "no key 0.mask"}
    deaths = [convert({**death, "error": error}, JournalEvent) for error in (RAISED, RAISED, last)]
    given = [(name, 6), (name, 6), ("step-00000004", 4)]
    tries = [
        replace(second, number=number, resume=resume, resume_step=step, traces={}, unplanned=(death,))
        for number, (death, (resume, step)) in enumerate(zip(deaths, given, strict=True), start=2)
    ]
    tries[-1] = replace(tries[-1], quarantined=(name,))
    ended = changed(drill.chaos.journal[-1], outcome="user_error", message="the script failed")
    chaos = replace(drill.chaos, attempts=(first, *tries), journal=(*drill.chaos.journal[:-1], ended))
    verdict = judge_drill(replace(drill, chaos=chaos))
    assert verdict.status == said, verdict.cause
    assert (
        said != "FAIL" or verdict.cause == f"resume_points: checkpoint {name} is intact but cannot be restored: no key 0.mask"
    )


def test_a_model_that_trains_now_and_then_has_no_layout_before(run: RunLayout) -> None:
    edit_trace(run, "reference", 1, 1, only("buckets", put(layout=[[1, 0], [2, 1], [0]])))
    assert checks_of(run)["bucket_layout"].status == "pass"
    edit_trace(run, "reference", 1, 1, only("buckets", put(layout=[[1], [2, 1], [0]])))
    assert checks_of(run)["bucket_layout"].status == "fail"


@pytest.mark.parametrize(("saved", "status"), [(None, "pass"), ("0" * 16, "fail")])
def test_weights_that_change_after_a_step_are_right_as_they_were_saved(run: RunLayout, saved: str | None, status: str) -> None:
    """Where the reference saved nothing. `saved`: what was restored is not that."""
    edit_trace(run, "reference", 1, 1, only("checkpoint", drop, step=4))
    edit_trace(run, "chaos", 2, 1, only("start", put(param="0" * 16)))
    if saved:
        other = lambda line: {**line, "digests": {**line["digests"], "model": {"w": saved}}}  # noqa: E731
        edit_trace(run, "chaos", 2, 1, only("start", other))
    assert checks_of(run)["parameters"].status == status


def test_one_worker_has_no_ranks_to_compare(tmp_path: Path) -> None:
    kills = [Fault(id="F1", rank=0, phase="step", at_step=6, source="faults.schedule[0]")]
    checks = checks_of(write_run(tmp_path, workers=1, kills=kills))
    assert {name for name, check in checks.items() if check.status != "pass"} == {"rank_agreement", "bucket_layout"}


def test_fault_before_the_first_step_leaves_nothing_to_reproduce(tmp_path: Path) -> None:
    kills = [Fault(id="F1", rank=0, phase="reduce", at_step=1, source="faults.schedule[0]")]
    checks = checks_of(write_run(tmp_path, kills=kills))
    assert checks["reproducible"].status == "skip"
    assert checks["replay_agreement"].status == "skip"
    assert checks["resume_points"].evidence["restores"] == 0


def test_crash_of_a_check_is_inconclusive(run: RunLayout) -> None:
    def careless(drill: Drill) -> CheckResult:
        return passed(str(drill.plan.faults[99]))

    def unreadable(_drill: Drill) -> CheckResult:
        raise ResourcesError("disk gone", hint="mount it")

    checks = run_checks(load(run), (careless, unreadable))
    assert [check.status for check in checks] == ["inconclusive", "inconclusive"]
    assert checks[0].summary.startswith("check crashed: IndexError")
    assert checks[1].summary == "could not be checked: disk gone"
