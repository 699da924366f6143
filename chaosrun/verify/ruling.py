"""The rule that turns checks, the first difference and the ends of both legs into a verdict's status, reason and exit code.

Nothing but an explicit pass of every required check makes a PASS: a skipped, missing, undecided or crashed one does not.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Literal

from chaosrun.faults.landed import requests_of
from chaosrun.records.events import TRAINED, FaultObserved, LegFinished
from chaosrun.records.history import LegHistory
from chaosrun.records.order import DataResume
from chaosrun.verify import libraries
from chaosrun.verify.alignment import never_saves
from chaosrun.verify.check import CheckResult, Divergence, Drill, Status
from chaosrun.verify.checks import CHECKS, PREMISES, required, run_checks
from chaosrun.verify.codes import Cause, Params
from chaosrun.verify.compare import first_difference
from chaosrun.verify.corruption import damage_taken, explained
from chaosrun.verify.divergence import first_divergence
from chaosrun.verify.early_end import early_end, settled_step, up_to
from chaosrun.verify.finals import final_checkpoint
from chaosrun.verify.own_saves import cut_short
from chaosrun.verify.plain_values import with_values, with_values_at_end
from chaosrun.verify.premises import file_that_differs
from chaosrun.verify.recovery import died_in_restore, refused_by_load
from chaosrun.verify.replicas import Replicas
from chaosrun.verify.summaries import fault_outcomes
from chaosrun.verify.suspects import with_later_files, with_outside_state, with_settings
from chaosrun.wording import count

VerdictStatus = Literal["PASS", "FAIL", "INCONCLUSIVE"]

EXIT_CODES: Mapping[VerdictStatus, int] = {"PASS": 0, "FAIL": 3, "INCONCLUSIVE": 6}
PASS_CODES = frozenset({"exact", "within_tolerance", "settled", "never_saves"})
"""Codes of a PASS, which `_pass` chooses from."""
OUTCOME_EXIT_CODES: Mapping[str, int] = {
    "user_error": 4,
    "recovery_failed": 5,
    "resources": 7,
    "timeout": 124,
    "interrupted": 130,
}
"""Exit codes of a leg that did not complete; its drill is INCONCLUSIVE."""
END_CODES: Mapping[str, str] = {
    "user_error": "script_failed",
    "recovery_failed": "recovery_failed",
    "inexact_restore": "state_changed_on_load",
    "resources": "resources",
    "timeout": "timeout",
    "interrupted": "interrupted",
    "diverged": "stopped_apart",
    "fault_missed": "fault_missed",
}
"""The cause's code for a leg's outcome, if nothing more precise is known."""
IDS_SHOWN = 8
RECOVERY_CHECKS = ("completed", "lineage", "resume_points", "data_order", "rng")
"""Checks that fail only if recovery was wrong: a corruption of numbers does not make them fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ruling:
    status: VerdictStatus
    reason: Cause
    headline: str | None = None
    """None: the sentence of the reason."""
    place: str | None = None
    hint: str | None = None
    """None: that of the reason."""
    exit_code: int | None = None
    """None: that of the status."""


def rule(drill: Drill, checks: Sequence[CheckResult], irreproducible: Cause | None) -> tuple[Ruling, Divergence | None]:
    """The ruling of the first rule that applies, and the first difference, as far as recovery may be its reason."""
    unfounded = _of_premises(checks, irreproducible, drill)
    divergence = first_divergence(drill)
    drifted = _of_drift(checks)
    blameless = unfounded or drifted
    if divergence and blameless:
        divergence = _without_blame(divergence, drill.chaos, blameless.reason)
    elif divergence and (injection := explained(divergence, drill)):
        divergence = replace(divergence, reason=Cause.of("corruption_injected", because="where", what=injection.what))
    if divergence and not blameless:
        divergence = with_later_files(drill, with_values(drill, divergence))
    if divergence:
        divergence = with_settings(drill, divergence)
        divergence = libraries.with_library_bug(divergence, drill) if drill.by_script else with_outside_state(drill, divergence)
    if divergence and not blameless and (resumed := _went_on_wrong(checks, divergence)):
        divergence = replace(divergence, reason=libraries.for_own_resume(_cause_of(resumed)))
    if divergence and not blameless and drill.by_script and (damage := damage_taken(drill, divergence)):
        divergence = replace(divergence, reason=divergence.reason.explained("damaged.taken", damage=damage))
    corrupted = None if blameless else _of_corruption(checks, drill)
    unproven = unfounded if drill.chaos.outcome == "inexact_restore" and drill.reference.outcome == "completed" else None
    ruling = (
        corrupted
        or unproven
        or _not_taken_back(drill, checks)
        or (_never_came_back(drill, divergence) if drill.by_script or not blameless else None)
        or _of_outcomes(drill.reference, drill.chaos, checks)
        or unfounded
        or drifted
        or _of_control(checks, divergence, drill)
        or _of_failures(checks, divergence, drill)
        or _of_doubts(checks, drill)
        or _pass(drill)
    )
    if ruling.reason.code == "ended_at_another_step":
        ruling = replace(ruling, reason=with_values_at_end(drill, ruling.reason))
    if drill.by_script:
        ruling = replace(ruling, reason=libraries.for_own_resume(ruling.reason))
    return ruling, divergence


