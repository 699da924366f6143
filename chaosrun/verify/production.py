"""Judge each recovery of a run without a reference by the run's own records. Pure. Steps that an attempt repeats are compared
with their earlier records, and the state that it restores with the saved state.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.traces import RankTrace, Source
from chaosrun.spec.model import JobSpec
from chaosrun.verify import alignment, landed, libraries, recovery, replicas
from chaosrun.verify.check import CheckResult, Divergence, Drill, failed, inconclusive, passed, records_damaged
from chaosrun.verify.checks import run_checks
from chaosrun.verify.codes import Cause
from chaosrun.verify.divergence import divergence_of
from chaosrun.verify.lineage import Lineage, lineage
from chaosrun.verify.premises import bits_differ, canaries, not_ended
from chaosrun.verify.restored import reference_state
from chaosrun.verify.ruling import Ruling, first_of, of_check, of_damage, of_divergence, of_end, only_missing
from chaosrun.verify.steps import reference_parameters
from chaosrun.wording import count, listed

Judged = Literal["steps", "state", "nothing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """A restart of a run, judged as far as its attempt has run."""

    attempt: int
    began: int = 0
    """The step that it resumed at."""
    steps: int = 0
    """Number of steps done again and compared, on any rank."""
    last: int = 0
    """The last of these steps; 0 without one."""
    states: int = 0
    """Number of ranks whose restored state was compared with the saved state, or with the state recorded after that step."""
    source: Source | None = None
    trained: bool = False
    lost: bool = True
    """Whether a step had been done before the restart, so that something could be lost."""
    divergence: Divergence | None = None
    astray: Cause | None = None
    """The error in the step that it resumed at, such as a complete checkpoint that it ignored."""
    problem: str | None = None
    """Why it could not be judged."""

    @property
    def wrong(self) -> Cause | None:
        return self.divergence.reason if self.divergence else self.astray

    @property
    def judged(self) -> Judged:
        return "steps" if self.steps else "state" if self.states else "nothing"

    @property
    def words(self) -> str:
        """The judgement in words, for a correct recovery."""
        restored = "state" if self.source else "weights and optimizer"
        states = f"{count(self.states, 'rank')} resumed with the recorded {restored}"
        match self.judged:
            case "steps":
                return f"{count(self.steps, 'step')} done twice, up to step {self.last}, equal; {states}"
            case "state":
                return f"no step was done twice, so only what was restored could be compared: {states}"
            case "nothing":
                if self.problem or (self.trained and self.lost):
                    return self.problem or "nothing was recorded of it before"
                return "no step had been done before" if self.trained else "it ended before it began to train"


def judge_recovery(
    history: LegHistory, number: int, spec: JobSpec, plan: FaultPlan, *, since: int = 1, begun: bool = False
) -> Recovery:
    """Compare attempt `number` with those before it; if it has only `begun`, check the step that it resumed at. `since`: see
    `recorded`. Never raises: a judgement must not end a training."""
    try:
        return _judge(history, number, spec, plan, since, begun=begun)
    except Exception as error:  # damaged records, or a defect of a comparison: it is reported, and is never a PASS
        return Recovery(attempt=number, trained=True, problem=f"{type(error).__name__}: {getattr(error, 'message', error)}")


def _judge(history: LegHistory, number: int, spec: JobSpec, plan: FaultPlan, since: int, *, begun: bool) -> Recovery:
    whole, look = _up_to(history, number), _began if begun else _compared
    found = look(whole, number, spec, plan, since)
    if found.wrong and since > 1:
        # A later restart may have repaired the difference: then this attempt agrees with those before the one that differed.
        before = replace(whole, attempts=tuple(each for each in whole.attempts if each.number != since))
        mended = look(before, number, spec, plan, 1)
        known = begun or mended.judged != "nothing"
        return mended if known and not mended.wrong else found
    return found


def _began(whole: LegHistory, number: int, spec: JobSpec, plan: FaultPlan, since: int) -> Recovery:
    """The step that an attempt resumed at, once all of its ranks have begun."""
    drill, attempt = _drill_of(whole, spec, plan, since, looked_at=()), whole.attempts[-1]
    return Recovery(attempt=number, began=attempt.resume_step, source=attempt.source, astray=_wrong_at_resume(drill, whole))


def _compared(whole: LegHistory, number: int, spec: JobSpec, plan: FaultPlan, since: int) -> Recovery:
    drill, divergence = _compared_with_earlier(_near(whole), spec, plan, since)
    if divergence or (drill.by_script and any(drill.apart.values())):
        # The cause may be found anywhere in the run.
        drill, divergence = _compared_with_earlier(whole, spec, plan, since)
    attempt = drill.chaos.attempts[-1]
    again = {step for trace in attempt.traces.values() for step in _done_before(drill.reference_lineage, trace)}
    return Recovery(
        attempt=number,
        began=attempt.resume_step,
        steps=len(again),
        last=max(again, default=0),
        states=sum(_is_comparable(drill, attempt, rank) for rank in attempt.starts),
        source=attempt.source,
        trained=bool(attempt.steps),
        lost=any(trace.spans for each in whole.attempts[:-1] for trace in each.traces.values()),
        divergence=divergence,
        astray=_wrong_at_resume(drill, whole),
    )


def _wrong_at_resume(drill: Drill, whole: LegHistory) -> Cause | None:
    """The error in the step that the last attempt resumed at. If its state is not of one step, the comparison says more."""
    drill = replace(drill, chaos=whole, reference=_up_to(whole, whole.attempts[-1].number - 1))
    if not drill.by_script:
        return [wrong for _, wrong in recovery.went_on_from(drill)][-1]
    wrong = alignment.wrong_resume(drill, whole.attempts[-1])
    return libraries.for_own_resume(wrong) if wrong and wrong.code != "resumed_state_differs" else None


def _compared_with_earlier(history: LegHistory, spec: JobSpec, plan: FaultPlan, since: int) -> tuple[Drill, Divergence | None]:
    """The last of these attempts compared as a drill with those before, and its first difference."""
    attempts = history.attempts[-1:]
    drill = _drill_of(history, spec, plan, since, looked_at=attempts)
    divergence = divergence_of(drill, attempts)
    return drill, libraries.with_library_bug(divergence, drill) if divergence and drill.by_script else divergence


def _drill_of(history: LegHistory, spec: JobSpec, plan: FaultPlan, since: int, *, looked_at: Sequence[Attempt]) -> Drill:
    """A drill whose reference is made of the attempts before the last."""
    before = _up_to(history, history.attempts[-1].number - 1)
    return Drill.of(before, history, spec, plan, recorded=recorded(before, since), looked_at=looked_at)


def _near(history: LegHistory) -> LegHistory:
    """The leg without the blocks of steps before the last attempt's first step, which the comparison does not need: its cost
    does not grow with the run."""
    last = history.attempts[-1]
    first = min((start.position.step for start in last.starts.values()), default=last.resume_step)

    def cut(trace: RankTrace) -> RankTrace:
        return replace(trace, blocks=tuple(block for block in trace.blocks if block.last >= first))

    attempts = (replace(each, traces={rank: cut(trace) for rank, trace in each.traces.items()}) for each in history.attempts)
    return replace(history, attempts=tuple(attempts))


def recorded(history: LegHistory, since: int = 1) -> Lineage:
    """One record for each step: the one that the job continued from, else the last one made in attempt `since` or later."""
    known = lineage(history)
    for span in reversed(known.cut_off):
        if span.trace.attempt >= since:
            known.of(span.trace.rank).add(span)
    return known


def _up_to(history: LegHistory, number: int) -> LegHistory:
    return replace(history, attempts=tuple(each for each in history.attempts if each.number <= number))


def _done_before(expected: Lineage, trace: RankTrace) -> Iterator[int]:
    return (step for own in trace.spans for held in expected.of(trace.rank).over(own.steps) for step in held.steps)


def _is_comparable(drill: Drill, attempt: Attempt, rank: int) -> bool:
    start = attempt.starts[rank]
    saved = start.digests is not None and reference_state(drill, rank, start.position.step) is not None
    return saved or reference_parameters(drill, rank, start.position.step) is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    drill: Drill
    """The whole leg, compared with its own records."""
    checks: tuple[CheckResult, ...]
    recoveries: tuple[Recovery, ...]
    ruling: Ruling

    @property
    def divergence(self) -> Divergence | None:
        return next((each.divergence for each in self.recoveries if each.divergence), None)


def judge_run(history: LegHistory, spec: JobSpec, plan: FaultPlan) -> Account:
    """Judge a run in production from its only leg. Raises DamagedRecordError for steps that are no longer what they were."""
    found: list[Recovery] = []
    since = 1
    for attempt in history.attempts[1:]:
        found.append(judge_recovery(history, attempt.number, spec, plan, since=since))
        since = attempt.number if found[-1].divergence else since
    empty = LegHistory(name=history.name, layout=history.layout)
    drill = Drill.of(empty, history, spec, plan, recorded=recorded(history))
    points = alignment.resume_evidence if drill.by_script else recovery.resume_points
    # A script that starts from scratch leaves gaps in its lineage: the evidence of where it resumed says more.
    came_back = (points, recovery.lineage) if drill.by_script else (recovery.lineage, points)
    asked = (records, completed, environment, *came_back, replicas.rank_agreement)
    checks = run_checks(drill, (*asked, *([landed.faults_landed] if plan.faults else [])))
    checks += tuple(_check_of(each) for each in found)
    ruling = _rule(drill, checks, found)
    if drill.by_script:
        ruling = replace(ruling, reason=libraries.for_own_resume(ruling.reason))
    return Account(drill=drill, checks=checks, recoveries=tuple(found), ruling=ruling)


def records(drill: Drill) -> CheckResult:
    """The leg's files can be read in full and do not contradict each other."""
    if damaged := records_damaged(drill.chaos.problems):
        return damaged
    return passed(f"{sum(1 for _ in drill.chaos.traces)} traces and the journal read in full")


