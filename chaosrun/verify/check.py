"""A check's result, and the drill it is given to look at.

Pure values. A check is a function `(Drill) -> Check`; the list of them is in `checks`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.history import LegHistory
from chaosrun.spec.model import JobSpec
from chaosrun.verify.lineage import Lineage, lineage

Status = Literal["pass", "fail", "inconclusive", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    status: Status
    summary: str
    """One sentence for people."""
    evidence: Mapping[str, Any] = field(default_factory=dict)
    """JSON values."""

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "status": self.status, "summary": self.summary, "evidence": dict(self.evidence)}


def passed(name: str, summary: str, **evidence: Any) -> Check:
    return Check(name=name, status="pass", summary=summary, evidence=evidence)


def failed(name: str, summary: str, **evidence: Any) -> Check:
    return Check(name=name, status="fail", summary=summary, evidence=evidence)


def inconclusive(name: str, summary: str, **evidence: Any) -> Check:
    return Check(name=name, status="inconclusive", summary=summary, evidence=evidence)


def skipped(name: str, summary: str, **evidence: Any) -> Check:
    return Check(name=name, status="skip", summary=summary, evidence=evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """Everything a check may look at."""

    reference: LegHistory
    chaos: LegHistory
    reference_lineage: Lineage
    chaos_lineage: Lineage
    spec: JobSpec
    plan: FaultPlan

    @classmethod
    def of(cls, reference: LegHistory, chaos: LegHistory, spec: JobSpec, plan: FaultPlan) -> "Drill":
        return cls(
            reference=reference,
            chaos=chaos,
            reference_lineage=lineage(reference),
            chaos_lineage=lineage(chaos),
            spec=spec,
            plan=plan,
        )

    @property
    def ranks(self) -> range:
        return range(self.spec.workers)
