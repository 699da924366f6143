"""Fault presets: what a file of one may say, and that each fits any job it is given to."""

from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from chaosrun.errors import SpecError, UsageError
from chaosrun.plan.planner import make_plan
from chaosrun.plan.rules import objections
from chaosrun.spec.job_file import load_job, refused
from chaosrun.spec.preset import named_presets

JOB = "name: toy\nscript: train.py\nworkers: 2\nmax_steps: 40\ncheckpoint: {every_steps: 5}\n"


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import chaosrun\n")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_those_that_come_with_chaosrun() -> None:
    assert list(named_presets()) == ["flaky-node", "spot", "torture"]
    configs = Path(__file__).parents[2] / "configs" / "presets"
    assert sorted(path.stem for path in configs.glob("*.yaml")) == list(named_presets())


@pytest.mark.parametrize("preset", ["spot", "flaky-node", "torture"])
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize(("steps", "every"), [(2, 5), (12, 5), (40, 5), (300, 50)])
def test_each_fits_jobs_of_any_size(job: Path, preset: str, workers: int, steps: int, every: int) -> None:
    shape = [f"workers={workers}", f"max_steps={steps}", f"checkpoint.every_steps={every}", f"faults.preset={preset}"]
    plans = []
    for seed in range(4):
        spec = load_job(job, [*shape, f"faults.seed={seed}"]).spec
        plan = make_plan(spec)
        plans.append(plan)
        assert plan == make_plan(spec)  # the same again
        assert plan.faults and objections(spec, plan.faults) == []
        assert [fault.id for fault in plan.faults] == [f"F{number + 1}" for number in range(len(plan.faults))]
        assert all(1 <= (fault.at_step or 1) <= steps and fault.rank < workers for fault in plan.faults)
    assert steps == 2 or len({str(plan.faults) for plan in plans}) > 1  # another seed, other faults


def test_a_flaky_node_is_one(job: Path) -> None:
    for seed in range(8):
        spec = load_job(job, ["workers=4", "faults.preset=flaky-node", f"faults.seed={seed}"]).spec
        assert len({fault.rank for fault in make_plan(spec).faults}) == 1


def test_torture_leaves_no_phase_of_a_checkpoint_out(job: Path) -> None:
    phases = Counter(fault.phase for fault in make_plan(load_job(job, ["faults.preset=torture"]).spec).faults)
    saving = [phase for phase in phases if phase and phase.startswith("checkpoint.")]
    assert len(saving) == 8 and {"restore.begin", "restore.end", "rendezvous"} <= phases.keys()


def test_a_preset_of_ones_own(job: Path, tmp_path: Path) -> None:
    folder = tmp_path / "presets"
    folder.mkdir()
    (folder / "mine.yaml").write_text(
        "faults:\n  - {kind: kill, count: 2, within: [50%, 100%]}\n"
        "  - {kind: truncate, within: [0%, 40%], rank: 0, then: {kind: kill}}\n"
        "  - {phase: restore.end, occurrence: 1}\n  - {kind: kill, chance: 0%}\n"
    )
    job.write_text(JOB + "faults: {preset: presets/mine.yaml, schedule: [{rank: 0, at_step: 3}]}\n")
    loaded = load_job(job)
    assert loaded.spec.faults.preset and loaded.spec.faults.preset.name == "mine"
    plan = make_plan(loaded.spec)
    # In the place of the schedule; each entry in its part, what follows at its step and on its rank.
    assert Counter(fault.kind for fault in plan.faults) == {"kill": 4, "truncate": 1}
    damage = next(fault for fault in plan.faults if fault.kind == "truncate")
    after = next(fault for fault in plan.faults if fault.source.endswith(".then"))
    assert (after.at_step, after.rank) == (damage.at_step, damage.rank) and (damage.at_step or 0) <= 16
    late = [fault.at_step or 0 for fault in plan.faults if fault.source.endswith("faults[0]")]
    assert len(set(late)) == 2 and min(late) >= 20
    # A command says it as well, from wherever the job lies.
    assert load_job(job, ["faults.preset=presets/mine.yaml"]).spec == loaded.spec


