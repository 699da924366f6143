"""Whether a second run without faults is needed before a difference is blamed on recovery, and what that run shows."""

from typing import TYPE_CHECKING

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.events import CONCLUSIVE, TRAINED
from chaosrun.records.history import read_leg
from chaosrun.records.layout import LegLayout
from chaosrun.spec.model import JobSpec
from chaosrun.verify.check import Drill
from chaosrun.verify.checks import PREMISES, run_checks
from chaosrun.verify.compare import Kind
from chaosrun.verify.divergence import first_divergence

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict

NO_FAULTS = FaultPlan(seed=0, faults=())
COMPARABLE = PREMISES | {"completed", "lineage"}
"""If one of these is undecided, nothing can be compared. A second run would not decide the other checks either."""
DOUBTFUL_REFERENCE = frozenset({"reproducible", "environment"})


def worth_confirming(verdict: "Verdict") -> bool:
    """Whether a second run without faults may show why the legs differ (recovery, the job or a stale cached reference is not
    exact), or resolve a doubt about the reference."""
    injected = (check for check in verdict.checks if check.name == "silent_corruption" and check.status == "fail")
    if verdict.outcome not in CONCLUSIVE or any(check.evidence["prompt"] for check in injected):
        return False
    doubted = any(check.name in DOUBTFUL_REFERENCE and check.status == "inconclusive" for check in verdict.checks)
    return (verdict.status == "FAIL" and verdict.outcome in TRAINED) or doubted


def agreed_at_first(verdict: "Verdict") -> bool:
    """Whether the chaos leg started at step 0 and equalled the reference up to its first fault: then both ran the same job."""
    own = (check for check in verdict.checks if check.name == "reproducible" and "began" not in check.evidence)
    return any(check.status == "pass" for check in own)


def fault_free_difference(reference: LegLayout, second: LegLayout, spec: JobSpec) -> tuple[str, Kind | None] | None:
    """How two legs without faults differ, or why they cannot be compared, and the first quantity that differs; None: they
    agree."""
    drill = Drill.of(read_leg(reference), read_leg(second), spec, NO_FAULTS)
    divergence = first_divergence(drill)
    if divergence is not None and divergence.reason.code == "parameter_order":
        return divergence.cause, None
    if divergence is not None:
        return f"{divergence.kind} at step {divergence.step}, rank {divergence.rank}", divergence.kind
    for check in run_checks(drill):
        if check.name == "rank_agreement":
            continue  # it compares no two legs: ranks that drift apart do so in every run
        if check.status == "fail" or (check.status == "inconclusive" and check.name in COMPARABLE):
            return f"{check.name}: {check.summary}", None
    return None
