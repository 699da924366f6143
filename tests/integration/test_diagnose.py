"""`chaosrun diagnose` on real runs that failed: the first quantity that differs, where, by how much, and the hazard behind it.

Restores are broken by the mutants of tests/oracle at three workers; drills and replays take place on placements that stay warm.
"""

import hashlib
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chaosrun import api
from chaosrun.errors import InterruptedRunError, UsageError
from chaosrun.records.layout import RunLayout
from chaosrun.report.diagnosis import render_diagnosis
from chaosrun.report.output import rendered
from chaosrun.supervise.supervisor import Supervisor
from chaosrun.verify.diagnosis import Diagnosis
from tests.conftest import WarmDrills
from tests.integration import test_not_fooled as undisturbed
from tests.oracle.mutants import EVERY_STEPS, MUTANTS
from tests.oracle.test_mutants import EXPECTED, KILLED, RESUMED, SCRIPT, STEPS

pytestmark = pytest.mark.ray

JOB = """\
name: diagnosed
script: {script}
args: [{args}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: {every}, keep: {keep}, storage: {storage}}}
faults: {{schedule: [{{rank: 1, at_step: {killed}}}]}}
verify: {{confirm: {confirm}}}
timeout: 300s
"""
KEPT = 9
"""Every checkpoint."""
NEVER_TWICE_ALIKE = {"hash-order"}
NO_QUANTITY = {"position-miscounted", "older-checkpoint"}
"""Mutants under which every step is computed as in the reference: what went wrong is the count, or the choice."""


class Runs:
    """`runs(*args)`: a run of the script with these arguments, killed one step after its second checkpoint."""

    def __init__(self, folder: Path, warm: WarmDrills) -> None:
        self.folder, self.warm = folder, warm

    def __call__(
        self,
        *args: str,
        script: Path = SCRIPT,
        workers: int = 3,
        every: int = EVERY_STEPS,
        keep: int = 2,
        killed: int = KILLED,
        storage: str = "null",
        confirm: bool = False,
        reference: RunLayout | None = None,
    ) -> RunLayout:
        job = self.folder / "job.yaml"
        settings = {"every": every, "keep": keep, "storage": storage, "killed": killed, "confirm": str(confirm).lower()}
        job.write_text(JOB.format(script=script, args=", ".join(args), workers=workers, **settings))
        return self.warm(job, root=self.folder, reference=str(reference.path) if reference else "auto").run

    def plain(self, mutant: str, *, killed: int, confirm: bool = False) -> RunLayout:
        """Of the script whose mutants are not of the restore."""
        data = self.folder / "data.npz"
        undisturbed.write_data(data, seed=0)
        args = ("--data", str(data), "--mutant", mutant)
        return self(*args, script=undisturbed.SCRIPT, workers=2, every=4, killed=killed, confirm=confirm)


@pytest.fixture(scope="module")
def runs(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("diagnosed"), warm_drills)


@pytest.fixture(scope="module")
def sound(runs: Runs) -> RunLayout:
    """The very same script without a mutant passes. Its reference is that of the mutants, too."""
    run = runs()
    assert api.verify(run).status == "PASS"
    return run


def fingerprints(folder: Path) -> dict[str, str]:
    """Every file of a run but what a diagnosis may write."""
    own = {"diagnosis", "diagnosis.json", "lock"}
    paths = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.relative_to(folder).parts[0] not in own]
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def checked(runs: Runs, run: RunLayout, diagnose: Callable[[RunLayout], Diagnosis] | None = None) -> Diagnosis:
    """The diagnosis, which has left the run and the cache of references as they were."""
    before = fingerprints(run.path), fingerprints(runs.folder / "references")
    found = (diagnose or runs.warm.diagnose)(run)
    assert (fingerprints(run.path), fingerprints(runs.folder / "references")) == before
    assert json.loads(run.diagnosis_json.read_text()) == json.loads(json.dumps(found.to_json()))
    for name in ("reference", "chaos"):
        assert not run.replay(name).checkpoints.exists()
    return found


def differing(found: Diagnosis) -> set[str]:
    return {entry.quantity for entry in found.comparison.quantities if entry.finding}