_HARMLESS = ("kill", "preempt", "abort")
"""Faults that change no file."""
_UNSET = ("UnboundLocalError", "NameError")


def _never_came_back(drill: Drill, divergence: Divergence | None) -> Ruling | None:
    """The ruling on a script that completes without faults, and fails at every restart after one."""
    chaos, end = drill.chaos, drill.chaos.finished
    if drill.reference.outcome != "completed" or end is None or end.outcome not in ("user_error", "recovery_failed"):
        return None
    if end.code not in (None, "hung", "out_of_memory"):
        return None
    observed = chaos.events(FaultObserved)
    # A script that crashes on its notice leaves no evidence of it but the request.
    told_to_leave = (fault for fault in drill.plan.faults if drill.by_script and fault.facts.notice)
    notices = [each for fault in told_to_leave for each in requests_of(fault, chaos)]
    struck = [*(seen for seen in observed if seen.how != "note"), *notices]
    last = max(struck, key=lambda seen: seen.attempt, default=None)
    if last is None or last.attempt >= len(chaos.attempts):
        return None
    if divergence and (not drill.by_script or "stood" in divergence.reason.params):
        # If it began with state that is not of one step, or chaosrun restored wrong state, that may be why it failed.
        ruling = of_divergence(divergence, drill.spec.data.resume)
        return replace(ruling, place=f"{ruling.place}; then {_message(end)}")
    if not drill.by_script and not any(d.error and d.error.by_script for d in chaos.attempts[-1].unplanned):
        return None
    known = {fault.id: fault for fault in drill.plan.faults}
    # If an attempt had several faults, the one that damaged a file is a likelier reason than the kill.
    beside = sorted({seen.fault for seen in (*struck, *observed) if seen.attempt == last.attempt})
    told = [f"{name} ({known[name].describe() if name in known else name})" for name in beside]
    code = "never_came_back" if drill.by_script else "raises_after_restart"
    harmful = any(known[name].kind not in _HARMLESS or known[name].phase == "save" for name in beside if name in known)
    because = None if harmful or last in notices or cut_short(chaos) else "whole"
    if because and drill.by_script and any(each.number > last.attempt and each.steps for each in chaos.attempts):
        because = "later"
    if because and drill.by_script and any(each.error and each.error.type in _UNSET for each in chaos.attempts[-1].unplanned):
        because = "unset"
    what = refused_by_load(_message(end)) if because == "whole" and drill.by_script else None
    because = "refused" if what else because
    reason = Cause.of(code, because=because, fault=" and ".join(told), message=_message(end), what=what)
    hint = end.hint if drill.by_script else None
    return Ruling(status="FAIL", reason=reason, hint=f"{reason.hint}; {hint}" if hint and not end.code else hint)


def _not_taken_back(drill: Drill, checks: Sequence[CheckResult]) -> Ruling | None:
    """The ruling if the script's objects failed to load valid checkpoints, and the leg ended because of that."""
    found = next((check for check in checks if check.code == "checkpoint_not_taken_back"), None)
    ended = drill.reference.outcome == "completed" and drill.chaos.outcome in ("user_error", "recovery_failed")
    return of_check(found) if found and ended and died_in_restore(drill.chaos.attempts[-1]) else None


