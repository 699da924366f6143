"""Shrinking a plan: delta debugging, simpler faults, faults as a job file says them, and what counts as the same failure."""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from verdicts import ATTEMPT, PASSED

from chaosrun.campaign.ddmin import ddmin, simpler
from chaosrun.campaign.report.text import render_shrunk
from chaosrun.campaign.shrink import FailedRun, open_case, reduce_faults, symptom_of
from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.report.output import rendered
from chaosrun.spec.fragment import Entry, as_entries, as_yaml, flow, scheduled
from chaosrun.spec.job_file import load_job
from chaosrun.verify.check import CheckResult, Divergence
from chaosrun.verify.codes import Cause
from chaosrun.verify.verdict import Verdict


def first_that(fails: Callable[[tuple[Any, ...]], bool]) -> Callable[[Sequence[tuple[Any, ...]]], tuple[Any, ...] | None]:
    return lambda parts: next((part for part in parts if fails(part)), None)


class TestDdmin:
    @given(st.integers(1, 40), st.sets(st.integers(0, 39), min_size=1, max_size=5))
    def test_finds_exactly_what_it_takes(self, length: int, needed: set[int]) -> None:
        needed = {item % length for item in needed}
        assert ddmin(range(length), first_that(lambda part: needed <= set(part))) == tuple(sorted(needed))

    @given(st.integers(1, 12), st.sets(st.frozensets(st.integers(0, 11), min_size=1), min_size=1, max_size=6))
    def test_nothing_can_be_left_out(self, length: int, causes: set[frozenset[int]]) -> None:
        """Also where several causes fail alike, and where more items hide the failure."""
        everything = tuple(range(length))
        hidden = frozenset({0, 3})

        def fails(part: tuple[int, ...]) -> bool:
            shows = any(cause <= set(part) for cause in causes) and not (hidden <= set(part) and len(part) == 4)
            return bool(part) and (shows or part == everything)

        left = ddmin(everything, first_that(fails))
        assert left and fails(left) and sorted(left) == list(left)
        assert not any(fails(left[:place] + left[place + 1 :]) for place in range(len(left)) if len(left) > 1)

    def test_few_questions_for_one_cause(self) -> None:
        asked: list[tuple[int, ...]] = []

        def fails(part: tuple[int, ...]) -> bool:
            asked.append(part)
            return 5 in part

        assert ddmin(range(8), first_that(fails)) == (5,)
        assert len(set(asked)) <= 6
        assert all(part and len(part) < 8 for part in asked)


class TestSimpler:
    def test_candidates(self) -> None:
        entry = {"kind": "preempt", "rank": 1, "phase": "fetch", "at_step": 9, "grace": 5}
        assert list(simpler(entry)) == [
            {"rank": 1, "at_step": 9},
            {"rank": 1, "phase": "fetch", "at_step": 9},
            {"kind": "preempt", "rank": 1, "at_step": 9, "grace": 5},
            {"kind": "preempt", "rank": 1, "phase": "fetch", "at_step": 9},
            {**entry, "at_step": 4},
        ]
        assert list(simpler({"rank": 1, "at_step": 1})) == []
        assert {"rank": 0, "at_step": 2} in list(simpler({"rank": "all", "at_step": 2}))

    @given(st.data())
    def test_the_search_ends(self, data: st.DataObject) -> None:
        optional = {
            "kind": st.sampled_from(sorted(KINDS)),
            "phase": st.sampled_from(["fetch", "reduce"]),
            "at_step": st.integers(1, 10**6),
            "attempt": st.integers(1, 9),
            "grace": st.integers(1, 9),
        }
        entry: Entry = data.draw(st.fixed_dictionaries({"rank": st.sampled_from([0, 1, "all"])}, optional=optional))
        for _ in range(40):
            if not (found := list(simpler(entry))):
                return
            assert entry not in found
            entry = data.draw(st.sampled_from(found))
        pytest.fail(f"still not simple: {entry}")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("import chaosrun\n")
    path = tmp_path / "job.yaml"
    path.write_text("name: x\nscript: train.py\nworkers: 2\nmax_steps: 40\ncheckpoint: {every_steps: 5}\n")
    return path


@pytest.fixture
def own_saves(tmp_path: Path) -> Path:
    """A job whose script saves and resumes by itself."""
    (tmp_path / "own.py").write_text("")
    path = tmp_path / "own.yaml"
    path.write_text("name: x\nscript: own.py\nworkers: 2\n")
    return path