def completed(drill: Drill) -> CheckResult:
    """The run reached its end, on every rank at the same step."""
    leg = drill.chaos
    if lacking := not_ended(leg, drill, ("completed",)):
        return lacking
    ends = {rank: end.step for rank, end in leg.ends.items()}
    done = {span.last for trace in leg.traces for span in trace.spans} if drill.by_script else set[int]()
    expected = max(ends[0], *done, 0)
    other = next((rank for rank in drill.ranks if ends[rank] != expected), None)
    if other is not None:
        return failed("ended_at_another_step", leg=leg.name, rank=other, step=ends[other], expected=expected)
    return passed(f"ended at step {ends[0]} on every rank")


def environment(drill: Drill) -> CheckResult:
    """Every process computed the same bits from the same numbers, on whichever node it ran (hazards K1, K2, K7)."""
    heard = list(canaries(drill.chaos))
    if differ := bits_differ(heard):
        return differ
    return passed(f"{len(heard)} processes compute the same bits", canaries=len(heard))


def _check_of(found: Recovery) -> CheckResult:
    name, about = f"recovery_{found.attempt}", {"steps": found.steps, "states": found.states, "judged": found.judged}
    if found.divergence:
        what, where = found.divergence.cause, f"step {found.divergence.step}, rank {found.divergence.rank}"
        return replace(failed("recovery_differs", attempt=found.attempt, what=what, where=where, **about), name=name)
    if found.astray:
        return replace(failed(found.astray.code, **found.astray.params, **about), name=name)
    if found.judged == "nothing" and (found.problem or (found.trained and found.lost)):
        return replace(inconclusive("recovery_unjudged", attempt=found.attempt, why=found.words, **about), name=name)
    return replace(passed(found.words, **about), name=name)


