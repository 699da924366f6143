"""The verdict on a drill, PASS, FAIL or INCONCLUSIVE, from its files alone; the rule for the status is in `verify.ruling`."""

import gc
from dataclasses import asdict, dataclass, replace
from typing import Literal

from pydantic import ValidationError

from chaosrun.errors import UsageError
from chaosrun.faults.fault import FaultPlan
from chaosrun.records.codec import DamagedRecordError
from chaosrun.records.events import RESUMABLE, Outcome
from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RUN, RunLayout
from chaosrun.records.run_file import RunInfo, read_object, read_run, recorded_leg
from chaosrun.spec.model import JobSpec
from chaosrun.verify.check import CheckResult, Divergence, Drill
from chaosrun.verify.checks import run_checks
from chaosrun.verify.code_checks import irreproducible
from chaosrun.verify.codes import Cause
from chaosrun.verify.confirm import worth_confirming
from chaosrun.verify.early_end import EARLY, up_to
from chaosrun.verify.premises import edited_sources
from chaosrun.verify.production import judge_run
from chaosrun.verify.row import Blame
from chaosrun.verify.ruling import EXIT_CODES, Ruling, VerdictStatus, rule
from chaosrun.verify.summaries import AttemptSummary, FaultOutcome, attempt_summaries, fault_outcomes
from chaosrun.verify.warnings import masked_loads, warnings
from chaosrun.wording import listed

