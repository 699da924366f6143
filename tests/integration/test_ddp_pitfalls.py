"""What DistributedDataParallel makes of branches, seeds, static graphs and hooks: it resumes exactly, or the cause is named."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from chaosrun.api import RunResult
from chaosrun.records.layout import LegLayout
from chaosrun.verify.check import CheckResult
from chaosrun.verify.verdict import Verdict
from tests.conftest import REPOSITORY, WarmDrills
from tests.records import read_lines

pytestmark = pytest.mark.ray

TOY = REPOSITORY / "jobs" / "ddp_pitfalls" / "train.py"
SCRIPT = Path(__file__).parent / "replicas" / "train.py"
MID_EPOCH = ("{rank: 1, at_step: 15}",)
RESTORED = ("{rank: 1, at_step: 6}",)
"""After the first checkpoint of either script, in the middle of an epoch of 10, 7 or 4 steps."""
EVERYWHERE = (
    "{rank: 0, at_step: 3}",
    "{rank: 1, phase: restore.end}",
    "{rank: 1, at_step: 5, phase: reduce}",
    "{rank: 0, at_step: 6}",
    "{rank: 2, at_step: 8, phase: checkpoint.file}",
    "{rank: 1, at_step: 8, phase: checkpoint.precommit}",
    "{rank: 0, at_step: 8, phase: checkpoint.postcommit}",
    "{rank: 2, at_step: 9}",
)
JOB = """\
name: ddp
script: {script}
args: [{args}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: {every}}}
recovery: {{hang_timeout: 30s}}
faults: {{schedule: [{faults}]}}
timeout: 300s
"""


@dataclass(slots=True)
class Drills:
    """`drills(script, *args)`. All share a root, hence the cache of references."""

    folder: Path
    warm: WarmDrills
    events: list[dict[str, object]] = field(default_factory=list)

    def __call__(
        self,
        script: Path,
        *args: str,
        workers: int = 3,
        every: int = 4,
        faults: Sequence[str] = MID_EPOCH,
        reference: RunResult | None = None,
    ) -> RunResult:
        path = self.folder / "job.yaml"
        schedule = ", ".join(faults)
        path.write_text(JOB.format(script=script, args=", ".join(args), workers=workers, every=every, faults=schedule))
        self.events.clear()
        return self.warm(
            path, root=self.folder, reference=str(reference.run.path) if reference else "auto", on_event=self.events.append
        )


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("ddp"), warm_drills)


def check(verdict: Verdict, name: str) -> CheckResult:
    return next(check for check in verdict.checks if check.name == name)


def assert_exact(verdict: Verdict, faults: int = len(MID_EPOCH)) -> None:
    assert (verdict.status, verdict.exit_code) == ("PASS", 0), verdict.cause
    assert [fault.landed for fault in verdict.faults] == [True] * faults
    # What was in force is on record, and was the same in every attempt.
    assert check(verdict, "bucket_layout").status == "pass"


@pytest.fixture(scope="module")
def plain(drills: Drills) -> RunResult:
    result = drills(SCRIPT, faults=RESTORED)
    assert_exact(result.verdict, 1)
    return result


@pytest.mark.parametrize("case", ["unused", pytest.param("all-used", marks=pytest.mark.nightly), "static-graph"])
def test_branches_by_rank_resume_exactly_where_ddp_averages_them(drills: Drills, case: str) -> None:
    verdict = drills(TOY, "--case", case).verdict
    assert_exact(verdict)
    assert verdict.warnings == ()


def test_after_prepare_ranks_are_equal_although_their_seeds_are_not(drills: Drills) -> None:
    result = drills(TOY, "--case", "seeds-differ")
    assert_exact(result.verdict)
    agreement = check(result.verdict, "rank_agreement")
    assert agreement.summary == "3 ranks began 3 attempts with equal weights, and held equal weights after each step"
    assert agreement.evidence["starts"] == 3
    said = [result.run.reference.attempt(1).log(rank).read_text().splitlines()[0].split() for rank in range(3)]
    assert len({words[3] for words in said}) == 3, "the seeds gave the same weights: nothing was tested"
    assert len({words[6] for words in said}) == 1
    # The random streams stay apart: they are each rank's own, and restored as such.
    starts = [next(read_lines(result.run.reference.attempt(1).trace(rank))) for rank in range(3)]
    assert len({start["rng"] for start in starts}) == 3


def test_ranks_that_do_not_begin_equal_are_named(drills: Drills) -> None:
    verdict = drills(SCRIPT, "--break-with", "start", faults=("{rank: 0, at_step: 10}",)).verdict
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    assert "rank 2 has other weights than rank 0 at the start of attempt 1, from step 0, first in norm.weight" in verdict.cause


def test_replicas_that_drift_are_named_where_the_script_goes_on(drills: Drills) -> None:
    verdict = drills(SCRIPT, "--break-with", "replica", faults=("{rank: 0, at_step: 10}",)).verdict
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    assert check(verdict, "rank_agreement").status == "fail"
    what = "rank 2 has other weights than rank 0 after step 5 of attempt 1, first in block.bias"
    assert verdict.cause == f"replicas drifted apart: reference: {what} (in a fault-free run: recovery is not to blame)"
    assert verdict.hint is not None and "find_unused_parameters=True" in verdict.hint
    # The restore put rank 0's weights everywhere: a difference, and not a bad recovery.
    assert verdict.divergence is not None
    assert verdict.divergence.cause == "not shown to come from the restore"


def assert_reducers_complaint(verdict: Verdict, leg: LegLayout) -> list[dict[str, object]]:
    """A user error after two attempts, the second of them in DETAIL; returns the unplanned deaths."""
    assert (verdict.status, verdict.exit_code, verdict.outcome) == ("INCONCLUSIVE", 4, "user_error")
    journal = list(read_lines(leg.journal))
    assert [line["distributed_debug"] for line in journal if line["event"] == "attempt.starting"] == [False, True]
    return [line for line in journal if line["event"] == "death.unplanned"]


def test_a_branch_that_ddp_does_not_expect_lets_replicas_drift(drills: Drills) -> None:
    # With a checkpoint after every step, a restart would get one step further each time, and never end.
    result = drills(TOY, "--case", "drift", every=1)
    verdict = result.verdict
    deaths = assert_reducers_complaint(verdict, result.run.reference)
    agreement = check(verdict, "rank_agreement")
    assert agreement.status == "fail"
    found = {name: agreement.evidence[name] for name in ("leg", "rank", "other", "step", "tensor")}
    assert found == {"leg": "reference", "rank": 1, "other": 0, "step": 1, "tensor": "net1.weight"}
    what = "rank 1 has other weights than rank 0 after step 1 of attempt 1, first in net1.weight"
    assert verdict.cause.startswith(f"reference leg: the replicas had drifted apart ({what}) when rank ")
    # Only DETAIL gives names.
    assert "Parameter indices which did not receive grad for rank" in str(deaths[0]["reason"])
    assert "Parameters which did not receive grad for rank" in verdict.cause
    assert verdict.hint is not None and "find_unused_parameters=True" in verdict.hint


def test_ready_twice_is_a_user_error_that_names_the_parameter(drills: Drills) -> None:
    result = drills(TOY, "--case", "ready-twice")
    verdict = result.verdict
    deaths = assert_reducers_complaint(verdict, result.run.reference)
    assert "Expected to mark a variable ready only once (Parameter at index" in verdict.cause
    assert any(f"with name {name} has been marked as ready twice" in verdict.cause for name in ("net1.weight", "net2.weight"))
    assert verdict.hint is not None
    for words in ("outside the wrapped model's forward", "find_unused_parameters=True, DDP marks", "_set_static_graph"):
        assert words in verdict.hint
    assert [death["step"] for death in deaths] == [0, 0]
    assert "chaos" not in {event["leg"] for event in drills.events}


@pytest.mark.nightly
def test_detail_changes_no_bits(drills: Drills, plain: RunResult) -> None:
    # The complaint does not come again: the attempt in DETAIL goes on to the end, and is judged like any other.
    result = drills(SCRIPT, "--break-with", "once", faults=RESTORED, reference=plain)
    assert_exact(result.verdict, 1)
    starting = [line for line in read_lines(result.run.leg("chaos").journal) if line["event"] == "attempt.starting"]
    assert [line["distributed_debug"] for line in starting] == [False, False, True]
    assert result.verdict.attempts[-1].last_step == 14


def test_a_sampler_without_set_epoch_resumes_exactly_and_is_warned_of(drills: Drills) -> None:
    verdict = drills(TOY, "--case", "no-set-epoch").verdict
    assert_exact(verdict)
    (warning,) = verdict.warnings
    assert warning.startswith("epochs 0 and 1 had their samples in the same shuffled order: set_epoch")


STATIC = ["--static-graph", "--no-broadcast-buffers"]


@pytest.mark.nightly
def test_a_static_graph_is_primed(drills: Drills) -> None:
    # A shared block under reentrant checkpoints, unused parameters, tied weights, batch statistics of each rank's own.
    primed = drills(SCRIPT, *STATIC, faults=EVERYWHERE)
    assert_exact(primed.verdict, len(EVERYWHERE))
    # The control: not primed after a restart, it reduces in another layout.
    verdict = drills(SCRIPT, *STATIC, "--unprimed", faults=RESTORED, reference=primed).verdict
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    assert verdict.cause.startswith("gradient reduction (bucket layout)")
    assert check(verdict, "bucket_layout").status == "fail"


@pytest.mark.parametrize("workers", [3, 4])
@pytest.mark.parametrize("more", [[], ["--bucket-view"], ["--static-graph", "--bucket-view"], ["--comm-hook", "fp16"]])
@pytest.mark.nightly
def test_every_way_of_wrapping_resumes_exactly(drills: Drills, workers: int, more: list[str]) -> None:
    result = drills(SCRIPT, "--no-broadcast-buffers", *more, workers=workers, faults=EVERYWHERE)
    assert_exact(result.verdict, len(EVERYWHERE))


def test_batch_statistics_of_each_ranks_own_are_restored(drills: Drills) -> None:
    result = drills(SCRIPT, "--no-broadcast-buffers", "--bucket-view", "--accumulation", "2", faults=RESTORED)
    assert_exact(result.verdict, 1)
    ends = [list(read_lines(result.run.reference.attempt(1).trace(rank)))[-1]["digests"]["buffers"] for rank in range(3)]
    assert len({end["norm.running_mean"] for end in ends}) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("broken", ["bucket-cap", "frozen"])
def test_another_layout_after_a_restart_is_named(drills: Drills, plain: RunResult, broken: str) -> None:
    """By day the oracle's mutant "unprimed" has another one."""
    verdict = drills(SCRIPT, "--break-with", broken, faults=RESTORED, reference=plain).verdict
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3)
    layout = check(verdict, "bucket_layout")
    assert (layout.status, layout.evidence["expected"] == layout.evidence["seen"]) == ("fail", False)
    assert verdict.cause.startswith("gradient reduction (bucket layout) (first difference: step 5, rank 0, attempt 2")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--comm-hook", "power_sgd"], "communication hook powerSGD_hook keeps a state of its own (PowerSGDState)"),
        (["--static-graph", "--accumulation", "2"], "expect_autograd_hooks_ INTERNAL ASSERT FAILED"),
        (["--break-with", "hook"], "block.weight has a hook that runs after its gradient is accumulated"),
    ],
)
def test_what_cannot_go_on_exactly_ends_with_a_reason(drills: Drills, args: list[str], words: str) -> None:
    verdict = drills(SCRIPT, *args).verdict
    assert (verdict.exit_code, verdict.outcome) == (4, "user_error")
    assert words in verdict.cause


