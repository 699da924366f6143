"""A chaos leg that began at a checkpoint of the reference: PASS only where that is shown, FAIL where its resume is wrong."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from legs import KILLS, Bugs, LegWriter, copy_run, edit_journal, edit_trace, only, put, with_spec, write_run

from chaosrun.faults.fault import Fault
from chaosrun.records.began import Began, digest_of
from chaosrun.records.layout import RunLayout, checkpoint_name
from chaosrun.records.run_file import write_record
from chaosrun.verify.confirm import agreed_at_first
from chaosrun.verify.verdict import judge
from tests.unit.events import event

STEPS, LATE = 12, KILLS[1]
RANKS = (0, 1, 2)
Break = Callable[[RunLayout], None]


class Given(LegWriter):
    """The chaos leg is given the reference's checkpoints of these steps."""

    steps_given: ClassVar[Sequence[int]] = (4, 8)
    reference: ClassVar[LegWriter]

    def write(self, kills: Sequence[Fault], name: str) -> None:
        if name == "reference":
            type(self).reference = self
            return super().write(kills, name)
        names = [checkpoint_name(step) for step in self.steps_given]
        for each in names:
            shutil.copytree(self.reference.layout.checkpoints / each, self.layout.checkpoints / each)
        self.saved.update({each: self.reference.saved[each] for each in names})
        states = {each: digest_of([self.digests(self.saved[each], rank) for rank in RANKS]) for each in names}
        write_record(self.layout.began, Began(step=max(self.steps_given), states=states))
        super().write(kills, name)


def begun_run(root: Path, kill: Fault = LATE, **about: Any) -> RunLayout:
    run = write_run(root, kills=(kill,), steps=STEPS, kind=Given, **about)
    run.leg("reference").repeats.write_text("{}")
    return run


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> RunLayout:
    return begun_run(tmp_path_factory.mktemp("begun"))


def test_a_leg_that_began_at_the_reference_s_checkpoint_passes_and_says_so(begun: RunLayout) -> None:
    verdict = judge(begun)
    assert (verdict.status, verdict.code, verdict.steps) == ("PASS", "exact", STEPS), verdict.cause
    assert "4 steps on 3 ranks" in verdict.cause
    assert verdict.cause.endswith("; it began at step 8 from the reference's checkpoint")
    by_name = {check.name: check.summary for check in verdict.checks}
    assert by_name["reproducible"].startswith("began at step 8 from the reference's checkpoint: the steps before are ")
    assert by_name["lineage"] == "steps 1 to 12 without a gap on 3 ranks, up to 8 the reference's own"
    assert "12 records are equal" in by_name["losses"], "what was not run is not called equal"
    assert [attempt.resumed_from for attempt in verdict.attempts] == ["step-00000008"] * 2
    assert not agreed_at_first(verdict), "whether the reference is of another time, it cannot tell"


def test_an_attempt_that_falls_back_before_where_the_leg_began_runs_those_steps_itself(tmp_path: Path) -> None:
    class FallsBack(Given):
        """What it began with is found damaged after the kill."""

        def attempt(self, number: int, waiting: list[Fault]) -> bool:
            if number == 2:
                self.saved.pop(checkpoint_name(8))
                moved = {"name": checkpoint_name(8), "step": 8, "reason": "damaged", "moved_to": "elsewhere"}
                self.journal.append(event("checkpoint.quarantined", **moved))
            return super().attempt(number, waiting)

    run = write_run(tmp_path, kills=(LATE,), steps=STEPS, kind=FallsBack)
    run.leg("reference").repeats.write_text("{}")
    verdict = judge(run)
    assert verdict.status == "PASS", verdict.cause
    assert "8 steps on 3 ranks" in verdict.cause
    by_name = {check.name: check.summary for check in verdict.checks}
    assert by_name["lineage"] == "steps 1 to 12 without a gap on 3 ranks, up to 4 the reference's own"


def began(**about: Any) -> Break:
    def edit(run: RunLayout) -> None:
        path = run.leg("chaos").began
        path.write_text(json.dumps({**json.loads(path.read_text()), **about}))

    return edit