def planned(job: Path, schedule: Sequence[Entry]) -> tuple[Fault, ...]:
    return make_plan(load_job(job, [scheduled(schedule)]).spec).faults


def unnamed(faults: Sequence[Fault]) -> list[dict[str, Any]]:
    """Without what depends on the order of the entries."""
    told = [{k: v for k, v in fault.to_json().items() if k not in ("id", "source", "group")} for fault in faults]
    return sorted(told, key=str)


OPTIONS: dict[str, Any] = {
    **{"grace_s": 5.5, "duration_s": 0.25, "factor": 3.0, "steps": 2, "mebibytes": 64, "operation": 3, "unsynced": "torn"},
    **{"state": "parameter", "tensor": "0.weight", "bit": 3, "file": "model.safetensors"},
}
KEYS = {"grace_s": "grace", "duration_s": "duration"}
"""Where the file's key is not the option's name."""


class TestFragment:
    @pytest.mark.parametrize("kind", sorted(KINDS))
    def test_every_kind_comes_back(self, job: Path, own_saves: Path, kind: str) -> None:
        facts = KINDS[kind]
        job = own_saves if facts.default_phase == "save" else job
        if facts.needs_objects:
            text = job.read_text().replace("every_steps: 5", f"every_steps: 5, storage: 'file://{job.parent}/bucket'")
            job.write_text(text)
        options = {KEYS.get(name, name): OPTIONS[name] for name in facts.options}
        when = {"occurrence": 1} if facts.default_phase == "rendezvous" else {"at_step": 10}
        rank = {"rank": 0} if facts.only_rank == 0 or kind == "port_taken" else {"rank": 1}
        # What is left on the disk is seen by the attempt that comes after.
        then = [{"rank": 0, "at_step": 11}] if facts.family == "storage" else []
        faults = planned(job, [{"kind": kind, **rank, **when, **options}, *then])
        assert len(faults) == 1 + len(then) and dict(faults[0].options) == {name: OPTIONS[name] for name in facts.options}
        assert unnamed(planned(job, as_entries(faults, 2))) == unnamed(faults)
        if facts.timed:
            after = planned(job, [{"kind": kind, "rank": 0, "after": 1.5, **options}])
            assert unnamed(planned(job, as_entries(after, 2))) == unnamed(after)

    def test_when_and_who(self, job: Path) -> None:
        schedule: list[Entry] = [
            {"rank": 0, "phase": "checkpoint.fsync.after", "at_step": 10, "file": ".", "occurrence": 2},
            {"rank": 0, "phase": "rendezvous", "occurrence": 3},
            {"rank": 1, "phase": "restore.begin"},
            {"rank": 0, "phase": "forward", "at_step": 12, "attempt": 5},
            {"rank": 1, "at_step": 7},
        ]
        faults = planned(job, schedule)
        again = as_entries(faults, 2)
        assert unnamed(planned(job, again)) == unnamed(faults)
        assert {"rank": 1, "at_step": 7} in again

    def test_all_ranks_at_once_stay_together(self, job: Path) -> None:
        faults = planned(job, [{"rank": "all", "at_step": 7}])
        assert len(faults) == 2
        assert as_entries(faults, 2) == [{"rank": "all", "at_step": 7}]

    def test_yaml(self) -> None:
        entries = [{"rank": 1, "phase": "checkpoint.fsync.before", "file": "a b/ä.bin"}, {"kind": "nan", "tensor": "off"}]
        assert as_yaml(7, entries) == (
            "faults:\n  seed: 7\n  schedule:\n"
            '    - {rank: 1, phase: checkpoint.fsync.before, file: "a b/ä.bin"}\n    - {kind: nan, tensor: "off"}\n'
        )
        assert as_yaml(0, [{"rank": 0, "at_step": 1}]) == "faults:\n  schedule:\n    - {rank: 0, at_step: 1}\n"
        assert flow({"a": [True, None, 1.5, "x: y"]}) == '{a: [true, null, 1.5, "x: y"]}'


DRIFTED = Cause.of("rng_drifted", which="", scope="", step=8)
APART = Divergence(step=8, ranks=(0, 1), attempt=2, kind="rng", reason=DRIFTED, expected=1, seen=2)
DIVERGED = replace(PASSED, status="FAIL", divergence=APART)


