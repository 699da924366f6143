"""All checks, in the order in which they are shown, and the function that runs them, also if one crashes.

Add a check here and nowhere else; PREMISES and REQUIRED say what its status does to the verdict.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from chaosrun.errors import ChaosrunError
from chaosrun.verify import alignment, corruption, early_end, finals, landed, premises, recovery, replicas, restored, steps
from chaosrun.verify.check import CheckResult, Drill, inconclusive
from chaosrun.verify.compare import Kind
from chaosrun.verify.kept import own_checkpoints

OF_THE_END = (
    *(finals.final_weights, finals.final_optimizer, finals.final_scheduler, finals.final_rng, finals.final_position),
    *(finals.final_registered, finals.final_checkpoint),
)
CHECKS: tuple[Callable[[Drill], CheckResult], ...] = (
    premises.records,
    premises.completed,
    early_end.early_end,
    premises.reference,
    premises.environment,
    premises.own_files,
    premises.reproducible,
    landed.faults_landed,
    recovery.lineage,
    recovery.resume_points,
    restored.checkpointed_state,
    steps.data_order,
    steps.rng,
    steps.losses,
    steps.lr,
    steps.gradients,
    steps.parameters,
    replicas.rank_agreement,
    recovery.replay_agreement,
    recovery.bucket_layout,
    *OF_THE_END,
)
OF_OUR_CHECKPOINTS = (
    restored.checkpointed_state,
    finals.final_scheduler,
    finals.final_position,
    finals.final_registered,
    finals.final_checkpoint,
)
SCRIPT_CHECKS: tuple[Callable[[Drill], CheckResult], ...] = tuple(
    alignment.resume_evidence if check is recovery.resume_points else check
    for check in CHECKS
    if check not in OF_OUR_CHECKPOINTS
)
"""For a script with its own checkpoints: `resume_evidence` shows at which step its attempts resumed, and with what state."""

PREMISES = frozenset({"records", "reference", "environment", "own_files", "reproducible"})
"""Without these, no difference between the legs can be blamed on recovery."""

REQUIRED = frozenset({check.__name__ for check in CHECKS}) - {
    *("reproducible", "checkpointed_state", "rank_agreement", "replay_agreement", "bucket_layout"),
    *("final_optimizer", "final_scheduler", "final_registered"),
}
"""These must pass, not merely be skipped, for the verdict to be PASS."""

SCRIPT_REQUIRED = REQUIRED & {check.__name__ for check in SCRIPT_CHECKS} | {"resume_evidence"}

TOLERATED = frozenset({"gradients", "parameters"})
"""These may be skipped when a tolerance on weights is set."""


FOLLOWING = frozenset(
    {
        *("resumed_state_differs", "records_differ", "replay_differs", "saved_state_differs", "buffers_not_restored"),
        *("weights_differ_at_start", "ended_at_another_step", "ended_on_notice"),
        *("step_missing", "step_beyond_the_end", "recovery_differs"),
        *("final_weights_differ", "final_state_differs", "final_position_differs", "final_checkpoint_differs"),
        *("buffers_drifted", "kept_state_not_restored", "result_differs"),
    }
)
"""Codes of checks that fail as a consequence, once the legs have diverged."""


_BY_KIND: Mapping[Kind, str] = {
    **{"data order": "data_order", "batch": "data_order", "rng": "rng", "loss": "losses"},
    **{"gradient": "gradients", "learning rate": "lr", "saved state": "checkpointed_state"},
}
"""The check that reports each kind of first difference; for other kinds, the first check that fails."""


def consequences(checks: Sequence[CheckResult], kind: Kind) -> tuple[CheckResult, ...]:
    """Failed checks that follow from a first difference of this kind: all but the one that reports it."""
    found = [check for check in checks if check.status == "fail" and check.code in FOLLOWING]
    own = next((check for check in found if check.name == _BY_KIND.get(kind)), next(iter(found), None))
    return tuple(check for check in found if check is not own)


def required(drill: Drill) -> frozenset[str]:
    names = SCRIPT_REQUIRED if drill.by_script else REQUIRED
    if not drill.exact_weights:
        names -= TOLERATED if drill.spec.verify.profile == "strict" and not drill.by_script else TOLERATED | {"final_weights"}
    alone = drill.spec.workers == 1 or not replicas.of_reference(drill).exist
    return names if alone else names | {"rank_agreement"}


def run_checks(drill: Drill, checks: tuple[Callable[[Drill], CheckResult], ...] | None = None) -> tuple[CheckResult, ...]:
    """Run `checks` on a drill; None: all that apply to it."""
    made = (SCRIPT_CHECKS if drill.by_script else CHECKS) if checks is None else checks
    files = _run(finals.final_files, drill)
    found = [_run(check, drill) for check in (*made, *_on_occasion(drill))]
    return (*found, *([files] if files.status != "skip" else []))


def _on_occasion(drill: Drill) -> Iterator[Callable[[Drill], CheckResult]]:
    """Checks that apply to few drills. A run in production has no reference run whose saves would be known."""
    if corruption.corrupts(drill.plan):
        yield corruption.silent_corruption
    has_like = drill.by_script and drill.reference.attempts
    if has_like and any(saved.held for trace in drill.chaos.traces for saved in trace.saves):
        yield own_checkpoints


def _run(check: Callable[[Drill], CheckResult], drill: Drill) -> CheckResult:
    name = check.__name__
    try:
        found = check(drill)
    except ChaosrunError as error:
        found = inconclusive("check_undecided", message=error.message, error=type(error).__name__)
    except Exception as error:  # the one place that must survive any defect of a check: it is reported, and never a PASS
        found = inconclusive("check_crashed", check=name, message=str(error), error=type(error).__name__)
    if drill.ended_early is not None and found.status == "pass" and check in OF_THE_END:
        found = replace(found, summary=f"at step {drill.ended_early}, where the leg was ended: {found.summary}")
    return replace(found, name=name)