def _in_part(drill: Drill, judged: Sequence[Recovery]) -> str:
    """In words, what was not compared of attempts that repeated no step. With chaosrun.attach, all state is restored and
    compared."""
    attempts = [str(each.attempt) for each in judged if not each.steps]
    if not attempts or not drill.by_script:
        return ""
    which = f"attempt{'s' if len(attempts) > 1 else ''} {listed(attempts)}"
    why = ", as no step was done twice" if len(attempts) < len(judged) else ""
    return f"; {which} only by weights and optimizer{why}: not by data, random streams, learning rates"


def _rule(drill: Drill, checks: Sequence[CheckResult], found: Sequence[Recovery]) -> Ruling:
    leg = drill.chaos
    diverged = next((each.divergence for each in found if each.divergence), None)
    if diverged:
        return of_divergence(diverged, drill.spec.data.resume)
    end = leg.finished
    if end is None:
        damaged = None if only_missing(leg) else of_damage(checks)
        return damaged or Ruling(status="INCONCLUSIVE", reason=Cause.of("not_finished", leg=leg.name))
    if end.outcome == "inexact_restore":
        return of_end(leg, fails=True)
    if wrong := first_of(checks, "fail"):
        return of_check(wrong)
    if end.outcome != "completed":
        return of_end(leg)
    if doubt := first_of(checks, "inconclusive"):
        return of_check(doubt)
    judged = [each for each in found if each.judged != "nothing"]
    again = sum(each.steps for each in judged)
    return Ruling(
        status="PASS",
        reason=Cause.of(
            "recoveries_agree" if judged else "undisturbed_run",
            because=None if again or not judged else "state",
            steps=drill.chaos_lineage.final_step,
            ranks=drill.spec.workers,
            times=len(judged),
            again=again,
            restarts=f"{count(len(found), 'restart')}, with no step done before" if found else "without a restart",
            more=_in_part(drill, judged),
        ),
    )
