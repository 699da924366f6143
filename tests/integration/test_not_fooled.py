"""The verdict is not fooled: by records that were changed, faults that never fired, jobs that do not repeat themselves, stale
references. (Recoveries that are not exact: tests/oracle.)

Real drills, all on the same two placements (2 and 3 workers), so that each costs a few restarts and not a start of everything.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy
import pytest
import xxhash

from chaosrun import api
from chaosrun.errors import UsageError
from chaosrun.records.layout import MANIFEST_NAME, RunLayout
from chaosrun.records.manifest import FileEntry, Manifest
from chaosrun.verify.code_checks import WANDERS, irreproducible
from chaosrun.verify.verdict import Verdict
from tests.conftest import WarmDrills

pytestmark = pytest.mark.ray

SCRIPT = Path(__file__).parent / "mutants" / "train.py"
SAMPLES = 83
STEPS = 18
"""3 epochs of 6 steps: 11 batches on each of 2 workers, 2 of them a step."""
CHECKPOINT_EVERY = 4
KILLED_AT = 10
"""In the middle of the second epoch, and two steps after its only checkpoint."""
RESUMED = 9
"""The first step after the restore."""

JOB = """\
name: mutant
script: {script}
args: [{args}]
workers: {workers}
seed: 1
checkpoint: {{every_steps: {every}}}
faults: {{schedule: [{{rank: 1, at_step: {at_step}}}]}}
timeout: 300s
"""


@dataclass(slots=True)
class Drills:
    """`drills(*args)`: a drill of the script with these arguments. All share a root, hence the cache of references."""

    folder: Path
    warm: WarmDrills
    events: list[str] = field(default_factory=list)
    """"leg: event" of the latest drill."""

    @property
    def data(self) -> Path:
        return self.folder / "data.npz"

    def __call__(
        self, *args: str, workers: int = 2, at_step: int = KILLED_AT, reference: RunLayout | None = None, prime: bool = True
    ) -> api.RunResult:
        job_path = self.folder / "job.yaml"
        words = ", ".join(["--data", str(self.data), *args])
        job_path.write_text(JOB.format(script=SCRIPT, args=words, workers=workers, every=CHECKPOINT_EVERY, at_step=at_step))
        self.events.clear()
        return self.warm(
            job_path,
            root=self.folder,
            overrides=[f"prime_buckets={str(prime).lower()}"],
            reference=str(reference.path) if reference else "auto",
            on_event=lambda record: self.events.append(f"{record['leg']}: {record['event']}"),
        )


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    found = Drills(tmp_path_factory.mktemp("mutants"), warm_drills)
    write_data(found.data, seed=0)
    return found


def write_data(path: Path, seed: int) -> None:
    rng = numpy.random.default_rng(seed)
    numpy.savez(path, features=rng.standard_normal((SAMPLES, 16), dtype="float32"), classes=rng.integers(4, size=SAMPLES))


@pytest.fixture(scope="module")
def sound(drills: Drills) -> RunLayout:
    """The control: the very same script without a mutant passes. Its reference is that of the mutants, too."""
    result = drills()
    assert result.verdict.status == "PASS", result.verdict.cause
    assert result.verdict.steps == STEPS
    assert [attempt.resumed_step for attempt in result.verdict.attempts] == [0, RESUMED - 1]
    return result.run


def assert_fail(verdict: Verdict, cause: str) -> None:
    assert (verdict.status, verdict.exit_code) == ("FAIL", 3), verdict.cause
    assert re.search(cause, verdict.cause), verdict.cause


def assert_inconclusive(verdict: Verdict, cause: str) -> None:
    assert (verdict.status, verdict.exit_code) == ("INCONCLUSIVE", 6), verdict.cause
    assert re.search(cause, verdict.cause), verdict.cause
    assert "restore" not in verdict.cause


def test_one_bit_of_one_ranks_final_weights(drills: Drills, sound: RunLayout) -> None:
    verdict = drills("--mutant", "final-bit", reference=sound).verdict
    assert_fail(verdict, r"^final_weights: model: 0\.weight differ on rank 1$")
    # Recovery was blamed only after a second undisturbed run had agreed with the first.
    assert "confirm: leg.finished" in drills.events
    assert [check.name for check in verdict.checks if check.status == "fail"] == ["final_weights"]


def reseal(checkpoint: Path) -> None:
    """Have the manifest promise what the file now holds: two records that agree with each other, and are both wrong."""
    path = checkpoint / MANIFEST_NAME
    manifest = Manifest.from_bytes(path.read_bytes())
    content = (checkpoint / "model.safetensors").read_bytes()
    forged = FileEntry(size=len(content), xxh3=xxhash.xxh3_128_hexdigest(content))
    path.write_bytes(manifest.model_copy(update={"files": {**manifest.files, "model.safetensors": forged}}).to_bytes())


def leave(checkpoint: Path) -> None:
    pass


@pytest.mark.parametrize(("also", "words"), [(leave, "sha256|hash|content"), (reseal, "differs")])
def test_one_bit_of_the_final_checkpoints_file(
    sound: RunLayout, tmp_path: Path, also: Callable[[Path], None], words: str
) -> None:
    shutil.copytree(sound.path, tmp_path / "run")
    run = RunLayout(tmp_path / "run")
    assert api.verify(run).status == "PASS"
    weights = run.leg("chaos").checkpoints / f"step-{STEPS:08d}" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    also(weights.parent)
    assert_fail(api.verify(run), rf"^final_checkpoint: .*model\.safetensors.*({words})")


@pytest.fixture(scope="module")
def sound_at_three(drills: Drills) -> RunLayout:
    """The control: three workers whose buckets are primed pass."""
    result = drills(workers=3)
    assert result.verdict.status == "PASS", result.verdict.cause
    assert {check.name: check.status for check in result.verdict.checks}["bucket_layout"] == "pass"
    return result.run


@pytest.mark.nightly
def test_bucket_priming_off_in_all_attempts_at_three_workers(drills: Drills, sound_at_three: RunLayout) -> None:
    # As the job asks for it, layouts are not checked: the bits differ. Off after the restart alone, it is a mutant.
    verdict = drills(workers=3, prime=False).verdict
    assert_fail(verdict, r"^gradient reduction \(bucket layout\)")
    assert verdict.divergence is not None
    assert (verdict.divergence.kind, verdict.divergence.step) == ("gradient", RESUMED)
    assert verdict.divergence.ranks == (0, 1, 2)
    assert {check.name: check.status for check in verdict.checks}["bucket_layout"] == "skip"


def test_a_fault_that_never_fires(drills: Drills, sound: RunLayout) -> None:
    # Only the undisturbed run tells where this job ends: no leg under faults is run in vain.
    with pytest.raises(UsageError, match=rf"step {STEPS + 1} is never reached: the reference run ended at step {STEPS}\n"):
        drills(at_step=STEPS + 1, reference=sound)


@pytest.mark.parametrize(
    ("mutant", "killed_at", "named", "step"),
    [
        # Its first attempt shows it already; by day oracle/practices.yaml has one that does ("wall-clock").
        pytest.param("random", 1, False, 1, marks=pytest.mark.nightly),
        # Its first attempt, killed before, shows nothing: only a second undisturbed run tells this from a bad recovery,
        # even where the difference begins with the very first step after a restore.
        ("random-later", 4, False, 5),
        # The reference that was asked for is another job's: a run of this one undisturbed tells.
        ("random-later", 2, True, 5),
    ],
)
def test_a_script_that_is_itself_random_is_not_blamed_on_recovery(
    drills: Drills, sound: RunLayout, mutant: str, killed_at: int, named: bool, step: int
) -> None:
    verdict = drills("--mutant", mutant, at_step=killed_at, reference=sound if named else None).verdict
    what = (
        f"the reference of run {sound.run_id} is not this job's" if named else "two fault-free runs of this job already differ"
    )
    assert_inconclusive(verdict, f"^{what}.*: (rng|loss) at step {step}")
    wanders = "rng" if ": rng at" in verdict.cause else "loss"
    # What to set where this quantity is the first that differs; of a reference that was named, nobody knows whether it is.
    another = "leave out --reference, or name a run made since the script, its data or the machine changed"
    advice = f"{verdict.hint}"
    assert advice.startswith(another) if named else advice == WANDERS[irreproducible(wanders)].hint
    assert verdict.divergence is not None
    assert "not restored" not in f"{verdict.divergence.cause} {verdict.divergence.hint}"
    reproducible = next(check for check in verdict.checks if check.name == "reproducible")
    assert reproducible.status == ("inconclusive" if killed_at >= step else "pass")


@pytest.mark.parametrize(
    ("mutant", "killed"),
    [pytest.param((), KILLED_AT, marks=pytest.mark.nightly), (("--mutant", "late-data"), 4)],
    ids=["from-the-first-step", "after-the-kill"],
)
def test_a_stale_reference_is_replaced_and_the_job_passes(drills: Drills, mutant: tuple[str, ...], killed: int) -> None:
    assert drills(*mutant, at_step=killed).verdict.status == "PASS"
    before = drills.data.read_bytes()
    write_data(drills.data, seed=1)
    try:
        result = drills(*mutant, at_step=killed)
        assert "reference: reference.cached" in drills.events
        # Where the first attempt had agreed with it, two runs made now have to be alike.
        assert drills.events.count("confirm: leg.finished") == (2 if mutant else 1)
        assert "replaced by a new run" in result.verdict.warnings[0]
        assert result.verdict.status == "PASS", result.verdict.cause
        assert json.loads(result.run.run_json.read_text())["reference"]["source"] is None
        # The replacement is what the next drill finds.
        again = drills(*mutant, at_step=killed)
        assert [event for event in drills.events if not event.startswith("chaos")] == ["reference: reference.cached"]
        assert again.verdict.status == "PASS", again.verdict.cause
    finally:
        drills.data.write_bytes(before)


@pytest.mark.nightly
def test_a_script_that_is_random_later_does_not_pass_with_a_reference_from_the_cache(drills: Drills) -> None:
    for cached in (False, True):
        verdict = drills("--mutant", "random-later", at_step=4).verdict
        assert not cached or "reference: reference.cached" in drills.events
        assert_inconclusive(verdict, "^two fault-free runs of this job already differ")
