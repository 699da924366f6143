"""Whose fault a verdict is: the user's, the machine's, chaosrun's, nobody's. Pure: a function of the verdict alone.

What chaosrun restores and orders it answers for, and it compares digests of what it restored with those of what was saved.
What the script does with it, and what it draws on beside it, the script answers for. `likely`: the records do not settle it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from chaosrun.verify.account import UNPLANNED
from chaosrun.verify.corruption import CAUSE
from chaosrun.verify.replicas import DRIFT_HINT

if TYPE_CHECKING:
    from chaosrun.verify.account import FaultOutcome
    from chaosrun.verify.check import Check
    from chaosrun.verify.divergence import Divergence
    from chaosrun.verify.verdict import Verdict

Whose = Literal["nobody", "planned", "yours", "machine", "chaosrun", "unknown"]

WHOSE: Mapping[Whose, str] = {
    "nobody": "nobody's",
    "planned": "as planned",
    "yours": "yours",
    "machine": "the machine's",
    "chaosrun": "chaosrun's",
    "unknown": "not known",
}
"""In words, as an answer to "whose fault is it?"."""

INEXACT_PROTOCOL = "only seedable is exact"
"""What a hint says of a data.resume that cannot be exact."""
_REPORT = "please report it, with the run's folder"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    whose: Whose
    likely: bool = False
    """The records point there without proving it."""
    part: Literal["script", "job file", "plan", "command"] | None = None
    """Of the user's: where to look."""
    reason: str
    """A clause for people: "its own steps differ, although everything was restored as it was saved"."""

    @property
    def words(self) -> str:
        """ "yours (the script), most likely"."""
        part = "" if self.part is None else f" (the {self.part})"
        return f"{WHOSE[self.whose]}{part}{', most likely' if self.likely else ''}"

    @property
    def sentence(self) -> str:
        return f"{self.words}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        return {"whose": self.whose, "likely": self.likely, "part": self.part, "reason": self.reason}


def blame(verdict: "Verdict") -> Blame:
    match verdict.status:
        case "PASS":
            how = "exactly" if verdict.exact else "within the tolerances that its job file allows"
            return Blame(whose="nobody", reason=f"the job came back {how}")
        case "FAIL":
            return _of_failure(verdict)
        case _:
            return _of_doubt(verdict)


def _script(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="yours", part="script", reason=reason, likely=likely)


def _plan(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="yours", part="plan", reason=reason, likely=likely)


def _machine(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="machine", reason=reason, likely=likely)


def _ours(reason: str, *, likely: bool = False) -> Blame:
    return Blame(whose="chaosrun", reason=f"{reason}; {_REPORT}", likely=likely)


# FAIL


def _of_failure(verdict: "Verdict") -> Blame:
    if verdict.cause.startswith(CAUSE):
        return Blame(whose="planned", reason="the injected corruption was found, as a fault of this kind is meant to be")
    failing = [check for check in verdict.checks if check.status == "fail"]
    if verdict.outcome == "inexact_restore":
        component = re.match(r"rank \d+: (\w+) is not what checkpoint", verdict.cause)
        return _of_restore(component[1] if component else None)
    if any(check.name == "rank_agreement" and check.evidence.get("leg") == "reference" for check in failing):
        return _script("its replicas drift apart without any fault")
    if verdict.divergence is not None:
        inexact = INEXACT_PROTOCOL in (verdict.hint or "")
        return _of_divergence(verdict.divergence, inexact=inexact)
    named = next((check for check in failing if verdict.cause.startswith(f"{check.name}:")), failing[0] if failing else None)
    return Blame(whose="unknown", reason=verdict.cause) if named is None else _of_failed_check(named)


def _of_restore(component: str | None) -> Blame:
    """chaosrun refused to go on with what came back."""
    if component == "registered":
        return _script("load_state_dict of a registered object does not bring back what its state_dict gave")
    what = "the state" if component is None else f"the {component} state"
    return _ours(f"{what} that came back is not what was saved, unless a hook of the script changes it on loading", likely=True)


