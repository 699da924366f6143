"""What a sweep tries, how it is kept, what it says: from recorded passages to plans, one verdict from many, one page."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosrun.campaign.files import Sweep, SweepFolder
from chaosrun.campaign.report.text import render_sweep
from chaosrun.campaign.results import PointResult
from chaosrun.campaign.sweep import is_of_job
from chaosrun.errors import UsageError
from chaosrun.plan.planner import make_plan
from chaosrun.plan.points import Passage, Point, chosen_steps, enumerate_points, first_kill, matching, saved_steps
from chaosrun.records.run_file import Early
from chaosrun.report.output import rendered
from chaosrun.report.ticker import Ticker, tick
from chaosrun.spec.fragment import scheduled
from chaosrun.spec.job_file import load_job
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.early_end import reference_keys

STEPS, EVERY, AN_EPOCH = 12, 5, 4
SAVED = [5, 10, 12]
"""The last at the end of the script, which the job file does not tell."""
IN_A_STEP = ("fetch", "forward", "reduce", "optimizer", "record")
FILES = ("model.safetensors", ".", "model.safetensors")
"""The model's is synced twice."""


def leg(workers: int, after: int = 0) -> Iterator[Passage]:
    """The points that the ranks reach of an attempt that continues after step `after`."""
    for rank in range(workers):
        yield Passage(rank=rank, phase="rendezvous", step=0)
        if after:
            yield Passage(rank=rank, phase="restore.begin", step=after)
            yield Passage(rank=rank, phase="restore.end", step=after)
        for step in range(after + 1, STEPS + 1):
            yield from (Passage(rank=rank, phase=phase, step=step) for phase in IN_A_STEP)
            if step in SAVED:
                yield Passage(rank=rank, phase="checkpoint.begin", step=step)
                for target in FILES if rank == 0 else ():
                    yield Passage(rank=rank, phase="checkpoint.fsync.before", step=step, target=target)
                yield Passage(rank=rank, phase="checkpoint.postcommit", step=step)
            yield Passage(rank=rank, phase="step", step=step)


def spec(workers: int = 2, **values: object) -> JobSpec:
    job = {"name": "x", "script": "train.py", "workers": workers, "checkpoint": {"every_steps": EVERY}, **values}
    return JobSpec.model_validate(job)


def points(workers: int = 2, **values: object) -> list[Point]:
    return enumerate_points(spec(workers, **values), leg(workers), leg(workers, SAVED[0]), steps=(1, 5, 7))


def by_id(found: list[Point]) -> dict[str, Point]:
    return {point.id: point for point in found}


