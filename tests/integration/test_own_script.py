"""Drills of a script as it is, without a job file: the default plan, folders of each leg's own, and what cannot be drilled."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.layout import LegLayout
from chaosrun.spec.command_line import JobOptions, TypedJob, typed_job
from tests.conftest import WarmDrills
from tests.e2e.drills import events

SCRIPT = Path(__file__).parents[1] / "e2e" / "own" / "train.py"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "job"
    folder.mkdir()
    shutil.copy(SCRIPT, folder / "train.py")
    return folder


def leaving_at_once(folder: Path) -> None:
    """The script ends as one that would not wait for threads and exit handlers."""
    with (folder / "train.py").open("a") as script:
        script.write("    os._exit(0)\n")


def typed(folder: Path, *args: str, kill: tuple[str, ...] = ()) -> TypedJob:
    return typed_job(Path("train.py"), args, JobOptions(workers=2, kill=kill), folder)


def test_the_default_plan(job: Path, tmp_path: Path, warm_drills: WarmDrills) -> None:
    leaving_at_once(job)
    result = warm_drills(typed(job), root=tmp_path)
    assert (result.verdict.status, result.verdict.resume_by) == ("PASS", "script")
    plan = FaultPlan.read(result.run.plan_json)
    assert [fault.phase for fault in plan.faults].count("save") == (shutil.which("strace") is not None)
    assert len(plan.faults) >= 4 and all(fault.landed for fault in result.verdict.faults)
    assert os.listdir(job) == ["train.py"]
    # What it saved lies in the leg; what is there of the job's leads to it.
    leg = LegLayout(result.run.path / "chaos")
    assert [end["by"] for end in events(leg, "leg.finished")] == ["script"], "its last step is no checkpoint's"
    work = leg.work
    assert (work / "out" / "last.pt").is_file() and (work / "train.py").is_symlink()


@pytest.mark.nightly
def test_ranks_of_a_command_leave_on_a_notice_as_they_like(job: Path, tmp_path: Path, warm_drills: WarmDrills) -> None:
    """With exit code 0, each in its own time. They use chaosrun before their processes are known to be ranks, too."""
    leaving_at_once(job)
    command = (str(Path(sys.executable).with_name("torchrun")), "--nproc-per-node", "2", "train.py", "--on-notice")
    result = warm_drills(typed_job(None, command, JobOptions(preempt=("all@9",)), job), root=tmp_path)
    assert (result.verdict.status, result.verdict.resume_by) == ("PASS", "script"), result.verdict.cause
    assert [fault.landed for fault in result.verdict.faults] == [True, True]
    exits = events(LegLayout(result.run.path / "chaos"), "worker.exited")
    assert [(each["exit_code"], each["attempt"]) for each in exits] == [(0, 1), (0, 1), (0, 2), (0, 2)]


LEAVING = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist

told = []
signal.signal(signal.SIGTERM, lambda *_: told.append(1))
dist.init_process_group("gloo")
torch.manual_seed(1)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
path, done = pathlib.Path("last.pt"), 0
if path.exists():
    state = torch.load(path)
    model.load_state_dict(state["model"])
    done = state["done"]
while done < 12:
    optimizer.zero_grad()
    model(torch.full((2, 4), done / 10)).sum().backward()
    optimizer.step()
    done += 1
    leave = torch.tensor(float(bool(told)))
    dist.all_reduce(leave)
    if dist.get_rank() == 0 and (leave or done % 4 == 0):
        torch.save({"model": model.state_dict(), "done": done}, path)
    dist.barrier()
    if leave:
        time.sleep(1.0 if told else 0.0)
        sys.exit(143)
"""


def test_the_rank_that_was_told_to_leave_may_be_the_last_to_go(tmp_path: Path, warm_drills: WarmDrills) -> None:
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "train.py").write_text(LEAVING)
    result = warm_drills(typed_job(Path("train.py"), (), JobOptions(workers=2, preempt=("0@6",)), folder), root=tmp_path)
    assert result.verdict.status == "PASS", result.verdict.cause
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, 7]
    assert events(LegLayout(result.run.path / "chaos"), "death.unplanned") == []


@pytest.mark.nightly
def test_what_was_there_is_not_touched(job: Path, tmp_path: Path, warm_drills: WarmDrills) -> None:
    (job / "team").mkdir()
    (job / "team" / "next.pt").write_text("of another run")
    result = warm_drills(typed(job, "--out", "team", kill=("1@9",)), root=tmp_path)
    assert (result.verdict.status, result.verdict.exit_code) == ("INCONCLUSIVE", 4)
    assert "which was there before: a drill never overwrites what another run left" in result.verdict.headline
    assert (result.verdict.hint or "").startswith("outputs=[team] gives each leg its own")
    # The way out.
    again = typed(job, "--out", "team", kill=("1@9",))
    assert warm_drills(again, root=tmp_path, overrides=["outputs=[team]"]).verdict.status == "PASS"
    assert warm_drills(typed(job, "--out", "{output}", kill=("1@9",)), root=tmp_path).verdict.status == "PASS"
    outside = warm_drills(typed(job, "--out", str(tmp_path / "new"), kill=("1@9",)), root=tmp_path)
    assert "both legs would share it" in outside.verdict.headline and not (tmp_path / "new").exists()
    assert [path.read_text() for path in (job / "team").iterdir()] == ["of another run"]


@pytest.mark.nightly
def test_a_fail_can_be_diagnosed(job: Path, tmp_path: Path, warm_drills: WarmDrills) -> None:
    run = warm_drills(typed(job, "--leave-out", "optimizer", kill=("1@9",)), root=tmp_path).run
    found = warm_drills.diagnose(run)
    assert found.reproduced and found.divergence is not None and found.divergence.cause == "optimizer state not restored"
    assert found.comparison.finding is not None and found.comparison.finding.quantity == "optimizer state"
    assert found.hazard is not None and found.hazard.row == found.divergence.reason.hazard


@pytest.mark.nightly
@pytest.mark.parametrize(("left_out", "said"), [("step", "without a step of an optimizer"), ("save", "saved nothing that")])
def test_what_cannot_be_drilled(job: Path, tmp_path: Path, warm_drills: WarmDrills, left_out: str, said: str) -> None:
    with pytest.raises(UsageError, match=said) as caught:
        warm_drills(typed(job, "--leave-out", left_out, kill=("1@9",)), root=tmp_path)
    assert caught.value.hint


@pytest.mark.nightly
def test_an_earlier_run_that_left_nothing_to_do_is_named(job: Path, tmp_path: Path, warm_drills: WarmDrills) -> None:
    subprocess.run([sys.executable, "train.py"], cwd=job, check=True)
    nothing = warm_drills(typed_job(Path("train.py"), (), JobOptions(workers=1), job), root=tmp_path).verdict
    assert (nothing.status, nothing.blame.whose) == ("INCONCLUSIVE", "yours")
    assert "the script ended without a step of any optimizer" in nothing.headline
    assert nothing.hint == "it read out/last.pt: if an earlier run left that, outputs=[out] hides it from each leg"
    part = typed_job(Path("train.py"), ("--epochs", "4"), JobOptions(workers=1), job)
    verdict = warm_drills(part, root=tmp_path).verdict
    assert verdict.cause.count("the script began with out/last.pt, which another run left, and saves it anew") == 1