_RESTORED_BY_US = re.compile(
    r"another checkpoint restored|position not restored|weights (not restored|of another step)|.* not restored|"
    r".* of another (rank|step)|.* under other names"
)
_DATA_OF_SCRIPT = ("batch contents", "data order not restored", "data order")
_OF_SCRIPT: Mapping[str, str] = {
    "initial weights": "its initial weights depend on something besides the seed",
    "forward pass": "the same data, weights and random numbers give it another loss",
    "gradient": "the same data, weights and loss give it another gradient",
    "learning rate": "its learning rate follows something that is not in the job's state",
    "optimizer update": "the same weights and gradients give it another update",
    "batch contents": "the same samples came with other contents: they draw on something that is not restored",
    "accumulation window": "a step took another number of micro-batches than undisturbed",
    "LR scheduler not restored": "its learning rate scheduler is neither prepared nor registered",
    "learning rate not restored": "it changes the learning rate after the optimizer's state was loaded",
    "optimizer settings not restored": "it changes the optimizer's settings after its state was loaded",
    "registered state not restored": "load_state_dict of a registered object does not bring back what its state_dict gave",
    "optimizer state of another rank": "its ranks held different optimizer states, of which one is saved for all",
    "LR scheduler of another rank": "its ranks held different schedules, of which one is saved for all",
    "not shown to come from the restore": "it differs from itself, with or without a restore",
}


_LIKELY = ("forward pass", "accumulation window", "learning rate not restored", "LR scheduler not restored")
"""Where chaosrun, or a library, might have a part in it."""


def _of_divergence(found: "Divergence", *, inexact: bool) -> Blame:
    if inexact:
        return Blame(
            whose="yours", part="job file", reason=f"it asks for a data.resume that does not resume exactly; {INEXACT_PROTOCOL}"
        )
    if reason := _OF_SCRIPT.get(found.cause):
        return _script(reason, likely=found.cause in _LIKELY)
    if found.cause == "gradient reduction (bucket layout)":
        return _ours(
            "gradients were reduced in another order, unless the script wraps the model anew after a restart", likely=True
        )
    if found.cause.endswith(" drifted"):
        return _script(f"{found.cause}: it follows something that no checkpoint holds")
    if found.kind == "data order" or found.kind == "batch":
        if found.cause in _DATA_OF_SCRIPT:
            return _script("the order of its samples follows a seed or a state that no checkpoint holds", likely=True)
        return _ours(f"{found.cause} on resume, unless the script's own sampler lost its place", likely=True)
    if _RESTORED_BY_US.fullmatch(found.cause):
        return _ours(f"{found.cause}, unless a hook of the script changes it on loading", likely=found.kind != "position")
    return Blame(whose="unknown", reason=f"{found.cause} at step {found.step}")


def _of_failed_check(check: "Check") -> Blame:
    """A difference that no step shows."""
    match check.name:
        case "resume_points" if check.evidence.get("unrestorable"):
            return _script("what it prepares before the restore is not what it had when it was saved", likely=True)
        case "lineage" | "resume_points" | "final_checkpoint" | "final_position":
            return _ours(f"the job was not taken up where it should have been ({check.name})", likely=True)
        case "completed":
            return _script("it ended at another step than undisturbed: what ends it is not in the job's state", likely=True)
        case "bucket_layout":
            return _ours("gradients were reduced in another layout after a restart", likely=True)
        case "replay_agreement":
            return _script("steps done twice came out differently: something in them is not deterministic", likely=True)
        case "rank_agreement":
            return _script("its replicas drift apart", likely=True)
        case name if name.startswith("final_"):
            return _script("all steps agree and the state at the end does not: it was changed after the last step", likely=True)
        case name:
            return Blame(whose="unknown", reason=f"the check {name} failed")


# INCONCLUSIVE


