"""A fault that comes while the job runs: what may be asked for, how it gets into the plan, and who is refused."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.injection import INJECTED, OUTSIDE_KINDS, injected
from chaosrun.plan.planner import make_plan
from chaosrun.records.layout import RunLayout
from chaosrun.report.facts import read_facts
from chaosrun.spec.model import JobSpec
from chaosrun.supervise.control import Inject, InjectedFault
from chaosrun.supervise.injections import Injections
from chaosrun.supervise.supervisor import Supervisor
from tests.unit.run_files import write_info

SPEC = JobSpec.model_validate({"name": "small", "script": "train.py", "workers": 3, "max_steps": 60})
PLAN = FaultPlan(
    seed=0,
    faults=(
        Fault(id="F1", rank=1, at_step=7, source="faults.schedule[0]"),
        Fault(id="F2", rank=0, at_step=9, group="G1/2", source="faults.schedule[1]"),
        Fault(id="F3", rank=1, at_step=9, group="G1/2", source="faults.schedule[1]"),
    ),
)


def ask(kind: str = "kill", rank: str = "1", *settings: str, plan: FaultPlan = PLAN, seed: int = 0) -> tuple[Fault, ...]:
    return injected(SPEC, plan, kind=kind, rank=rank, settings=settings, seed=seed, after_s=1.5)


class TestWhatIsAskedFor:
    def test_one_rank(self) -> None:
        assert ask() == (Fault(id="F4", rank=1, phase=None, after_s=1.5, source=INJECTED),)
        assert ask(plan=FaultPlan(seed=0))[0].id == "F1"

    def test_all_ranks_at_once_are_a_group_of_their_own(self) -> None:
        asked = [("F4", 0, "G2/3"), ("F5", 1, "G2/3"), ("F6", 2, "G2/3")]
        assert [(fault.id, fault.rank, fault.group) for fault in ask(rank="all")] == asked

    def test_a_drawn_rank_is_the_seeds(self) -> None:
        drawn = [ask(rank="random", seed=seed)[0].rank for seed in range(20)]
        assert drawn == [ask(rank="random", seed=seed)[0].rank for seed in range(20)]
        assert set(drawn) == {0, 1, 2}

    def test_a_rank_of_thousands_of_digits(self) -> None:
        with pytest.raises(UsageError, match="is not a rank") as refused:
            ask(rank="9" * 5000)
        assert len(refused.value.message) < 100

    @pytest.mark.parametrize(
        ("kind", "setting", "options"),
        [
            ("preempt", "grace=5s", {"grace_s": 5.0}),
            ("preempt", "grace=1.5", {"grace_s": 1.5}),
            ("pause", "duration = 500ms", {"duration_s": 0.5}),
            ("drain", "grace=1m", {"grace_s": 60.0}),
        ],
    )
    def test_options(self, kind: str, setting: str, options: dict[str, float]) -> None:
        assert ask(kind, "1", setting)[0].options == options

    def test_every_kind_that_comes_from_outside_and_no_other(self) -> None:
        assert {"kill", "stop", "preempt", "node", "supervisor"} <= set(OUTSIDE_KINDS)
        for name, kind in KINDS.items():
            if kind.timed:
                assert ask(name)[0].kind == name
                assert all(option.endswith("_s") for option in kind.options), "every option is a time"
            else:
                with pytest.raises(UsageError, match="inside the worker"):
                    ask(name)

    def test_what_is_planned_reads_back_as_it_was(self) -> None:
        plan = replace(PLAN, faults=(*PLAN.faults, *ask("preempt", "all", "grace=5s")))
        assert FaultPlan.from_json(json.loads(json.dumps(plan.to_json()))) == plan

    @pytest.mark.parametrize(
        ("kind", "rank", "settings", "said"),
        [
            ("kil", "1", (), "no kind of fault called 'kil'"),
            ("earthquake", "1", (), "no kind of fault called 'earthquake'"),
            ("kill", "3", (), "rank 3 does not exist"),
            ("kill", "-1", (), "'-1' is not a rank"),
            ("kill", "", (), "'' is not a rank"),
            ("kill", "1", ("grace=5s",), "a fault of kind kill has no grace"),
            ("preempt", "1", ("grace",), "not of the form key=value"),
            ("preempt", "1", ("grace=soon",), "grace must be a time"),
            ("preempt", "1", ("grace=0",), "grace must be a time"),
            ("pause", "1", ("duration=1h",), "is a hang"),
            ("node", "all", (), "does not strike single ranks"),
        ],
    )
    def test_what_is_refused(self, kind: str, rank: str, settings: Sequence[str], said: str) -> None:
        with pytest.raises(UsageError, match=said) as refused:
            ask(kind, rank, *settings)
        assert refused.value.hint


class Leg:
    """Stands in for a supervisor, as far as an injection speaks to one."""

    ray = "private"

    def __init__(self, name: str = "chaos", elapsed_s: float = 2.71828) -> None:
        self.name = name
        self.outside_faults = self
        self.elapsed = elapsed_s
        self.got: list[Fault] = []

    def elapsed_s(self) -> float:
        return self.elapsed

    def misplaced(self, faults: Sequence[Fault]) -> str | None:
        return "rank 2 is on the node of the supervisor" if faults[0].kind == "drain" else None

    def inject(self, faults: Sequence[Fault]) -> None:
        self.got += faults


def watch(injections: Injections, leg: Leg | None) -> None:
    injections.watch(cast("Supervisor | None", leg))


def message(**about: Any) -> Inject:
    return Inject(**{"kind": "kill", "rank": "1", **about})


def refusal(injections: Injections, **about: Any) -> str:
    with pytest.raises(UsageError) as refused:
        injections.ask(message(**about))
    return refused.value.message


@pytest.fixture
def run(tmp_path: Path) -> RunLayout:
    run = RunLayout(tmp_path / "runs" / "small-1")
    run.path.mkdir(parents=True)
    write_info(run, PLAN, spec=SPEC.model_dump(mode="json"))
    return run


def planned(run: RunLayout) -> list[str]:
    return [fault.id for fault in FaultPlan.from_json(json.loads(run.plan_json.read_text())).faults]


class TestTheWayIn:
    def test_the_plan_has_it_before_the_supervisor(self, run: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
        injections, leg = Injections(run, has_successor=False), Leg()
        watch(injections, leg)
        seen: list[list[str]] = []
        monkeypatch.setattr(leg, "inject", lambda faults: seen.append(planned(run)))
        answer = injections.ask(message())
        assert seen == [["F1", "F2", "F3", "F4"]]
        what = "SIGKILL rank 1 2.718 s after the start"
        assert answer.faults == (InjectedFault(id="F4", kind="kill", rank=1, what=what),)

    def test_one_after_the_other(self, run: RunLayout) -> None:
        injections, leg = Injections(run, has_successor=False), Leg(elapsed_s=0.0)
        watch(injections, leg)
        injections.ask(message(rank="all"))
        injections.ask(message(seed=3, rank="random"))
        assert [fault.id for fault in leg.got] == planned(run)[3:] == ["F4", "F5", "F6", "F7"]
        assert all(fault.after_s for fault in leg.got), "a time of nothing cannot be written in a job file"

    def test_a_plan_that_cannot_be_written_strikes_nobody(self, run: RunLayout) -> None:
        injections, leg = Injections(run, has_successor=False), Leg()
        watch(injections, leg)
        run.plan_json.with_name("plan.json").unlink()
        run.plan_json.mkdir()
        assert "plan.json" in refusal(injections)
        assert leg.got == []

    def test_only_a_leg_under_faults_takes_them(self, run: RunLayout) -> None:
        injections = Injections(run, has_successor=False)
        assert "no leg is running now" in refusal(injections)
        watch(injections, Leg("reference"))
        assert "must stay without faults" in refusal(injections)
        chaos = Leg()
        watch(injections, chaos)
        injections.hear({"leg": "chaos", "event": "leg.finished"})
        assert "has just ended" in refusal(injections)
        watch(injections, None)
        assert "is over" in refusal(injections)
        watch(injections, Leg("confirm"))
        assert "the confirm leg" in refusal(injections)
        assert planned(run) == ["F1", "F2", "F3"] and chaos.got == []

    def test_what_nobody_could_recover_from(self, run: RunLayout) -> None:
        alone, kept = Injections(run, has_successor=False), Injections(run, has_successor=True)
        for injections in (alone, kept):
            watch(injections, Leg())
        assert "there is no other to continue it" in refusal(alone, kind="supervisor")
        assert kept.ask(message(kind="supervisor")).faults[0].kind == "supervisor"
        assert "a private Ray is one node" in refusal(kept, kind="raylet")
        joined = Leg()
        joined.ray = "joined"
        watch(kept, joined)
        assert "which chaosrun has joined" in refusal(kept, kind="raylet")
        assert "on the node of the supervisor" in refusal(kept, kind="drain")


def test_a_run_in_production_says_whether_it_may_be_struck_before_its_ranks_are_there(tmp_path: Path) -> None:
    run = RunLayout(tmp_path / "runs" / "small-2")
    run.path.mkdir(parents=True)
    write_info(run, PLAN, spec=SPEC.model_dump(mode="json"), kind="run")
    assert "does not allow faults" in refusal(Injections(run, has_successor=False))


def test_the_command_that_repeats_a_run_has_its_injected_faults(run: RunLayout) -> None:
    assert read_facts(run).injected == ()
    injections = Injections(run, has_successor=False)
    watch(injections, Leg())
    injections.ask(message(kind="preempt", rank="all", settings=("grace=5s",)))
    (override,) = read_facts(run).injected
    assert override.startswith("faults.schedule=")
    from chaosrun.spec.overrides import apply_overrides
    from chaosrun.spec.places import SourceText
    from chaosrun.spec.tree import Mapping, plain, read_tree

    root, _ = read_tree(SourceText(label="job", text="{name: small, script: train.py, workers: 3, max_steps: 60}"))
    assert isinstance(root, Mapping)
    tree, problems = apply_overrides(root, [override])
    assert not problems
    again = make_plan(JobSpec.model_validate(plain(tree)))
    assert sorted((f.kind, f.rank, f.after_s, dict(f.options)) for f in again.faults if f.phase is None) == [
        ("preempt", rank, 2.718, {"grace_s": 5.0}) for rank in range(3)
    ]
