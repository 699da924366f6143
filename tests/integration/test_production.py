"""`chaosrun run` on placements that are kept: a rank is lost, and the restart is held against what was recorded before."""

from pathlib import Path
from typing import Any

import pytest
import torch

from chaosrun.cli import main
from chaosrun.records.trace_reader import read_trace
from chaosrun.report.live import progress
from chaosrun.report.sentences import EventText
from tests.conftest import WarmDrills
from tests.e2e.drills import STEPS, events, write_job

pytestmark = pytest.mark.ray

DIES = """\
if order.attempt == 1 and step == 5 and rank == 1:
    while not (Path(order.leg_path) / "checkpoints" / "step-00000003").exists():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""Of nobody's plan, as soon as there is a checkpoint."""
FORGETS = """\
if order.attempt == 2 and step == 4 and rank == 1:
    torch.manual_seed(99)
"""
"""Rank 1 goes on, after the first step of the second attempt, with other random numbers than it had before."""
UNTIL_STOPPED = """\
while order.attempt == 2 and step == 6:
    time.sleep(0.01)
"""

STARTS_OVER = """\
import os, signal, time

import torch

first, mended = os.environ["CHAOSRUN_ATTEMPT"] == "1", os.environ["MENDED"]
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
os.makedirs("out", exist_ok=True)
*state, begin = torch.load("out/380.pt") if os.path.exists(mended) else [None, None, None, 0]
if begin:
    model.load_state_dict(state[0]), optimizer.load_state_dict(state[1]), torch.set_rng_state(state[2])
for step in range(begin + 1, 401):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step % 20 == 0:
        torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), step], f"out/{step}.pt")
    if step == 390 and first:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0 if first else 0.02)
"""
"""It saves, and does not look for what it saved, until it is mended. Its restart is slower."""


LEAVES = """\
import os, signal, sys

import torch

torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
os.makedirs("out", exist_ok=True)
told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
begin = 0
if os.path.exists("out/last.pt"):
    weights, moments, stream, begin = torch.load("out/last.pt")
    model.load_state_dict(weights), optimizer.load_state_dict(moments), torch.set_rng_state(stream)
for step in range(begin + 1, 13):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step == 5 and os.environ["CHAOSRUN_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    if step % 4 == 0 or told:
        torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), step], "out/last.pt")
    if told:
        sys.exit(0)
"""
"""At a notice, of nobody's plan, it saves and leaves with exit code 0."""


@pytest.mark.parametrize(
    "wrong", [pytest.param("", id="right", marks=pytest.mark.nightly), pytest.param(FORGETS, id="forgets")]
)
def test_a_run_that_is_saved_beside_the_training_loses_a_rank_and_is_judged(
    warm_drills: WarmDrills, tmp_path: Path, wrong: str
) -> None:
    job = write_job(tmp_path, DIES + wrong)
    result = warm_drills.production(job, root=tmp_path / "root", overrides=["checkpoint.mode=async"])
    leg, verdict = result.run.leg("run"), result.verdict
    first = read_trace(leg.attempt(1).trace(1), 1, 1, [])
    assert [(saved.step, saved.pending) for saved in first.checkpoints] == [(3, True)]
    assert [attempt.resumed_step for attempt in verdict.attempts][:2] == [0, 3]
    (judged,) = events(leg, "recovery.diverged" if wrong else "recovery.agreed")
    # The rank dies as soon as the checkpoint is there: its copy may not have been vouched for yet.
    assert judged["source"] == verdict.attempts[1].source in ("memory", "storage")
    if wrong:
        assert (judged["attempt"], judged["step"], judged["rank"], judged["quantity"]) == (2, 5, 1, "rng")
        assert verdict.status == "FAIL" and verdict.divergence is not None
        assert (verdict.divergence.step, verdict.divergence.ranks) == (5, (1,))
    else:
        assert (judged["attempt"], judged["steps"], judged["last"], judged["states"]) == (2, 2, 5, 2)
        assert (verdict.status, verdict.code, verdict.steps) == ("PASS", "recoveries_agree", STEPS)