class TestChoice:
    def test_steps_stand_for_all(self) -> None:
        epochs = {step: (step - 1) // AN_EPOCH for step in range(1, STEPS + 1)}
        assert saved_steps(leg(2)) == SAVED
        # The first; the first of the second epoch; near the middle one without a checkpoint, one with; the last.
        assert chosen_steps(epochs, SAVED) == (1, 5, 7, 10, 12)
        assert chosen_steps(epochs, [12]) == (1, 5, 7, 12)
        assert chosen_steps({1: 0}, [1]) == (1,)
        assert chosen_steps({}, []) == ()

    @given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 60))
    def test_of_any_job(self, steps: int, an_epoch: int, every: int) -> None:
        epochs = {step: (step - 1) // an_epoch for step in range(1, steps + 1)}
        saved = [step for step in epochs if step % every == 0 or step == steps]
        chosen = chosen_steps(epochs, saved)
        assert chosen[0] == 1 and chosen[-1] == steps and len(chosen) <= 5
        assert set(chosen) <= epochs.keys()
        if an_epoch < steps:
            assert an_epoch + 1 in chosen
        assert set(saved) & set(chosen)
        assert every == 1 or steps < 3 or set(chosen) - set(saved)

    def test_patterns(self) -> None:
        found = points()
        assert matching(found, []) == found
        phases = {f"checkpoint.{name}" for name in ("begin", "fsync.before", "postcommit")}
        assert {point.phase for point in matching(found, ["checkpoint.*"])} == phases
        assert {point.recovering for point in matching(found, ["recovery/*"])} == {True}
        assert [point.id for point in matching(found, ["reduce@7/rank1"])] == ["reduce@7/rank1"]
        assert matching(found, ["nowhere"]) == []


class TestPoints:
    def test_one_plan_each(self) -> None:
        found = by_id(points())
        assert found["reduce@7/rank1"].schedule == ({"rank": 1, "phase": "reduce", "at_step": 7},)
        assert found["rendezvous/rank0"].schedule == ({"rank": 0, "phase": "rendezvous", "occurrence": 1},)
        synced = found["checkpoint.fsync.before@10/rank0/model.safetensors"]
        assert synced.schedule == ({"rank": 0, "phase": "checkpoint.fsync.before", "at_step": 10, "file": "model.safetensors"},)
        again = found["checkpoint.fsync.before@10/rank0/model.safetensors/#2"]
        assert again.schedule[0] == {**synced.schedule[0], "occurrence": 2}

    def test_a_last_checkpoint_that_only_the_script_knows(self) -> None:
        """is the third, and its second sync of a file that file's sixth."""
        synced = {"rank": 0, "phase": "checkpoint.fsync.before", "file": "model.safetensors"}
        found = by_id(points())
        assert found["checkpoint.begin@12/rank1"].schedule[0]["occurrence"] == 3
        assert found["checkpoint.fsync.before@12/rank0/model.safetensors/#2"].schedule[0] == {**synced, "occurrence": 6}
        found = by_id(points(max_steps=STEPS))
        assert found["checkpoint.begin@12/rank1"].schedule[0]["at_step"] == 12
        twice = {**synced, "at_step": 12, "occurrence": 2}
        assert found["checkpoint.fsync.before@12/rank0/model.safetensors/#2"].schedule[0] == twice

    def test_a_phase_that_comes_twice_in_a_step_is_one_point(self) -> None:
        twice = [passage for passage in leg(1) for _ in range(2 if passage.phase == "forward" else 1)]
        assert enumerate_points(spec(1), twice, [], steps=(1,)) == enumerate_points(spec(1), leg(1), [], steps=(1,))

    def test_what_follows_a_kill_has_two(self) -> None:
        found = by_id(points())
        kill = first_kill(spec())
        assert kill == {"rank": 1, "phase": "checkpoint.postcommit"}
        assert found["recovery/rendezvous/rank0"].schedule == (kill, {"rank": 0, "phase": "rendezvous", "occurrence": 2})
        assert found["recovery/restore.end@5/rank1"].schedule == (kill, {"rank": 1, "phase": "restore.end", "occurrence": 1})
        first = found["recovery/fetch@6/rank0"].schedule[1]
        assert first == {"rank": 0, "phase": "fetch", "at_step": 6, "attempt": 2}

    def test_all_of_them(self) -> None:
        found = points()
        assert len(found) == len(by_id(found))
        # 2 rendezvous; 6 phases at 3 steps; begin and postcommit of 3 checkpoints, on rank 0 also 3 syncs; in the recovery
        # rendezvous, 2 of the restore and the 6 phases of its first step.
        assert len(found) == 2 + 2 * 6 * 3 + 2 * 2 * 3 + 3 * 3 + 2 * (1 + 2 + 6)
        assert found == points()
        assert msgspec.json.decode(msgspec.json.encode(found), type=list[Point]) == found

    def test_one_worker_reduces_nothing(self) -> None:
        found = points(workers=1)
        assert found and not [point for point in found if point.phase == "reduce"]

    def test_a_job_without_checkpoints(self) -> None:
        passed = [passage for passage in leg(1) if not passage.phase.startswith("checkpoint")]
        found = enumerate_points(spec(1), passed, [], steps=(1,))
        assert {point.recovering for point in found} == {False}

    @pytest.mark.parametrize("workers", [1, 2, 3])
    @pytest.mark.parametrize("longest", [[], [f"max_steps={STEPS}"]])
    def test_the_planner_takes_each(self, tmp_path: Path, workers: int, longest: list[str]) -> None:
        (tmp_path / "train.py").write_text("import chaosrun\n")
        path = tmp_path / "job.yaml"
        path.write_text(f"name: x\nscript: train.py\nworkers: {workers}\ncheckpoint: {{every_steps: {EVERY}}}\n")
        job = load_job(path, longest).spec
        for point in enumerate_points(job, leg(workers), leg(workers, SAVED[0]), steps=(1, 5, 7)):
            plan = make_plan(load_job(path, [*longest, scheduled(point.schedule)]).spec)
            aimed = plan.faults if len(point.schedule) == 1 else [fault for fault in plan.faults if "[1]" in fault.source]
            assert [(fault.rank, fault.phase, fault.target) for fault in aimed] == [(point.rank, point.phase, point.target)]
            assert len(plan.faults) == len(point.schedule)
        assert make_plan(load_job(path, [*longest, scheduled([first_kill(job)])]).spec).faults


def tried(status: str = "PASS", **changes: object) -> PointResult:
    values = {"status": status, "exit_code": 0, "cause": "bit-identical", "reached": True, "run": None, "took_s": 0.5}
    return PointResult(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def sweep() -> Sweep:
    chosen = matching(points(), ["rendezvous/*", "reduce@1/*", "checkpoint.fsync.*"])
    return Sweep(
        **{"sweep_id": "probe-20260102-030405", "created_s": 1.0, "job": "/jobs/probe/job.yaml", "text": "name: probe\n"},
        **{"overrides": ("seed=3",), "cleared": ("faults.random=null",), "reference_key": "abc", "survey": "probe-1"},
        **{"workers": 2, "final_step": STEPS, "passages": 321, "steps": (1, 5, 7), "points": tuple(chosen)},
    )


def all_of(sweep: Sweep, **others: PointResult) -> Sweep:
    bad = {name.replace("_", "/"): entry for name, entry in others.items()}
    return replace(sweep, tried={point.id: bad.get(point.id, tried()) for point in sweep.points})


@pytest.mark.parametrize("early", get_args(Early))
def test_a_sweep_is_gone_on_with_however_its_drills_end(sweep: Sweep, early: Early) -> None:
    begun = replace(sweep, reference_key=reference_keys("abc", early)[0])
    assert is_of_job(begun, "name: probe\n", "abc")
    assert not is_of_job(begun, "name: another\n", "abc")
    assert not is_of_job(begun, "name: probe\n", "abd")


class TestVerdict:
    def test_exit_codes(self, sweep: Sweep) -> None:
        doubtful = {"rendezvous_rank0": tried("INCONCLUSIVE", exit_code=6, reached=False)}
        assert all_of(sweep).exit_code == 0
        assert all_of(sweep, **doubtful).exit_code == 6
        assert all_of(sweep, **doubtful, rendezvous_rank1=tried("FAIL", exit_code=3)).exit_code == 3
        # What was not tried did not pass.
        assert sweep.exit_code == 6
        assert all_of(replace(sweep, points=())).exit_code == 6

    def test_page(self, sweep: Sweep) -> None:
        text = rendered(render_sweep(all_of(sweep)), width=120, colour=False)
        assert "Not passed" not in text and "resume    " not in text
        row = next(line for line in text.splitlines() if "checkpoint.fsync.before" in line)
        assert row.split()[1:] == ["5,10,12", "0", "2", "9/9", "9", "PASS"]
        told = "13 of 13 points reached, 6 of 6 places (phase, rank, file); the job reaches 321 points"
        assert told in " ".join(text.split())
        assert text.splitlines()[-1].split() == ["PASS", "13", "drills,", "0.50", "s", "each:", "13", "PASS"]

    def test_failures_come_first_and_can_be_repeated(self, sweep: Sweep) -> None:
        bad = {
            "rendezvous_rank0": tried("INCONCLUSIVE", cause="it never fired", reached=False),
            "rendezvous_rank1": tried("FAIL", cause="RNG not restored"),
        }
        text = rendered(render_sweep(all_of(sweep, **bad), root=Path("here")), width=120, colour=False)
        lines = text.splitlines()
        assert lines[2] == "Not passed: 2 points"
        assert lines[3] == "  FAIL  rendezvous/rank1  RNG not restored"
        assert lines[4] == (
            "    chaosrun submit /jobs/probe/job.yaml seed=3 faults.random=null "
            "'faults.schedule=[{rank: 1, phase: rendezvous, occurrence: 1}]' --root here"
        )
        assert lines[5].startswith("  INCONCLUSIVE  rendezvous/rank0")
        assert "12 of 13 points reached, 5 of 6 places" in text
        assert lines[-1].startswith("FAIL ")

    def test_what_is_left(self, sweep: Sweep) -> None:
        begun = replace(sweep, tried={sweep.points[0].id: tried()})
        text = rendered(render_sweep(begun), width=120, colour=False)
        assert "NOT DONE  1 drill, 0.50 s each, all PASS; 12 points left" in text
        quiet = rendered(render_sweep(begun, quiet=True), width=40, colour=False)
        assert quiet == f"NOT DONE  {begun.sweep_id}: 1 drill, 0.50 s each, all PASS; 12 points left\n"
        assert text.splitlines()[-1].endswith("chaosrun sweep /jobs/probe/job.yaml --resume probe-20260102-030405")

    def test_many_failures_stay_short(self, sweep: Sweep) -> None:
        many = tuple(replace(sweep.points[0], id=f"p{number}") for number in range(30))
        text = rendered(
            render_sweep(all_of(replace(sweep, points=many), **{f"p{n}": tried("FAIL") for n in range(30)})),
            width=120,
            colour=False,
        )
        assert "and 10 more" in text


class TestFolder:
    def test_what_is_saved_comes_back(self, tmp_path: Path, sweep: Sweep) -> None:
        folder = SweepFolder.new(tmp_path, "probe")
        folder.save(all_of(sweep))
        assert folder.load() == all_of(sweep)
        assert SweepFolder.new(tmp_path, "probe").path != folder.path

    @pytest.mark.parametrize("text", ["", "[]", "{}", '{"v": 1}', '{"v": 9}', '{"v": 1, "points": 3}', "\x00"])
    def test_what_is_no_sweep(self, tmp_path: Path, text: str) -> None:
        folder = SweepFolder(tmp_path)
        folder.file.write_text(text)
        with pytest.raises(UsageError, match=r"sweep\.json has version|holds no sweep"):
            folder.load()

    def test_one_process_at_a_time(self, tmp_path: Path) -> None:
        folder = SweepFolder.new(tmp_path, "probe")
        with folder.locked(), pytest.raises(UsageError, match="is being carried out by process"), folder.locked():
            pass
        with folder.locked():
            pass

    def test_finding(self, tmp_path: Path, sweep: Sweep) -> None:
        job = tmp_path / "job.yaml"
        for name, created_s, path in (("a-1", 1.0, job), ("a-2", 2.0, job), ("b-1", 3.0, tmp_path / "other.yaml")):
            folder = SweepFolder(tmp_path / "sweeps" / name)
            folder.save(replace(sweep, sweep_id=name, created_s=created_s, job=str(path)))
        assert SweepFolder.find(tmp_path, "latest", job).path.name == "a-2"
        assert SweepFolder.find(tmp_path, "a-1", job).path.name == "a-1"
        with pytest.raises(UsageError, match="could be any of 2 sweeps: a-1, a-2"):
            SweepFolder.find(tmp_path, "a", job)
        with pytest.raises(UsageError, match="no sweep 'b-1'"):
            SweepFolder.find(tmp_path, "b-1", job)

    def test_a_damaged_one_hides_no_other(self, tmp_path: Path, sweep: Sweep) -> None:
        job = tmp_path / "job.yaml"
        for name in ("a-1", "a-2"):
            SweepFolder(tmp_path / "sweeps" / name).save(replace(sweep, sweep_id=name, job=str(job)))
        (tmp_path / "sweeps" / "a-2" / "sweep.json").write_text("{")
        assert SweepFolder.find(tmp_path, "latest", job).path.name == "a-1"
        with pytest.raises(UsageError, match="holds no sweep that can be read"):
            SweepFolder.find(tmp_path, "a-2", job)


class TestTicker:
    def test_a_line_a_drill(self, tmp_path: Path) -> None:
        record = {"event": "sweep.tried", "number": 3, "of": 9, "point": "step@7/rank1", "status": "PASS", "cause": "equal"}
        assert tick(record) == "3/9 step@7/rank1: PASS"
        assert tick({**record, "status": "FAIL"}) == "3/9 step@7/rank1: FAIL: equal"
        path = tmp_path / "stream"
        with path.open("w") as stream:
            Ticker(stream).on_event(record)
            gone = Ticker(stream)
        gone.on_event(record)
        assert path.read_text() == "[0:00] 3/9 step@7/rank1: PASS\n"