def _of_doubt(verdict: "Verdict") -> Blame:
    if verdict.hint == DRIFT_HINT:
        return _script("its replicas drift apart without any fault")
    if verdict.outcome != "completed":
        return _of_outcome(verdict)
    if verdict.cause.startswith("the reference of run "):
        return Blame(whose="yours", part="command", reason="the reference that was named is not this job's")
    if verdict.cause.startswith("two undisturbed runs "):
        return _script("it does not give the same numbers twice, without any fault")
    doubtful = [check for check in verdict.checks if check.status not in ("pass", "skip")]
    named = [check for check in doubtful if verdict.cause == check.summary or verdict.cause.startswith(f"{check.name}: ")]
    if named:
        return _of_doubtful_check(named[0], verdict)
    return _ours("a check that must pass was left out", likely=True)


def _of_outcome(verdict: "Verdict") -> Blame:
    leg, _, message = verdict.cause.partition(" leg: ")
    message = message or leg
    match verdict.outcome:
        case None:
            if _has_damaged_records(verdict):
                return _machine("the run's files are damaged, by the storage or from outside", likely=True)
            return Blame(whose="nobody", reason="the run has not come to its end")
        case "interrupted":
            return Blame(whose="nobody", reason="the run was interrupted")
        case "user_error":
            return next((told for pattern, told in _RAISED if pattern.search(message)), _RAISED_BY_SCRIPT)
        case "fault_missed":
            return _plan("its faults met in an order in which one of them could not happen any more")
        case "resources":
            return _machine("it could not give what the run asked for")
        case "timeout":
            return Blame(
                whose="unknown", reason="the job file's `timeout` passed: it is too short, or the machine was too slow"
            )
        case "recovery_failed":
            return next((told for pattern, told in _DEATHS if pattern.search(message)), _UNKNOWN_DEATH)
        case _:
            return _of_restore(None)


def _has_damaged_records(verdict: "Verdict") -> bool:
    """Not merely missing: a run that has not come that far has none yet."""
    problems = next((check.evidence.get("problems", ()) for check in verdict.checks if check.name == "records"), ())
    return any(not problem.endswith(" is missing") for problem in problems)


_RAISED_BY_SCRIPT = _script("it failed, and no fault was the reason")
_RAISED: tuple[tuple[re.Pattern[str], Blame], ...] = (
    (re.compile(r"^rank \d+ raised \S+ inside chaosrun at step"), _ours("code of its own failed", likely=True)),
    (
        re.compile(r"out of memory|^rank \d+ raised (\S*OutOfMemoryError|MemoryError) at step|\[Errno 5\]"),
        _script("it failed, and no fault was the reason, unless the machine gave less than it should", likely=True),
    ),
)
"""Errors that ended the training and are not, or not surely, the script's."""

_DEATHS: tuple[tuple[re.Pattern[str], Blame], ...] = (
    (re.compile(r"was killed by (SIG\w+|signal \d+) at step"), _machine("something outside the run killed its processes")),
    (re.compile(r"was told to leave \(SIGTERM\)"), _machine("the cluster, or a person, took its place away")),
    (
        re.compile(r"was lost at step \d+: its node|\b(agent|actor)\b.* (died|dead|lost|unavailable)"),
        _machine("a node, or its agent, was lost"),
    ),
    (
        re.compile(r"told to leave, announced the end of step"),
        _script("ranks that do not reduce gradients at every step cannot leave together"),
    ),
    (re.compile(r"did not go within|outlived a SIGKILL"), _machine("a process could not be killed")),
    (re.compile(r"holds more than tensors and plain values"), _script("its checkpoints hold classes that are not allowed")),
    (re.compile(r"InvalidCheckpointError"), _machine("a checkpoint was damaged, by the storage or from outside", likely=True)),
    (re.compile(r"hangs: no progress"), _script("it made no progress, and no fault was the reason", likely=True)),
    (re.compile(r"checkpoint"), _ours("no checkpoint could be gone on with", likely=True)),
)
"""How the deaths of `supervise.deaths` and the lifecycle's own read, and whose they are."""
_UNKNOWN_DEATH = _ours("recovery came to no end", likely=True)


def _of_doubtful_check(check: "Check", verdict: "Verdict") -> Blame:
    if check.evidence.get("crashed"):
        return _ours(f"the check {check.name} crashed")
    if check.summary.startswith("only "):
        return _ours("records are missing", likely=True)
    return _DOUBTS.get(check.name, _of_unknown_doubt)(check, verdict)