def _of_outcomes(reference: LegHistory, chaos: LegHistory, checks: Sequence[CheckResult]) -> Ruling | None:
    """A leg that did not complete decides the drill; a restore that chaosrun itself found inexact fails it."""
    for leg in (reference, chaos):
        if leg.outcome in (TRAINED if leg is chaos else ("completed",)):
            continue
        if leg.finished is None:
            damaged = None if only_missing(reference, chaos) else of_damage(checks)
            return damaged or Ruling(status="INCONCLUSIVE", reason=Cause.of("not_finished", leg=leg.name))
        ruling = of_end(leg, fails=leg is chaos and leg.outcome == "inexact_restore")
        if leg.outcome == "user_error" and (found := Replicas(leg).drift()):
            headline = f"{leg.name} leg: the replicas had drifted apart ({found.what}) when {_message(leg.finished)}"
            reason = Cause.of("replicas_drift", because="fault_free", leg=leg.name, what=found.what, aside="")
            return replace(ruling, reason=reason, headline=headline, hint=None)
        return ruling
    return None


def of_damage(checks: Sequence[CheckResult]) -> Ruling | None:
    """The ruling if a leg's records are damaged: perhaps only the record of its end is missing."""
    found = next((check.cause for check in checks if check.code == "records_damaged"), None)
    return found and Ruling(status="INCONCLUSIVE", reason=found)


def only_missing(*legs: LegHistory) -> bool:
    """Whether the only problem with the records is that the run has not written them yet."""
    return all(len(leg.problems) <= (not leg.layout.journal.exists()) for leg in legs)


def of_end(leg: LegHistory, *, fails: bool = False) -> Ruling:
    end = leg.finished
    assert end is not None
    reason = Cause(end.code or END_CODES[end.outcome], {"leg": leg.name, "message": _message(end)})
    if fails:
        return Ruling(status="FAIL", reason=reason, hint=reason.hint or end.hint)
    return Ruling(status="INCONCLUSIVE", reason=reason, hint=end.hint, exit_code=OUTCOME_EXIT_CODES.get(end.outcome))


def _message(end: LegFinished) -> str:
    return end.message or end.outcome


def _of_premises(checks: Sequence[CheckResult], irreproducible: Cause | None, drill: Drill) -> Ruling | None:
    doubts = [check.cause for check in checks if check.name in PREMISES and check.cause is not None]
    # A mistake that was seen says more than that two runs differ.
    known = [each for each in doubts if each.code in ("parameter_order", "file_of_another_leg") or each.because == "by_itself"]
    found = next(iter([*known, *([irreproducible] if irreproducible else []), *doubts]), None)
    if found and found.code in ("job_not_repeatable", "undisturbed_runs_differ"):
        found = file_that_differs(drill) or found
    return found and Ruling(status="INCONCLUSIVE", reason=found)


def _without_blame(divergence: Divergence, chaos: LegHistory, unfounded: Cause) -> Divergence:
    """The divergence without its cause, if the job is not reproducible: the place is useful, but after a restore its cause
    would blame a recovery that may be right."""
    attempt = chaos.attempt(divergence.attempt)
    if not attempt.went_on:
        # The state that a script begins with is judged as if it came from a checkpoint.
        return replace(divergence, reason=unfounded) if attempt.by == "script" else divergence
    because = "replicas_drift.begun" if unfounded.because == "begun" else unfounded.code
    return replace(divergence, reason=Cause("not_of_the_restore", unfounded.params, because=because))


def _of_drift(checks: Sequence[CheckResult]) -> Ruling | None:
    """Replicas that drift apart in the reference run fail the drill: a restore makes them equal again, and so differs without
    being wrong."""
    for check in checks:
        if check.cause and check.status == "fail" and check.code == "replicas_drift" and check.evidence["leg"] == "reference":
            return Ruling(status="FAIL", reason=check.cause)
    return None