def of_reference(change: Any, *, rank: int = 1, step: int = 8) -> Break:
    return lambda run: edit_trace(run, "reference", 1, rank, only("checkpoint", change, step=step))


def at_start(change: Any, rank: int = 1) -> Break:
    return lambda run: edit_trace(run, "chaos", 1, rank, only("start", change))


def other_weights(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "digests": {**line["digests"], "model": {**line["digests"]["model"], "head.bias": "other"}}}


def ordered(step: int) -> Break:
    about = {"resume": checkpoint_name(step), "resume_step": step}
    first = only("attempt.starting", lambda line: {**line, **about} if line["attempt"] == 1 else line)
    return lambda run: edit_journal(run, "chaos", first)


SPOILED: dict[str, tuple[Break, str, str]] = {
    "nothing says whose": (lambda run: run.leg("chaos").began.unlink(), "INCONCLUSIVE", "the records do not say whose it was"),
    "never repeated": (lambda run: run.leg("reference").repeats.unlink(), "INCONCLUSIVE", "never shown to repeat itself"),
    "another run's": (
        began(states={checkpoint_name(4): "other", checkpoint_name(8): "other"}),
        "INCONCLUSIVE",
        "not what the reference saved",
    ),
    "another reference": (of_reference(other_weights), "INCONCLUSIVE", "not what the reference saved"),
    "an older one of another reference": (of_reference(other_weights, step=4), "INCONCLUSIVE", "step-00000004 is not what"),
    "no digests": (of_reference(put(digests=None)), "INCONCLUSIVE", "not what the reference saved"),
    "a step nobody gave": (ordered(6), "INCONCLUSIVE", "but had been given"),
    "damaged": (began(step=4), "INCONCLUSIVE", "which is not of step 4"),
    "tolerance": (with_spec(verify={"losses": {"rtol": 1e-3}}), "INCONCLUSIVE", "a tolerance was given"),
    "the older one": (ordered(4), "FAIL", "although step 8 had been committed"),
    "a changed checkpoint": (at_start(other_weights), "FAIL", "weights not restored"),
    "another position": (at_start(put(position={"epoch": 1, "batches": 4, "step": 8})), "FAIL", "expected was epoch"),
    "a step before": (lambda run: edit_trace(run, "chaos", 1, 1, only("step", put(step=8), step=9)), "FAIL", ""),
}


@pytest.mark.parametrize("name", SPOILED)
def test_no_pass_where_it_is_not_shown(begun: RunLayout, tmp_path: Path, name: str) -> None:
    spoil, status, words = SPOILED[name]
    run = copy_run(begun, tmp_path)
    spoil(run)
    verdict = judge(run)
    said = [verdict.cause, *(check.summary for check in verdict.checks if check.status in ("fail", "inconclusive"))]
    assert verdict.status == status, said
    assert any(words in each for each in said), said


BUGS = (
    *(Bugs(keep_rng=False), Bugs(keep_optimizer=False), Bugs(keep_scheduler=False), Bugs(keep_buffers=False)),
    *(Bugs(keep_weights=False), Bugs(keep_registered=False), Bugs(keep_augmentation=False), Bugs(skip_off=1)),
    *(Bugs(set_epoch=False), Bugs(batches_off=2), Bugs(weights_off=1e-9), Bugs(stale_checkpoint=True)),
    *(Bugs(drifting_rank=1), Bugs(primed=False)),
)


@pytest.mark.parametrize("bugs", BUGS, ids=str)
def test_a_wrong_resume_fails_as_from_the_beginning(tmp_path: Path, bugs: Bugs) -> None:
    whole = judge(write_run(tmp_path / "whole", kills=(LATE,), steps=STEPS, bugs=bugs))
    verdict = judge(begun_run(tmp_path / "begun", bugs=bugs))
    assert (verdict.status, verdict.code) == (whole.status, whole.code), verdict.cause
    assert verdict.status != "PASS"