def test_a_restart_that_is_not_what_was_recorded_is_an_alarm(
    warm_drills: WarmDrills, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends the run; where its cause is mended, the run goes on."""
    monkeypatch.setenv("CHAOSRUN_ROOT", str(tmp_path / "root"))
    job = write_job(tmp_path, DIES + FORGETS + UNTIL_STOPPED, "recovery: {hang_timeout: 300s, on_divergence: stop}")
    with progress(quiet=False) as on_event:
        assert on_event is not None
        result = warm_drills.production(job, root=tmp_path / "root", on_event=on_event)
    run, verdict, leg = result.run, result.verdict, result.run.leg("run")
    (alarm,) = events(leg, "recovery.diverged")
    assert (alarm["attempt"], alarm["step"], alarm["rank"], alarm["quantity"]) == (2, 5, 1, "rng")
    assert "ALARM: attempt 2" in capsys.readouterr().err
    found = verdict.divergence
    assert found is not None and (verdict.status, verdict.exit_code, verdict.code) == ("FAIL", 3, found.code)
    assert (found.step, found.ranks, found.attempt, found.kind) == (5, (1,), 2, "rng")
    assert events(leg, "leg.finished")[0]["outcome"] == verdict.outcome == "diverged"
    assert "stopped_at_alarm" in {check.code for check in verdict.checks if check.name == "completed"}
    assert (leg.checkpoints / "step-00000003").is_dir(), "everything is kept"
    assert (main(["verify", run.run_id]), main(["status", run.run_id]), main(["diagnose", run.run_id])) == (3, 0, 2)
    said = capsys.readouterr()
    assert "step 5, rank 1" in said.out and "diverged" in said.out
    assert "has no reference leg" in said.err

    # Attempt 3 is as attempt 1 was, and not as attempt 2. That one differed stays the verdict.
    again = warm_drills.production(run, root=tmp_path / "root").verdict
    assert (again.exit_code, again.outcome, again.steps) == (3, "completed", STEPS), again.cause
    assert [each["attempt"] for each in events(leg, "recovery.agreed")] == [3]
    assert again.divergence is not None and (again.divergence.attempt, again.divergence.step) == (2, 5)


def test_a_script_that_ignores_its_checkpoint_is_stopped_as_it_begins_again(warm_drills: WarmDrills, tmp_path: Path) -> None:
    """Not only when it has done all of its steps again. The first attempt stays what later ones are held against."""
    (tmp_path / "train.py").write_text(STARTS_OVER)
    job = tmp_path / "job.yaml"
    job.write_text(f"name: over\nscript: train.py\nworkers: 1\noutputs: [out]\nenv: {{MENDED: '{tmp_path / 'mended'}'}}\n")
    result = warm_drills.production(job, root=tmp_path / "root")
    verdict, leg = result.verdict, result.run.leg("run")
    (alarm,) = events(leg, "recovery.diverged")
    assert (alarm["attempt"], alarm["code"], alarm["quantity"], alarm["step"]) == (2, "began_again", "start", 1)
    assert (verdict.status, verdict.exit_code, verdict.code, verdict.outcome) == ("FAIL", 3, "began_again", "diverged")
    assert verdict.divergence is None
    assert read_trace(leg.attempt(2).trace(0), 2, 0, []).steps.last < 380, "it need not do again all that it had done"

    (tmp_path / "mended").touch()
    again = warm_drills.production(result.run, root=tmp_path / "root").verdict
    (judged,) = events(leg, "recovery.agreed")
    assert (judged["attempt"], judged["steps"], judged["last"]) == (3, 10, 390)
    assert (again.status, again.code, again.outcome) == ("FAIL", "began_again", "completed")


@pytest.mark.parametrize("notice", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.nightly)])
def test_a_script_that_leaves_on_a_notice_of_the_cluster_has_not_completed(
    warm_drills: WarmDrills, tmp_path: Path, notice: str
) -> None:
    (tmp_path / "train.py").write_text(LEAVES.replace("SIGTERM", notice))
    job = tmp_path / "job.yaml"
    job.write_text("name: leaves\nscript: train.py\nworkers: 1\noutputs: [out]\n")
    result = warm_drills.production(job, root=tmp_path / "root")
    verdict, leg = result.verdict, result.run.leg("run")
    assert (verdict.status, verdict.outcome, verdict.steps) == ("PASS", "completed", 12), verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 5]
    (death,) = events(leg, "death.unplanned")
    assert (death["code"], death["step"]) == ("told_to_leave", 5)
    told = f"rank 0 was told to leave ({notice}): it left after step 5"
    assert death["reason"] == told


GOES_ON = """\
import os, signal, sys

import torch

to = sys.argv[1]
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
weights, moments, stream, begin = torch.load(to)
model.load_state_dict(weights), optimizer.load_state_dict(moments), torch.set_rng_state(stream)
for step in range(begin + 1, 23):
    optimizer.zero_grad()
    model(torch.randn(2, 4)).pow(2).mean().backward()
    optimizer.step()
    if step == 15 and os.environ["CHAOSRUN_ATTEMPT"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    if step % 4 == 0:
        torch.save([model.state_dict(), optimizer.state_dict(), torch.get_rng_state(), step], to)
"""


@pytest.mark.parametrize("to", ["last.pt", "{root}/last.pt"])
def test_a_script_goes_on_from_a_checkpoint_of_its_own_that_was_there_before_and_saves_over_it(
    warm_drills: WarmDrills, tmp_path: Path, to: str
) -> None:
    """A drill refuses that, as its legs would share it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    begun = [model.state_dict(), torch.optim.AdamW(model.parameters()).state_dict(), torch.get_rng_state(), 10]
    torch.save(begun, tmp_path / "last.pt")
    (tmp_path / "train.py").write_text(GOES_ON)
    job = tmp_path / "job.yaml"
    job.write_text(f"{{name: job, script: train.py, workers: 1, args: [{to.format(root=tmp_path)}]}}\n")
    verdict = warm_drills.production(job, root=tmp_path / "root").verdict
    assert (verdict.status, verdict.code, verdict.steps) == ("PASS", "recoveries_agree", 12), verdict.cause
    assert [attempt.resumed_step for attempt in verdict.attempts] == [0, 2]
    assert torch.load(tmp_path / "last.pt")[3] == 20


def test_a_run_whose_script_failed_goes_on_once_that_is_mended(warm_drills: WarmDrills, tmp_path: Path) -> None:
    there, root = tmp_path / "data", tmp_path / "root"
    job = write_job(tmp_path, f"if step == 5 and not Path({str(there)!r}).exists():\n    raise OSError('no data')\n")
    failed = warm_drills.production(job, root=root)
    assert (failed.verdict.exit_code, failed.verdict.outcome) == (4, "user_error")
    there.touch()
    old: list[bool] = []
    again = warm_drills.production(failed.run, root=root, on_event=lambda _: old.append(failed.run.verdict_json.exists()))
    assert (again.verdict.status, again.verdict.steps) == ("PASS", STEPS), again.verdict.cause
    assert not old[-1], "killed meanwhile, it would be said to have ended as before"


def test_a_run_that_begins_anew_names_the_one_before_it_that_may_go_on(warm_drills: WarmDrills, tmp_path: Path) -> None:
    there, root = tmp_path / "data", tmp_path / "root"
    job = write_job(tmp_path, f"if step == 2 and not Path({str(there)!r}).exists():\n    raise OSError('no data')\n")
    said: list[EventText] = []

    def hear(record: dict[str, Any]) -> None:
        said.extend([EventText.notice(record)] * (record["event"] == "run.left_behind"))

    first = warm_drills.production(job, root=root, on_event=hear)
    assert not said
    second = warm_drills.production(job, root=root, on_event=hear)
    assert len(said) == 1 and f"begins anew; run {first.run.run_id} of this job has not ended" in said[0].sentence
    there.touch()
    assert warm_drills.production(second.run, root=root, on_event=hear).verdict.status == "PASS"
    assert warm_drills.production(job, root=root, on_event=hear).verdict.status == "PASS"
    assert len(said) == 1, "the last one was done"
