"""What to replay in order to examine a difference, and the result of the replays. Pure.

The job runs again without faults, and with the faults that led to the difference; both record the steps around it.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from operator import attrgetter

from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kind import Phase
from chaosrun.faults.landed import requests_of
from chaosrun.records.history import Attempt
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.verify.check import Divergence, Drill
from chaosrun.verify.codes import REMEDIES
from chaosrun.verify.hazards import Hazard
from chaosrun.verify.inspection import Candidate, InspectionComparison
from chaosrun.verify.verdict import Verdict
from chaosrun.wording import listed

DIAGNOSIS_VERSION = 1
ON_DISK = frozenset({"final_checkpoint", "records", "lineage", "completed"})
"""Checks whose failure lies in files or in the course of the run: replaying a step shows nothing more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    step: int
    attempt: int
    resume_step: int
    """The step that the attempt resumed at; 0 if it started from scratch."""
    final_step: int
    faults: tuple[Fault, ...]
    """Faults that fired before the attempt, in order, each at its step; and unplanned deaths."""
    divergence: Divergence | None
    """None if every step agrees and only the end, or the restore itself, differs."""
    ended: int
    """The step at which the chaos leg ended, if it completed; possibly not the reference's last."""
    hint: str | None
    by: str
    """Who resumes: chaosrun or the script."""

    @property
    def inspected(self) -> tuple[int, ...]:
        """The first step after the restore, in which hidden state shows, and the steps around the difference."""
        wanted = {self.resume_step + 1, self.step - 1, self.step, self.step + 1}
        return tuple(sorted(step for step in wanted if 1 <= step <= self.final_step))

    def faults_from(self, start: int) -> FaultPlan:
        """The plan of a replay that resumes from the checkpoint of step `start` (0: from scratch)."""
        return FaultPlan(seed=0, faults=tuple(fault for fault in self.faults if (fault.at_step or 0) > start))

    def last_step(self, plan: FaultPlan) -> int:
        """The step at which a replay under `plan` may stop: after every fault, and one step after the difference."""
        reached = max([self.step + 1, *(fault.at_step or 0 for fault in plan.faults)])
        return min(reached, self.final_step + (self.ended > self.final_step))


def target_of(drill: Drill, verdict: Verdict, run: RunLayout) -> Target:
    """What to replay. Raises UsageError when there is no difference that a replay could show."""
    run_id = run.run_id
    if verdict.status == "PASS":
        raise UsageError(f"run {run_id} passed: the legs do not differ", hint="diagnose is for a run that ended with FAIL")
    if drill.reference.outcome != "completed":
        raise UsageError(
            f"the reference leg of run {run_id} did not complete, so there is nothing to compare with",
            hint=f"`chaosrun status {run_argument(run)}` says what became of it",
        )
    for check in verdict.checks:
        if check.name == "silent_corruption" and check.status == "fail":
            message = f"the difference of run {run_id} was injected: {check.summary}"
            raise UsageError(message, hint="it is named there already; diagnose a run without such a fault")
    divergence = verdict.divergence
    failing = [check.name for check in verdict.checks if check.status == "fail"]
    inexact = verdict.outcome == "inexact_restore"
    if divergence is None and not inexact and not set(failing) - ON_DISK:
        raise UsageError(
            f"run {run_id} is {verdict.status}, and no step of it differs from the reference: {verdict.cause}",
            hint=verdict.hint or "a replay would show no more than the verdict does",
        )
    final_step = drill.reference_lineage.final_step
    number = divergence.attempt if divergence else drill.chaos.attempts[-1].number
    attempt = next(entry for entry in drill.chaos.attempts if entry.number == number)
    at_end = attempt.resume_step + 1 if inexact else final_step
    return Target(
        step=min(divergence.step if divergence else at_end, final_step),
        attempt=number,
        resume_step=attempt.resume_step,
        final_step=final_step,
        faults=tuple(_faults_before(drill, number)),
        divergence=divergence,
        ended=max((end.step for end in drill.chaos.ends.values()), default=final_step),
        hint=divergence.hint if divergence else verdict.hint,
        by=drill.spec.by,
    )