def _of_corruption(checks: Sequence[CheckResult], drill: Drill) -> Ruling | None:
    """A corruption that was injected and found fails the drill, even if the training crashed because of it."""
    outcome = drill.chaos.outcome
    if drill.reference.outcome != "completed" or outcome not in ("completed", "user_error", "recovery_failed"):
        return None
    failing = {check.name: check for check in checks if check.status == "fail"}
    seen = failing.get("silent_corruption")
    if seen is None:
        return None
    beside = next((failing[name] for name in RECOVERY_CHECKS if name in failing), None)
    if beside is not None and outcome == "completed":
        headline = f"{about_check(beside)}, which no corruption explains; besides, {seen.summary}"
        return Ruling(status="FAIL", reason=_cause_of(beside), headline=headline)
    end = "" if drill.chaos.finished is None or outcome == "completed" else f"; then {drill.chaos.finished.message}"
    reason = Cause.of("corruption_injected")
    return Ruling(status="FAIL", reason=reason, headline=f"{reason.sentence}: {seen.summary}{end}")


def _of_failures(checks: Sequence[CheckResult], divergence: Divergence | None, drill: Drill) -> Ruling | None:
    """A divergence fails the drill even if no check should have reported it."""
    ended = next((check for check in checks if check.code == "ended_at_another_step"), None) if drill.by_script else None
    counted = divergence is None or (
        divergence.attempt == drill.chaos.attempts[-1].number and divergence.kind not in ("weights", "optimizer")
    )
    if ended and counted and not (divergence and _explains(divergence.reason, ended, drill)):
        # Its last restart resumed with the right weights: only its count of steps differs since then.
        place = f"first difference: {divergence.kind} at step {divergence.step}" if divergence else None
        reason = _cause_of(ended)
        if divergence:
            # The script's plain values are reported with the end.
            without = {name: value for name, value in divergence.reason.params.items() if name not in ("had", "as_saved")}
            hint = replace(divergence.reason, params=without).hint
            reason = reason.explained(reason.because, **({"first_hint": hint} if hint else {}))
        return Ruling(status="FAIL", reason=reason, place=place)
    resumed = divergence and _went_on_wrong(checks, divergence)
    if divergence and not resumed:
        return of_divergence(divergence, drill.spec.data.resume)
    failing = resumed or first_of(checks, "fail")
    return failing and of_check(failing)


def _went_on_wrong(checks: Sequence[CheckResult], divergence: Divergence) -> CheckResult | None:
    """The check of where restarts resumed, if it failed and all steps agree: files saved under other numbers, or less often,
    are then a consequence, but not those that an earlier attempt saved."""
    found = next((check for check in checks if check.name == "resume_evidence" and check.status == "fail"), None)
    follows = found and divergence.kind == "saved state" and found.evidence["attempt"] <= divergence.attempt
    return found if follows else None


def _of_control(checks: Sequence[CheckResult], divergence: Divergence | None, drill: Drill) -> Ruling | None:
    """The ruling on a whole leg that failed after a step at which an early verdict would have passed it: chaosrun's own
    mistake."""
    failed = divergence or any(check.status == "fail" for check in checks)
    step = settled_step(drill) if failed and drill.ended_early is None and drill.chaos.outcome == "completed" else None
    if step is None or (divergence and divergence.step <= step):
        return None
    # The checkpoints that retention kept do not matter here.
    before = run_checks(up_to(drill, step), tuple(check for check in CHECKS if check not in (early_end, final_checkpoint)))
    if any(check.status == "fail" for check in before):
        return None
    ruling = _of_failures(checks, divergence, drill)
    first = ruling.headline or ruling.reason.sentence if ruling else ""
    return Ruling(status="FAIL", reason=Cause.of("settled_too_early", step=step, first=first), place=ruling and ruling.place)


def _explains(reason: Cause, ended: CheckResult, drill: Drill) -> bool:
    """Whether the cause explains the wrong last step: the data are behind or ahead by at least as many batches as the end is
    off, or batches have another size, or steps have other micro-batches, or passes begin elsewhere."""
    if reason.code in ("batch_size_not_restored", "other_optimizer_stepped") or reason.because == "each_pass":
        return True  # an epoch has another number of steps then
    assert ended.cause is not None
    steps, rank = ended.cause.params["step"] - ended.cause.params["expected"], ended.cause.params["rank"]
    first = drill.reference_lineage.at(rank, 1)
    # An earlier epoch's order does not make a training longer; a new count of epochs does.
    shift = reason.params.get("shift", 0) if reason.code != "sampler_epoch_not_set" else 0
    return first is not None and min(0, -shift) <= steps * len(first.batch) <= max(0, -shift) and bool(shift)