def test_symptoms() -> None:
    failed = replace(PASSED, status="FAIL", checks=(CheckResult(name="final_weights", status="fail", summary="", evidence={}),))
    ended = replace(PASSED, status="INCONCLUSIVE", outcome="recovery_failed", attempts=(ATTEMPT,))
    expected = {
        symptom_of(PASSED): None,
        symptom_of(DIVERGED): "FAIL: rng",
        symptom_of(failed): "FAIL: final_weights",
        symptom_of(replace(PASSED, status="FAIL", outcome="inexact_restore")): "FAIL: inexact_restore",
        symptom_of(ended): "recovery failed",
        symptom_of(replace(ended, outcome="user_error")): "user error",
    }
    assert all(seen == wanted for seen, wanted in expected.items())
    # What proves nothing has not failed: a fault that did not land, a reference that did not complete, a timeout.
    for doubtful in (replace(PASSED, status="INCONCLUSIVE"), replace(ended, attempts=())):
        assert symptom_of(doubtful) is None
    assert symptom_of(replace(ended, outcome="timeout")) is symptom_of(replace(ended, outcome="resources")) is None
    assert symptom_of(json.loads(json.dumps(DIVERGED.to_json()))) == "FAIL: rng"


class Drills:
    """Answers as a job would whose symptom depends on its schedule alone, and counts."""

    def __init__(self, job: Path, symptom: Callable[[list[Fault]], str | None], *, room: int = 1) -> None:
        self._job = job
        self._symptom = symptom
        self._room = room
        self.seen: list[list[dict[str, Any]]] = []

    def __call__(self, candidates: Mapping[str, Sequence[str]], looked_for: str | None) -> dict[str, str | None]:
        """As many side by side as there is room for, the last of them the first to end."""
        found: dict[str, str | None] = {}
        for together in batched(candidates, self._room):
            found |= {key: self.drill(candidates[key]) for key in reversed(together)}
            if looked_for in found.values():
                break
        return found

    def drill(self, overrides: Sequence[str]) -> str | None:
        faults = make_plan(load_job(self._job, overrides).spec).faults
        self.seen.append(unnamed(faults))
        return self._symptom(list(faults))

    def verify(self, overrides: Sequence[str]) -> tuple[RunLayout, str | None]:
        return RunLayout(self._job.parent / "verified"), self.drill(overrides)

    def shrink(self, schedule: list[Entry], *, symptom: str | None = "FAIL: rng", limit: int = 100) -> Any:
        run = RunLayout(self._job.parent / "here" / "runs" / "run")
        run.path.mkdir(parents=True)
        case = FailedRun(run=run, job=load_job(self._job), overrides=(), schedule=tuple(schedule), symptom=symptom)
        return reduce_faults(case, self, self.verify, limit=limit)


SCHEDULE: list[Entry] = [
    *({"rank": number % 2, "phase": "forward", "at_step": 11 + number} for number in range(6)),
    {"kind": "preempt", "rank": 1, "phase": "fetch", "at_step": 18, "grace": 9},
    {"rank": 0, "phase": "rendezvous", "occurrence": 3},
]


def batched(keys: Iterable[str], size: int) -> Iterator[list[str]]:
    keys = iter(keys)
    while together := list(islice(keys, size)):
        yield together