FREED = """\
import os, sys
from types import SimpleNamespace
import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from chaosrun.protocol import rendezvous

rank, folder = int(sys.argv[1]), sys.argv[2]
rendezvous.watch_rendezvous(SimpleNamespace(session=None, script=None, heart=SimpleNamespace(beat=lambda *_: None)))


def train_nothing(number):
    distributed.init_process_group("gloo", init_method=f"file://{folder}/{number}", rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    distributed.all_gather([torch.zeros(2), torch.zeros(2)], torch.ones(2))
    distributed.destroy_process_group()


os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # gloo's thread loses the processor to the one that it wakes
sys.setswitchinterval(600)  # and does not get Python's lock by waiting for it
for number in range(200):
    train_nothing(number)
os._exit(0)
"""


FORKS = """\
import os, sys
import torch
from chaosrun.protocol import rendezvous

script, *cases = sys.argv[1:]
for case in cases:
    ranks = []
    for rank in (0, 1):
        ranks.append(os.fork())
        if not ranks[-1]:
            said = os.open(f"{case}/{rank}.log", os.O_WRONLY | os.O_CREAT)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.argv = ["-c", str(rank), case]
            exec(script, {"__name__": "__main__"})
            sys.exit()
    print(*(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks), flush=True)
"""


def run_two_ranks(script: str, *cases: Path) -> list[tuple[int, str]]:
    """Exit codes and outputs of two processes for each case, which get their rank and the case's folder, forked from one that
    has imported torch."""
    command = [sys.executable, "-c", FORKS, script, *map(str, cases)]
    forks = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        codes = forks.communicate(timeout=300)[0].split()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(forks.pid, signal.SIGKILL)
        forks.wait()
    logs = [case / f"{rank}.log" for case in cases for rank in (0, 1)]
    return [(int(code), log.read_text()) for code, log in zip(codes, logs, strict=True)]