def page(found: Diagnosis, run: RunLayout) -> str:
    return rendered(render_diagnosis(found, run), width=120, colour=False)


def test_random_streams_that_were_not_restored(runs: Runs, sound: RunLayout) -> None:
    run = runs("--mutant", "rng-torch", "--blind", reference=sound)
    found = checked(runs, run)
    first = found.comparison.finding
    assert first is not None and first.difference is not None
    assert (first.quantity, first.tensor, first.step, first.ranks) == ("rng", "torch", RESUMED, (0, 1, 2))
    assert (first.tensors, first.micro_batch) == (1, 0)
    assert (found.reproduced, found.exit_code) == (True, 0)
    assert found.account == "the replay differs where the run did, in the same bits"
    assert found.hazard is not None and found.hazard.row == "R2"
    # Dropout shows it; what comes before it does not.
    assert {"loss", "local gradients", "parameters after"} <= differing(found)
    assert not differing(found) & {"sample ids", "batch", "parameters before", "optimizer state", "learning rate"}
    assert (found.replay.start, found.replay.attempts, found.replay.steps) == (None, 2, RESUMED + 1)
    assert found.replay.why == f"no checkpoint older than step {RESUMED - 1} was kept (checkpoint.keep)"
    assert found.replay.faults == (f"SIGKILL rank 1 after step {KILLED}",)
    shown = page(found, run)
    assert f"SHOWN     rng first (step {RESUMED}, rank 0, torch)" in shown
    assert "hazard    R2: " in shown and "docs/hazards.md#r2" in shown


@pytest.mark.nightly
def test_gradients_that_were_reduced_in_another_layout(runs: Runs, sound: RunLayout) -> None:
    found = checked(runs, runs("--mutant", "unprimed", "--blind", reference=sound))
    first = found.comparison.finding
    assert first is not None and first.difference is not None
    # Every rank computed the same gradient as in the reference, and their sum is another one.
    assert (first.quantity, first.step, first.ranks) == ("reduced gradients", RESUMED, (0, 1, 2))
    assert "local gradients" not in differing(found)
    assert found.hazard is not None and found.hazard.row == "C1"
    difference = first.difference
    assert difference.dtype == "float32" and difference.differing > 0
    assert difference.max_ulp is not None and 0 < difference.max_ulp < 1 << 16
    assert 0 < abs(float.fromhex(difference.expected) - float.fromhex(difference.seen)) < 1e-6


@pytest.mark.nightly
def test_a_skipped_batch_from_an_older_common_checkpoint(runs: Runs) -> None:
    # The checkpoint of step 4 is at the end of an epoch, where nothing is skipped: its restore is exact, that of step 6 is not.
    run = runs("--mutant", "skip-one-more", "--blind", every=2, keep=KEPT, storage="elsewhere")
    storage = runs.folder / "elsewhere" / run.run_id
    before = fingerprints(storage)
    assert any("chaos/checkpoints/step-00000004" in name for name in before)
    found = checked(runs, run)
    assert fingerprints(storage) == before and not (storage / "diagnosis").exists()
    first = found.comparison.finding
    assert first is not None
    assert (first.quantity, first.step, first.attempt, first.micro_batch) == ("sample ids", RESUMED, 2, 0)
    assert first.expected != first.seen and json.loads(first.seen or "")
    assert found.hazard is not None and found.hazard.row == "D8"
    assert found.replay.start == "step-00000004"
    assert found.account == "the replay differs where the run did, in the same bits"


@pytest.mark.nightly
def test_moments_that_were_dropped_where_every_restore_drops_them(runs: Runs) -> None:
    # chaosrun refuses the restore; the replays go on with what came back. From step 3 the undisturbed one is wrong already.
    run = runs("--mutant", "optimizer-empty", keep=KEPT)
    assert api.verify(run).outcome == "inexact_restore"
    found = checked(runs, run)
    first = found.comparison.finding
    assert first is not None
    assert (first.quantity, first.step, first.problem) == ("optimizer state", RESUMED, "the chaos leg does not have it")
    assert "parameters after" in differing(found) and "reduced gradients" not in differing(found)
    assert found.hazard is not None and found.hazard.row == "O3"
    assert found.replay.start is None
    assert found.replay.why.startswith("going on from step-00000003 is not exact by itself (optimizer at step 4")
    assert (found.reproduced, found.hint) == (True, api.verify(run).hint)


