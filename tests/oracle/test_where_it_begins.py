"""A drill that begins at the reference's checkpoint before its fault finds what one from the beginning finds.

Real drills of `train.py`: the same kill, the same reference, from the beginning and from step 6; blind, so that nothing but the
verdict can notice a mutant. What must not begin there does not.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from chaosrun.api import RunResult
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.began import read_began
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.run_file import read_run
from chaosrun.spec.model import JobSpec
from chaosrun.supervise import beginning
from chaosrun.supervise.early_end import has_repeated
from chaosrun.verify.verdict import Verdict, judge
from tests.benchmarks.sweep_cost import measure
from tests.conftest import WarmDrills

pytestmark = pytest.mark.ray

HERE = Path(__file__).parent
SCRIPT = HERE / "train.py"
BEGINS = "step-00000006"
JOB = """\
name: begins
script: {script}
args: [{args}]
workers: 2
seed: 1
checkpoint: {{every_steps: 3}}
faults: {{schedule: [{{rank: 1, at_step: 7}}]}}
verify: {{confirm: false}}
timeout: 300s
"""
MUTANTS = ("optimizer-empty", "skip-one-more", "rng-torch", "clip-forgotten", "scheduler-forgotten", "evaluation-mode")
BY_DAY = frozenset({"skip-one-more"})
RIGHT = ("--loader-workers", "0")


class Drills:
    """`drills(args)`: the verdict from the beginning, the one from where a drill begins by itself, and its run."""

    def __init__(self, folder: Path, warm: WarmDrills) -> None:
        self._folder, self._warm = folder, warm
        self._whole: dict[tuple[str, ...], RunResult] = {}

    def __call__(self, *args: str, script: str = "train.py", how: str = "auto") -> tuple[Verdict, Verdict, RunLayout]:
        whole = self.whole(*args, script=script)
        of, overrides = str(whole.run.path), (f"verify.begin={how}",)
        begun = self._warm(self._job(script, args), root=self._folder, reference=of, early="always", overrides=overrides)
        return whole.verdict, begun.verdict, begun.run

    def whole(self, *args: str, script: str = "train.py") -> RunResult:
        """From the beginning, once; other legs may begin at its reference."""
        if (key := (script, *args)) not in self._whole:
            whole = self._whole[key] = self._warm(self._job(script, args), root=self._folder, early="watch")
            reference = whole.run.leg("reference")
            if not reference.repeats.exists():
                has_repeated(reference, whole.run.run_id)
            assert [attempt.resumed_from for attempt in whole.verdict.attempts] == [None, BEGINS]
        return self._whole[key]

    def _job(self, script: str, args: tuple[str, ...]) -> Path:
        job = self._folder / "job.yaml"
        job.write_text(JOB.format(script=HERE / script, args=", ".join(args)))
        return job


@pytest.fixture(scope="module")
def drills(warm_drills: WarmDrills, tmp_path_factory: pytest.TempPathFactory) -> Drills:
    return Drills(tmp_path_factory.mktemp("begins"), warm_drills)


@pytest.fixture(scope="module")
def right(drills: Drills) -> RunLayout:
    """A whole run, whose reference other legs may begin at."""
    return drills.whole(*RIGHT).run


def test_a_right_resume_passes_from_there(drills: Drills) -> None:
    whole, begun, run = drills(*RIGHT)
    assert (whole.status, begun.status) == ("PASS", "PASS"), begun.cause
    assert [attempt.resumed_from for attempt in begun.attempts] == [BEGINS, BEGINS]
    assert "; it began at step 6 from the reference's checkpoint" in begun.cause
    began = read_began(run.leg("chaos"), [])
    assert began is not None and began.step == 6 and set(began.states) == {"step-00000003", BEGINS}
    assert judge(run).cause == begun.cause  # `chaosrun verify`, later


def flip_a_bit(reference: LegLayout) -> None:
    path = next((reference.checkpoints / BEGINS).glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def rename_an_older_one(reference: LegLayout) -> None:
    shutil.rmtree(reference.checkpoints / BEGINS)
    shutil.copytree(reference.checkpoints / "step-00000003", reference.checkpoints / BEGINS)


def save_of_another_state(reference: LegLayout) -> None:
    path = reference.checkpoints / BEGINS / "MANIFEST.json"
    told = json.loads(path.read_text())
    name = next(iter(told["digests"]["model"]))
    told["digests"]["model"][name] = "0" * 16
    path.write_text(json.dumps(told))


SPOILED: dict[str, tuple[Callable[[LegLayout], object], str]] = {
    "a bit": (flip_a_bit, "not as it saved them"),
    "an older one": (rename_an_older_one, "not as it saved them"),
    "another run's": (save_of_another_state, "not as it saved them"),
    "gone": (lambda reference: shutil.rmtree(reference.checkpoints), "keeps no checkpoint before step 7"),
    "never repeated": (lambda reference: reference.repeats.unlink(), "never shown to repeat itself"),
    "wrote a file": (lambda reference: reference.attempt(1).effects(1).write_text("it wrote x"), "rank 1: it wrote x"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_what_the_reference_did_not_save_is_given_to_no_leg(right: RunLayout, tmp_path: Path, name: str) -> None:
    spoil, why = SPOILED[name]
    reference, chaos = (LegLayout(tmp_path / each) for each in ("reference", "chaos"))
    info = read_run(right)
    kept = LegLayout(Path(info.reference.source)) if info.reference.source else right.leg("reference")
    shutil.copytree(kept.path, reference.path)
    shutil.copy(right.leg("reference").repeats, reference.repeats)
    info = structs.replace(info, reference=structs.replace(info.reference, source=None))
    plan = FaultPlan.read(right.plan_json)
    asked = info, JobSpec.model_validate(info.spec), plan, reference, chaos
    assert beginning.begin(*asked).step == 6
    spoil(reference)
    began = beginning.begin(*asked)
    assert not began.states and why in began.why
    assert not chaos.checkpoints.exists()


@pytest.mark.nightly
def test_a_drill_of_a_sweep_does_what_its_fault_costs(drills: Drills, tmp_path: Path) -> None:
    """Of 18 steps with a checkpoint every 3, killed after 8: from 6 to 8, and from 6 to 9."""
    about = {"only": ("step@8/rank1",), "whole": False, "script": SCRIPT, "args": RIGHT, "at_once": 1}
    cost = measure(tmp_path / "s", steps=18, every=3, at=(8,), **about)
    assert cost.verdicts == {"step@8/rank1": "PASS"}
    assert 4 <= cost.steps - cost.undisturbed <= 5


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", [None, *MUTANTS[:5]])
def test_a_sweep_finds_the_same_at_each_point(drills: Drills, tmp_path: Path, mutant: str | None) -> None:
    args = (*RIGHT, "--blind", *(("--mutant", mutant) if mutant else ()))
    about = {"steps": 24, "every": 3, "at": (8, 14), "only": ("step", "forward"), "script": SCRIPT, "args": args}
    short, whole = (measure(tmp_path / str(whole), whole=whole, confirm=1, **about) for whole in (False, True))
    # A restore that is wrong is seen in the first attempt that restores: of a leg that begins at a checkpoint, one earlier.
    found, expected = (
        {point: re.sub(r"attempt \d+", "attempt", told) for point, told in each.verdicts.items()} for each in (short, whole)
    )
    assert found == expected
    assert any(verdict != "PASS" for verdict in short.verdicts.values()) == bool(mutant)
    assert short.steps < whole.steps


def test_asked_to_it_begins_at_the_beginning(drills: Drills) -> None:
    whole, begun, run = drills(*RIGHT, how="beginning")
    assert (whole.status, begun.status) == ("PASS", "PASS"), begun.cause
    assert [attempt.resumed_from for attempt in begun.attempts] == [None, BEGINS]
    assert not run.leg("chaos").began.exists()


def test_a_script_that_keeps_something_in_a_file_begins_at_the_beginning(drills: Drills) -> None:
    _, begun, run = drills("--hides", "file", script="hidden.py")
    began = read_began(run.leg("chaos"), [])
    assert began is not None and not began.states and "it wrote" in began.why
    assert begun.attempts[0].resumed_from is None and begun.status != "PASS"


@pytest.mark.parametrize(
    "mutant", [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in MUTANTS]
)
def test_a_wrong_resume_fails_for_the_same_reason(drills: Drills, mutant: str) -> None:
    whole, begun, _ = drills(*RIGHT, "--blind", "--mutant", mutant)
    assert begun.attempts[0].resumed_from == BEGINS
    assert whole.divergence and begun.divergence, (whole.cause, begun.cause)
    told = [
        (each.status, each.code, each.divergence and (each.divergence.kind, each.divergence.step)) for each in (whole, begun)
    ]
    assert told[0] == told[1] and told[0][0] == "FAIL", (whole.cause, begun.cause)