VERDICT_VERSION = 1
REPLACED = (
    "the cached reference was replaced by a new run, from which it differed ({difference}): data, files or the machine have "
    "changed since it was made"
)
UNCONFIRMED = "not confirmed: the run without faults that shows whether the job repeats itself (verify.confirm) {how}"
EDITED = (
    "{files} changed while the run went on: what a restart does otherwise may come of the change, and steps that were not "
    "done twice are of several versions"
)
UNREPEATED = (
    "no fault-free run shows whether the job computes the same numbers twice at all: `chaosrun submit` of its job file does, "
    "and names what a restart loses"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    status: VerdictStatus
    exit_code: int
    reason: Cause
    headline: str
    """The reason in one sentence."""
    place: str | None = None
    """The place of the first difference, in words."""
    hint: str | None
    outcome: Outcome | None
    """How the chaos leg ended, or the reference leg if that did not complete; None while it runs."""
    checks: tuple[CheckResult, ...]
    divergence: Divergence | None
    faults: tuple[FaultOutcome, ...]
    attempts: tuple[AttemptSummary, ...]
    """Of the chaos leg."""
    steps: int
    """Last step of the chaos leg."""
    lost_steps: int
    warnings: tuple[str, ...] = ()
    """Findings that do not change the verdict; see `verify.warnings`."""
    resume_by: Literal["chaosrun", "script"] = "chaosrun"
    """Whose save and resume were tested."""
    confirmed: int = 0
    """Number of runs without faults that agreed with the reference after the legs had differed."""
    unconfirmed: bool = False
    """`resume` makes a run without faults that is still missing."""

    @property
    def code(self) -> str:
        return self.reason.code

    @property
    def cause(self) -> str:
        """One sentence: the reason for the status, and the place."""
        return self.headline if self.place is None else f"{self.headline} ({self.place})"

    @property
    def blame(self) -> Blame:
        blame, runs = self.reason.blame, self.confirmed + 1
        if runs == 1 or self.status != "FAIL":
            return blame
        return replace(blame, reason=f"{blame.reason}; without faults, the job repeats itself: {runs} of {runs}")

    @property
    def exact(self) -> bool:
        """A PASS in which every bit was compared: the job file may set tolerances (`verify.losses`, `verify.weights`)."""
        return self.code in ("exact", "settled")

    @property
    def settled(self) -> str | None:
        """ "settled at step 63 of 81: complete state equal", for a leg that ended there; see `verify.early_end`."""
        about = self.reason.params
        at = f"settled at step {about['step']} of {about['whole']}" if self.code == "settled" else None
        return at and f"{at}: complete state equal"

    def says(self, cause: str) -> bool:
        """Whether this is its cause, given as the code or as words of the sentence."""
        return cause == self.code or cause in self.cause

    def to_json(self) -> dict[str, object]:
        ruled = {name: getattr(self, name) for name in ("status", "exit_code", "code", "cause", "hint")}
        return {
            "v": VERDICT_VERSION,
            **ruled,
            "blame": asdict(self.blame),
            "outcome": self.outcome,
            "resume_by": self.resume_by,
            "checks": [check.to_json() for check in self.checks],
            "divergence": self.divergence.to_json() if self.divergence else None,
            "faults": [asdict(fault) for fault in self.faults],
            "attempts": [asdict(attempt) for attempt in self.attempts],
            "steps": self.steps,
            "lost_steps": self.lost_steps,
            "warnings": list(self.warnings),
        }


def judge(run: RunLayout) -> Verdict:
    """Judge a run from run.json, plan.json and its legs. Raises UsageError when it is not a run this version can read."""
    collects = gc.isenabled()
    gc.disable()  # the records of a thousand ranks hold no reference cycles, and the search for them takes a tenth of the time
    try:
        return _judged(run)
    finally:
        if collects:
            gc.enable()


def spec_of(run: RunLayout) -> JobSpec:
    """The job that run.json holds. Raises UsageError when it is not one that this version can read."""
    try:
        return JobSpec.model_validate(read_run(run).spec)
    except ValidationError as error:
        raise UsageError(
            f"{run.run_json}: spec: {error.errors()[0]['msg']}", hint="the run was written by another version of chaosrun"
        ) from error


def _judged(run: RunLayout) -> Verdict:
    info = read_run(run)
    plan = FaultPlan.read(run.plan_json)
    spec = spec_of(run)
    if info.kind == "run":
        return _judged_run(_leg_of(run, info, RUN), spec, plan)
    legs = [reference := _leg_of(run, info, "reference"), _leg_of(run, info, "chaos", begun=reference.outcome == "completed")]
    second = recorded_leg(run, info, "confirm")
    confirming = read_leg(second) if second.attempts() else None

    def judged(reference: LegHistory, chaos: LegHistory) -> Verdict:
        if not reference.attempts:  # lost: there is nothing to compare an attempt with
            chaos = replace(chaos, attempts=())
        drill = replace(Drill.of(reference, chaos, spec, plan, confirming), found_whole=_found_whole(run))
        if drill.chaos.finished and drill.chaos.outcome in EARLY:
            drill = up_to(drill, drill.chaos.finished.final_step)
        return judge_drill(drill, irreproducible=_irreproducible(info), confirmed=info.confirmed)

    try:
        verdict = judged(legs[0], legs[1])
    except DamagedRecordError as error:
        # Records that changed while they were being read cannot be judged.
        empty = [replace(leg, attempts=(), problems=(*leg.problems, error.message)) for leg in legs]
        verdict = judged(empty[0], empty[1])
    # The reference came from the cache, and has been replaced by a run made now.
    replaced = [] if info.reference.replaced is None else [REPLACED.format(difference=info.reference.replaced)]
    masked = [masked_loads(info.masked)] if info.masked else []
    missing, how = _unconfirmed(info, spec, verdict, confirming)
    doubt = [UNCONFIRMED.format(how=how)] if how else []
    return replace(verdict, warnings=(*doubt, *masked, *replaced, *verdict.warnings), unconfirmed=missing)


def _leg_of(run: RunLayout, info: RunInfo, name: str, *, begun: bool = True) -> LegHistory:
    """A leg of the run's own. A run that is continued loses its verdict first, so one with a verdict has ended in each leg that
    has `begun`."""
    leg = read_leg(recorded_leg(run, info, name))
    if leg.finished or not begun or not run.verdict_json.is_file():
        return leg
    lost = f"the record of its end is lost: {run.verdict_json.name} shows that the run has ended"
    return replace(leg, problems=(*leg.problems, lost))


def _unconfirmed(info: RunInfo, spec: JobSpec, verdict: Verdict, second: LegHistory | None) -> tuple[bool, str | None]:
    """Whether a confirming run can still be made, and what is known of it; None if it was made, or none is needed."""
    outcome = second and second.outcome
    if outcome == "completed" or info.confirmed >= spec.verify.confirm or info.irreproducible or not worth_confirming(verdict):
        return False, None
    how = f"ended: {outcome.replace('_', ' ')}" if outcome else "has not ended" if second else "has not begun"
    how = "was interrupted" if outcome == "interrupted" else how  # and may be under way again
    return outcome in RESUMABLE, how


def _found_whole(run: RunLayout) -> bool:
    """Whether the verdict made at the run's end, if it exists, found its final checkpoints valid."""
    try:
        checks = read_object(run.verdict_json)["checks"]
        return any(check["name"] == "final_checkpoint" and check["status"] == "pass" for check in checks)
    except (UsageError, LookupError, TypeError):
        return False


def _judged_run(leg: LegHistory, spec: JobSpec, plan: FaultPlan) -> Verdict:
    try:
        found = judge_run(leg, spec, plan)
    except DamagedRecordError as error:
        found = judge_run(replace(leg, attempts=(), problems=(*leg.problems, error.message)), spec, plan)
    edited = [EDITED.format(files=listed(names))] if (names := edited_sources(leg)) else []
    told = (*edited, *([UNREPEATED] if found.divergence else []))
    return _verdict(found.drill, found.ruling, found.divergence, found.checks, leg.outcome, told)


def _irreproducible(info: RunInfo) -> Cause | None:
    """How the reference and the confirming run differed; None if there was no second one, or no difference."""
    difference, reference = info.irreproducible, info.reference
    if not difference:
        return None
    if reference.source is not None:
        return Cause.of("reference_of_another_job", run=reference.run, difference=difference)
    return Cause.of("undisturbed_runs_differ", because=info.wanders and irreproducible(info.wanders), difference=difference)


def judge_drill(drill: Drill, *, irreproducible: Cause | None = None, confirmed: int = 0) -> Verdict:
    """Judge a drill. Pure but for the checkpoints' audit. `irreproducible`: how runs without faults differed; `confirmed`: how
    many agreed."""
    checks = run_checks(drill)
    ruling, divergence = rule(drill, checks, irreproducible)
    leg = drill.chaos if drill.reference.outcome == "completed" else drill.reference
    return replace(_verdict(drill, ruling, divergence, checks, leg.outcome), confirmed=confirmed)


def _verdict(
    drill: Drill,
    ruling: Ruling,
    divergence: Divergence | None,
    checks: tuple[CheckResult, ...],
    outcome: Outcome | None,
    told: tuple[str, ...] = (),
) -> Verdict:
    attempts = attempt_summaries(drill)
    return Verdict(
        status=ruling.status,
        exit_code=EXIT_CODES[ruling.status] if ruling.exit_code is None else ruling.exit_code,
        reason=ruling.reason,
        headline=ruling.reason.sentence if ruling.headline is None else ruling.headline,
        place=ruling.place,
        hint=ruling.reason.hint if ruling.hint is None else ruling.hint,
        outcome=outcome,
        checks=checks,
        divergence=divergence,
        faults=fault_outcomes(drill.plan, drill.chaos),
        attempts=attempts,
        steps=drill.chaos_lineage.final_step,
        lost_steps=sum(attempt.lost_steps for attempt in attempts),
        warnings=(*told, *warnings(drill, failed=ruling.status == "FAIL")),
        resume_by=drill.spec.by,
    )