@pytest.mark.nightly
def test_a_bit_that_only_the_end_shows(runs: Runs) -> None:
    # All the way: with the run locked, and on placements of its own.
    found = checked(runs, runs.plain("final-bit", killed=undisturbed.KILLED_AT), api.diagnose)
    first = found.comparison.finding
    assert first is not None and first.difference is not None
    assert (first.at_end, first.step, first.ranks, first.tensor) == (True, undisturbed.STEPS, (1,), "0.weight")
    assert (first.difference.differing, first.difference.max_ulp) == (1, 1)
    assert found.reproduced


def test_a_job_that_does_not_repeat_itself_proves_nothing(runs: Runs) -> None:
    run = runs.plain("random-later", killed=6, confirm=True)
    found = checked(runs, run)
    assert (found.reproduced, found.exit_code) == (False, 6)
    assert "the fault-free replay is not the run's reference (loss at step 5, rank 0)" in found.account
    assert "the job does not give the same numbers twice" in found.account
    first = found.comparison.finding
    assert first is not None and (first.quantity, first.step, first.micro_batch) == ("loss", 5, 0)
    assert found.hazard is not None and found.hazard.row == "K4"
    assert "NOT SHOWN  the fault-free replay" in page(found, run)


def test_a_run_that_passed_has_nothing_to_show(runs: Runs, sound: RunLayout) -> None:
    with pytest.raises(UsageError, match="passed"):
        runs.warm.diagnose(sound)
    assert not sound.diagnosis.exists()


@pytest.mark.nightly
def test_an_interrupted_diagnosis_leaves_the_run_alone(runs: Runs, sound: RunLayout) -> None:
    from chaosrun.cluster.workers import ClusterWorkers
    from chaosrun.supervise.diagnosis import diagnose, open_case
    from chaosrun.supervise.drill import LegRunner

    failed = runs("--mutant", "rate-overwritten", "--blind", reference=sound)
    failed.diagnosis_json.write_text("of an earlier diagnosis")
    case = open_case(failed)
    workers = ClusterWorkers(runs.warm._cluster(3), case.drill.spec)
    supervisors: list[Supervisor] = []
    before = fingerprints(failed.path)

    def on_record(record: dict[str, Any]) -> None:
        if record["leg"] == "diagnosis/chaos" and record["event"] == "attempt.started":
            threading.Timer(0.05, supervisors[-1].interrupt).start()

    def on_supervisor(supervisor: Supervisor | None) -> None:
        if supervisor:
            supervisors.append(supervisor)

    with pytest.raises(InterruptedRunError, match="interrupted in a replay") as error:
        diagnose(case, LegRunner(workers=workers, on_record=on_record, on_supervisor=on_supervisor))
    assert error.value.hint is not None and f"chaosrun diagnose {failed.run_id}" in error.value.hint
    assert fingerprints(failed.path) == before
    assert not failed.diagnosis_json.exists()
    # The next one begins anew.
    (failed.diagnosis / "stale").touch()
    found = checked(runs, failed)
    assert not (failed.diagnosis / "stale").exists()
    first = found.comparison.finding
    assert first is not None and (first.quantity, first.tensor) == ("optimizer state", "0/param_groups/0/lr")
    assert found.hazard is not None and found.hazard.row == "O4"


@pytest.mark.nightly
@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_seen_up_close(runs: Runs, name: str) -> None:
    run = runs("--mutant", name, "--blind", *EXPECTED[name].args)
    found = checked(runs, run)
    assert found.reproduced, found.account
    bits = "other" if name in NEVER_TWICE_ALIKE else "the same"
    assert found.account.startswith(f"the replay differs where the run did, in {bits} bits")
    assert found.hazard is not None, page(found, run)
    first = found.comparison.finding
    assert (first is None) == (name in NO_QUANTITY), page(found, run)
    assert first is None or (EXPECTED[name].step <= STEPS[3] and set(first.ranks) <= set(EXPECTED[name].ranks))