class TestShrink:
    @pytest.mark.parametrize("limit", [5, 100])
    def test_how_many_run_side_by_side_changes_nothing(self, job: Path, tmp_path: Path, limit: int) -> None:
        told = []
        for room in (1, 3, 8):
            drills = Drills(job, lambda faults: "FAIL: rng" if {18, 12} <= {f.at_step for f in faults} else None, room=room)
            shrunk = drills.shrink(SCHEDULE, limit=limit)
            told.append((shrunk.schedule, shrunk.drills, shrunk.refused, shrunk.smallest))
            assert (len(drills.seen) > shrunk.drills + 1) == (room > 1 and limit > 5), "those ahead of their turn do not count"
            shutil.rmtree(job.parent / "here")
        assert told[0] == told[1] == told[2]

    def test_to_the_one_that_matters(self, job: Path) -> None:
        drills = Drills(job, lambda faults: "FAIL: rng" if any(f.at_step == 18 and f.rank == 1 for f in faults) else None)
        shrunk = drills.shrink(SCHEDULE)
        assert shrunk.schedule == ({"rank": 1, "at_step": 18},)
        assert (shrunk.symptom, shrunk.seen, shrunk.smallest, shrunk.exit_code) == ("FAIL: rng", "FAIL: rng", True, 0)
        # None twice, but for the last, which verifies.
        seen = list(map(str, drills.seen))
        assert len(set(seen)) == len(seen) - 1 == shrunk.drills
        assert shrunk.path.read_text() == shrunk.fragment
        assert shrunk.fragment.splitlines()[1:] == ["faults:", "  schedule:", "    - {rank: 1, at_step: 18}"]
        text = rendered(render_shrunk(shrunk), width=100, colour=False)
        assert "8 faults to 1 in" in text and "verified  run verified: FAIL: rng" in text
        assert text.splitlines()[-1].endswith(f"[{{rank: 1, at_step: 18}}]' --root {job.parent / 'here'}")

    def test_another_failure_is_not_the_same(self, job: Path) -> None:
        drills = Drills(job, lambda faults: "FAIL: rng" if len(faults) > 2 else "FAIL: data order")
        assert len(drills.shrink(SCHEDULE).schedule) == 3

    def test_what_cannot_be_planned_does_not_fail(self, job: Path) -> None:
        """Without the kill before it, nothing is ever restored."""
        schedule: list[Entry] = [{"rank": 0, "at_step": 7}, {"rank": 1, "phase": "restore.end"}, {"rank": 0, "at_step": 33}]
        drills = Drills(job, lambda faults: "recovery failed" if "restore.end" in [f.phase for f in faults] else None)
        shrunk = drills.shrink(schedule, symptom="recovery failed")
        assert len(shrunk.schedule) == 2 and shrunk.refused > 0
        assert all("restore.end" not in plan[0]["phase"] for plan in drills.seen if len(plan) == 1)

    def test_drills_run_out(self, job: Path) -> None:
        drills = Drills(job, lambda faults: "FAIL: rng" if any(f.at_step == 18 for f in faults) else None)
        shrunk = drills.shrink(SCHEDULE, limit=3)
        assert shrunk.drills == 3 and not shrunk.smallest and 1 < len(shrunk.schedule) < len(SCHEDULE)
        assert "no more were allowed" in rendered(render_shrunk(shrunk), width=100, colour=False)

    def test_a_failure_that_does_not_come_again(self, job: Path) -> None:
        drills = Drills(job, lambda faults: None)
        shrunk = drills.shrink(SCHEDULE)
        assert (shrunk.exit_code, shrunk.verified, shrunk.drills) == (6, None, 1)
        assert not shrunk.path.exists()
        text = rendered(render_shrunk(shrunk), width=100, colour=False)
        assert "not again" in text and "failed with FAIL: rng, its plan repeated ends with no failure" in text

    def test_a_failure_that_goes_at_last(self, job: Path) -> None:
        answers = iter(["FAIL: rng", None])
        drills = Drills(job, lambda faults: next(answers, None))
        shrunk = drills.shrink([{"rank": 0, "at_step": 1}])
        assert shrunk.exit_code == 6 and shrunk.verified is not None
        assert "NOT SHOWN" in rendered(render_shrunk(shrunk), width=100, colour=False)

    def test_a_run_without_a_verdict_fails_as_its_plan_does(self, job: Path) -> None:
        drills = Drills(job, lambda faults: "bug: KeyError" if any(f.at_step == 12 for f in faults) else None)
        assert drills.shrink(SCHEDULE, symptom=None).symptom == "bug: KeyError"


class TestCase:
    def run(self, job: Path, verdict: Verdict | None, schedule: Sequence[Entry] = ({"rank": 0, "at_step": 7},)) -> RunLayout:
        from chaosrun.supervise.creation import create_run

        overrides = [scheduled(schedule)]
        loaded = load_job(job, overrides)
        run = create_run(job.parent, loaded, plan=make_plan(loaded.spec), overrides=overrides, reference="auto")
        if verdict is not None:
            run.verdict_json.write_text(json.dumps(verdict.to_json()))
        return run

    def test_a_failure(self, job: Path) -> None:
        case = open_case(self.run(job, DIVERGED))
        assert (case.symptom, case.schedule) == ("FAIL: rng", ({"rank": 0, "at_step": 7},))
        assert open_case(self.run(job, None)).symptom is None
        assert len(case.changed(case.schedule)) == 1  # the schedule that it replaces is not named, too

    def test_what_cannot_be_shrunk(self, job: Path) -> None:
        with pytest.raises(UsageError, match="did not fail: PASS"):
            open_case(self.run(job, PASSED))
        with pytest.raises(UsageError, match="had no faults"):
            open_case(self.run(job, DIVERGED, schedule=()))
        run = self.run(job, DIVERGED)
        job.write_text(job.read_text() + "seed: 4\n")
        with pytest.raises(UsageError, match=r"job\.yaml has changed since"):
            open_case(run)