def _faults_before(drill: Drill, number: int) -> Iterator[Fault]:
    """The ends of the attempts before this one, as faults; and the restore that the leg began with."""
    if drill.began:
        yield Fault(id="U0", rank=0, phase="checkpoint.postcommit", at_step=drill.began, source="where the chaos leg began")
    requested = [(fault, record) for fault in drill.plan.faults for record in requests_of(fault, drill.chaos)]
    earlier = [attempt for attempt in drill.chaos.attempts if attempt.number <= number]
    for attempt, following in pairwise(earlier):
        fired = [(fault, record.step or 0) for fault, record in requested if record.attempt == attempt.number]
        inside = [_inside(fault, step) for fault, step in fired if fault.phase is not None and fault.kind != "drain"]
        yield from inside
        if not any(fault.facts.ends_attempt for fault in inside) and (again := _again(drill, attempt, following)):
            yield again


def _inside(fault: Fault, step: int) -> Fault:
    """A fault that ended the node or the supervisor while a rank waited at its fault point: in a replay the rank dies there by
    itself."""
    # The count that the run used does not apply: in a replay attempts have other numbers.
    here = dataclasses.replace(fault, at_step=step, occurrence=1, attempt=None)
    return dataclasses.replace(here, kind="kill", options={}, group=None) if fault.facts.inside is None else here


def _again(drill: Drill, attempt: Attempt, following: Attempt) -> Fault | None:
    """An unplanned death, or one caused from outside, as a fault at the last recorded step; None if no step was recorded."""
    last = max(attempt.steps, default=0)
    if not last:
        return None
    saves = last % drill.spec.checkpoint.every_steps == 0
    phase: Phase = "checkpoint.precommit" if saves and following.resume_step < last else "step"
    rank = next((record.rank for record in attempt.unplanned if record.rank is not None), 0)
    return Fault(id=f"U{attempt.number}", rank=rank, phase=phase, at_step=last, source="an unplanned death")


def repeats(target: Target, replayed: Divergence | None) -> bool | None:
    """Whether the replay differs at the same step, on the same ranks and in the same kind as the run; None if the run named no
    place."""
    if target.divergence is None:
        return None
    place = attrgetter("step", "kind", "ranks")
    return replayed is not None and place(replayed) == place(target.divergence)


SAVED = ("parameters before", "buffers", "optimizer state", "scheduler state", "registered state")
"""If one of these differs first, the script's other variables do not explain the difference."""
SHOWN = 5


def hint_of(target: Target, comparison: InspectionComparison) -> str | None:
    """The verdict's hint, and the script's own values that no checkpoint holds."""
    names = [candidate.words for candidate in candidates_of(comparison)]
    if not names:
        return target.hint
    found = f"no checkpoint holds {listed(names, SHOWN)}: {REMEDIES[target.by]['named']}"
    # The replays show what the verdict could only suppose.
    known = target.divergence is None or target.divergence.reason.hazard == "O8"
    return found if known or target.hint is None else f"{target.hint}; {found}"


def candidates_of(comparison: InspectionComparison) -> tuple[Candidate, ...]:
    finding = comparison.finding
    return () if finding and finding.quantity in SAVED else comparison.candidates


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    start: str | None
    """The checkpoint that both replays resumed from; None: both started from scratch."""
    why: str
    steps: int
    """The last step of the replay without faults."""
    attempts: int
    """Attempts of the replay with faults."""
    faults: tuple[str, ...]
    """The faults of that replay, in words."""
    changed: tuple[str, ...]
    """Local files of the script that have changed since the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    run_id: str
    divergence: Divergence | None
    """The run's own."""
    replay: Replay
    reproduced: bool
    account: str
    """One sentence: whether the replays showed the run's difference again."""
    comparison: InspectionComparison
    hazard: Hazard | None
    hint: str | None

    @property
    def exit_code(self) -> int:
        """0 for a diagnosis, 6 when the replays did not show the difference again: then nothing is proven."""
        return 0 if self.reproduced else 6

    def to_json(self) -> dict[str, object]:
        finding = self.comparison.finding
        return {
            "v": DIAGNOSIS_VERSION,
            "run": self.run_id,
            "exit_code": self.exit_code,
            "reproduced": self.reproduced,
            "account": self.account,
            "divergence": self.divergence.to_json() if self.divergence else None,
            "finding": asdict(finding) if finding else None,
            "hazard": self.hazard.to_json() if self.hazard else None,
            "hint": self.hint,
            "candidates": [asdict(entry) for entry in candidates_of(self.comparison)],
            "quantities": [asdict(entry) for entry in self.comparison.quantities],
            "moments": self.comparison.moments,
            "replay": asdict(self.replay),
        }