def _of_unknown_doubt(check: "Check", verdict: "Verdict") -> Blame:
    return Blame(whose="unknown", reason=f"the check {check.name} could not be decided")


def _of_reference(check: "Check", verdict: "Verdict") -> Blame:
    if "attempts" in check.evidence:
        return _machine("the undisturbed run was interrupted too", likely=True)
    return _ours("the undisturbed run cannot be relied on", likely=True)


def _of_environment(check: "Check", verdict: "Verdict") -> Blame:
    if "legs" in check.evidence:
        return _ours("the environment was not recorded", likely=True)
    return _machine("the two legs did not run in the same environment")


def _of_repetition(check: "Check", verdict: "Verdict") -> Blame:
    if not check.summary.startswith("the job does not repeat itself"):
        return _ours("the first attempt did not begin at the beginning", likely=True)
    return _script("it does not give the same numbers twice, without any fault")


def _of_landing(check: "Check", verdict: "Verdict") -> Blame:
    problems: Mapping[str, str] = check.evidence.get("problems", {})
    if check.evidence.get("altered"):
        return _machine("the run's plan was changed after it had begun, by the storage or from outside")
    if check.evidence.get("planned") == 0:
        return _plan("it has no fault")
    if not problems:
        return _plan("its faults come after the training's end")
    fault, problem = next(iter(problems.items()))
    outcome = next((other for other in verdict.faults if other.id == fault), None)
    if problem == "it never fired":
        if outcome is not None and outcome.step is not None and outcome.step > verdict.steps:
            return _plan(f"the training ended before {fault} was due")
        if outcome is not None and outcome.phase is None:
            return _plan(f"the training ended before {fault} was due", likely=True)
        return _plan(f"the training did not come to the point that {fault} waits for", likely=True)
    if "so nobody read it" in problem or "no attempt came after it" in problem or "not there at the next start" in problem:
        return _plan(f"nothing came after {fault} that would have met what it did")
    if "was damaged, and an attempt went on from it" in problem:
        return _ours(f"a checkpoint that {fault} had damaged was gone on from")
    if outcome is not None and (cut_short := _of_another_death(outcome, verdict)):
        return cut_short
    return _ours(f"{fault} cannot be shown to have happened", likely=True)


def _of_another_death(fault: "FaultOutcome", verdict: "Verdict") -> Blame | None:
    """What nobody had planned ended the fault's attempt before the fault could be seen; None where nothing outside did."""
    ended_by = next((attempt.ended_by for attempt in verdict.attempts if attempt.attempt == fault.attempt), "")
    told = next((told for pattern, told in _DEATHS if pattern.search(ended_by)), None)
    if told is None or told.whose != "machine" or not ended_by.startswith(UNPLANNED):
        return None
    return _machine(f"{told.reason}, in the attempt of {fault.id}, before that could be seen to land; run it again")


_DOUBTS: Mapping[str, Callable[["Check", "Verdict"], Blame]] = {
    "records": lambda check, verdict: _machine("the run's files are damaged, by the storage or from outside", likely=True),
    "completed": lambda check, verdict: _ours("the end of a rank was not recorded", likely=True),
    "reference": _of_reference,
    "environment": _of_environment,
    "reproducible": _of_repetition,
    "faults_landed": _of_landing,
    "silent_corruption": lambda check, verdict: _plan("the injected corruption shows in nothing that is compared", likely=True),
    "data_order": lambda check, verdict: _script("all its batches are the same: no wrong order could be seen"),
    "losses": lambda check, verdict: _script("its losses are no numbers, with or without a fault", likely=True),
    "lr": lambda check, verdict: _script("every step was skipped by its gradient scaler", likely=True),
    "gradients": lambda check, verdict: _script("its gradients tell nothing apart", likely=True),
    "parameters": lambda check, verdict: _script("its parameters never change", likely=True),
    "bucket_layout": lambda check, verdict: _ours("the gradient buckets could not be primed", likely=True),
}
"""By check: whose it is that the check could not be decided."""