def test_a_model_that_is_freed_after_its_process_group_hangs_no_rank(tmp_path: Path) -> None:
    """Without the group that is kept it hung between the 3rd and the 67th of these (torch 2.13), in six tries of six."""
    assert run_two_ranks(FREED, tmp_path) == [(0, ""), (0, "")]


LEFT_ALONE = """\
import os, sys, time
import torch
from torch import distributed
from chaosrun.protocol import rendezvous

rank, folder = int(sys.argv[1]), sys.argv[2]
rendezvous.LEAVE_LIMIT_S = 2.0
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
if rank == 0 and not folder.endswith("slow"):
    distributed.all_reduce(torch.ones(3))
time.sleep(1.0 if rank == 0 else 0.0)
print(rendezvous.all_ranks_arrive(), flush=True)
os._exit(0)
"""


def test_a_rank_that_waits_for_one_whose_script_is_over_is_told_so(tmp_path: Path) -> None:
    """It does not wait for a message that will not be sent; one that only takes its time is waited for."""
    (over := tmp_path / "over").mkdir()
    (slow := tmp_path / "slow").mkdir()
    first, second, *both = run_two_ranks(LEFT_ALONE, over, slow)
    assert second == (0, "False\n") and first[0] == 1 and "closed by peer" in first[1]
    assert both == [(0, "True\n")] * 2