def first_of(checks: Sequence[CheckResult], status: Status) -> CheckResult | None:
    return next((check for check in checks if check.status == status), None)


def of_check(check: CheckResult) -> Ruling:
    status = "FAIL" if check.status == "fail" else "INCONCLUSIVE"
    return Ruling(status=status, reason=_cause_of(check), headline=about_check(check))


def about_check(check: CheckResult) -> str:
    return f"{check.name}: {check.summary}"


def _cause_of(check: CheckResult) -> Cause:
    assert check.cause is not None, f"{check.name} did not pass and says nothing"
    return check.cause


def of_divergence(divergence: Divergence, protocol: DataResume) -> Ruling:
    where = f"step {divergence.step}, rank {divergence.rank}, attempt {divergence.attempt}"
    if stood := divergence.reason.params.get("stood"):
        where = f"{where}, which began with {stood}"
    tensor = f", {divergence.tensor}" if divergence.tensor else ""
    reason, seen = divergence.reason, f": {where}{tensor}"
    if divergence.kind == "data order":
        ids = [_around(*pair) for pair in permutations((divergence.expected, divergence.seen))]
        seen = f" in data order: {where}: samples {ids[0]} expected, {ids[1]} seen"
        if protocol != "seedable":  # the divergence says the rest
            reason = reason.explained("data_resume_inexact", protocol=protocol)
    headline = f"{divergence.cause} ({reason.params['known']})" if "known" in reason.params else divergence.cause
    return Ruling(status="FAIL", reason=reason, headline=headline, place=f"first difference{seen}")


def _around(ids: Any, others: Any) -> str:
    """The sample ids of a batch; of a large one, only those from the first differing id on."""
    if not isinstance(ids, list | tuple) or not isinstance(others, list | tuple):
        return str(ids)
    start = (first_difference(ids, others) or 0) if len(ids) > IDS_SHOWN else 0
    shown = [*(["…"] if start else []), *ids[start : start + IDS_SHOWN], *(["…"] if len(ids) > start + IDS_SHOWN else [])]
    return f"[{', '.join(map(str, shown))}]"


def _of_doubts(checks: Sequence[CheckResult], drill: Drill) -> Ruling | None:
    if doubtful := first_of(checks, "inconclusive"):
        return of_check(doubtful)
    lacking = sorted(required(drill) - {check.name for check in checks if check.status == "pass"})
    return Ruling(status="INCONCLUSIVE", reason=Cause.of("checks_missing", checks=lacking)) if lacking else None


def _pass(drill: Drill) -> Ruling:
    verify, attempts = drill.spec.verify, drill.chaos.attempts
    landed = sum(fault.landed for fault in fault_outcomes(drill.plan, drill.chaos))
    restored = any(attempt.went_on for attempt in attempts)
    exact = drill.exact_weights and verify.losses.exact
    unseen = never_saves(drill) and len(attempts) > 1
    whose = "the script" if drill.by_script else "chaosrun"
    tested = f"saved and resumed by {whose}" if restored else "no checkpoint was restored, every attempt began at the beginning"
    if recalled := sum(attempt.source == "memory" for attempt in attempts):
        tested += f", {count(recalled, 'restart')} from copies in memory"
    if drill.began:
        tested += f"; it began at step {drill.began} from the reference's checkpoint"
    if drill.ended_early is not None:
        about: Params = {"step": drill.ended_early, "whole": drill.whole, "ranks": drill.spec.workers, "faults": landed}
        return Ruling(status="PASS", reason=Cause.of("settled", **about, more=f"; {tested}"))
    reason = Cause.of(
        "never_saves" if exact and unseen else "exact" if exact else "within_tolerance",
        because=None if restored or unseen else "never_restored",
        steps=drill.chaos_lineage.final_step - drill.given,
        ranks=drill.spec.workers,
        faults=landed,
        more=f"; {tested}",
    )
    return Ruling(status="PASS", reason=reason)