@pytest.mark.parametrize(
    ("preset", "place", "message"),
    [
        ("faults: []\n", "mine.yaml:1:9", "a list with at least one entry"),
        ("falts: []\n", "mine.yaml:1:1", "did you mean 'faults'?"),
        ("faults: [{kind: kil}]\n", "mine.yaml:1:17", "did you mean 'kill'?"),
        ("faults: [{within: [80%, 20%]}]\n", "mine.yaml:1:11", "it ends before it begins"),
        ("faults: [{within: [1, 9]}]\n", "mine.yaml:1:20", "a part of the whole"),
        ("faults: [{count: 2, mean: 10%}]\n", "mine.yaml:1:21", "exclude each other"),
        ("faults: [{mean: 0%}]\n", "mine.yaml:1:11", "0% apart"),
        ("faults: [{phase: restore.begin}]\n", "mine.yaml:1:11", "no step has a restore.begin"),
        ("faults: [{occurrence: 2}]\n", "mine.yaml:1:11", "occurrence is for restore"),
        ("faults: [{at_step: 3}]\n", "mine.yaml:1:11", "at_step"),
        ("faults: [\n", "mine.yaml:2:1", "not valid YAML"),
        ("3\n", "job.yaml:6:18", "holds no keys and values"),
    ],
)
def test_what_is_wrong_in_one_is_shown_there(job: Path, tmp_path: Path, preset: str, place: str, message: str) -> None:
    (tmp_path / "mine.yaml").write_text(preset)
    job.write_text(JOB + "faults: {preset: ./mine.yaml}\n")
    with pytest.raises(SpecError) as caught:
        load_job(job)
    told = f"{caught.value}\nhint: {caught.value.hint}"
    assert f"{place}: " in told and message in told, told


def test_a_name_that_is_none(job: Path) -> None:
    with pytest.raises(SpecError, match="did you mean 'torture'") as caught:
        load_job(job, ["faults.preset=tortur"])
    assert "flaky-node, spot, torture" in str(caught.value.hint)
    with pytest.raises(SpecError, match="no such fault preset"):
        load_job(job, ["faults.preset=./none.yaml"])


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["faults.preset=spot", "max_steps=null"], "the job's length is not known, set max_steps"),
        (["faults.preset={faults: [{kind: truncate}]}"], "preset inline does not fit 40 steps: .*nobody reads the checkpoint"),
        (["faults.preset={faults: [{count: 50}]}"], "50 faults do not fit, there are 40 steps"),
        (["faults.preset={faults: [{chance: 0%}]}"], "no fault was drawn"),
    ],
)
def test_what_does_not_fit_is_refused(job: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        make_plan(load_job(job, overrides).spec)


def test_what_does_not_fit_is_shown_where_it_is_asked_for(job: Path) -> None:
    job.write_text(JOB + "faults:\n  seed: 1\n  preset: {faults: [{count: 50}]}\n")
    loaded = load_job(job)
    with pytest.raises(SpecError) as caught:
        make_plan(loaded.spec, refuse=partial(refused, loaded, []))
    assert "job.yaml:8:3: faults.preset: preset inline, faults[0]: 50 faults do not fit" in str(caught.value)


def test_it_survives_the_run_file(job: Path) -> None:
    spec = load_job(job, ["faults.preset=torture"]).spec
    assert type(spec).model_validate(spec.model_dump(mode="json")) == spec


def test_no_rank_is_told_to_leave_when_another_s_notice_has_it_leave(job: Path) -> None:
    """A notice takes effect after the next step: another one of that step may come too late to be seen."""
    for seed in range(60):
        plan = make_plan(load_job(job, ["max_steps=60", "faults.preset=spot", f"faults.seed={seed}"]).spec)
        noticed = sorted(fault.at_step or 0 for fault in plan.faults if fault.facts.notice)
        assert all(later - earlier != 1 for earlier, later in pairwise(noticed)), (seed, noticed)
