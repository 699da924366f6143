"""The answers that a report begins with, a sentence each: what was tried, what was killed, what differed."""

from collections import Counter
from typing import TYPE_CHECKING

from chaosrun.records.events import CONCLUSIVE, DeathUnplanned
from chaosrun.records.history import LegHistory
from chaosrun.report.facts import RunFacts
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.faults.fault import FaultPlan
    from chaosrun.spec.model import JobSpec
    from chaosrun.verify.verdict import Verdict

MOST_FAULTS = 3
"""Faults told one by one in a sentence."""


def tried(facts: RunFacts, spec: "JobSpec | None", plan: "FaultPlan | None") -> str:
    name = facts.name or "a job whose file cannot be read"
    workers = "" if facts.workers is None else f" on {count(facts.workers, 'worker')}"
    every = "" if spec is None else f", a checkpoint every {count(spec.checkpoint.every_steps, 'step')}"
    if plan is None:
        again = "once with its faults"
    elif not plan.faults:
        again = "once again with no fault planned"
    else:
        injected = facts.injected_faults
        more = f", {injected} more injected" if injected else ""
        again = f"once with its faults ({len(plan.faults) - injected}, seed {plan.seed}{more})"
    exact = spec is None or (spec.verify.weights.exact and spec.verify.losses.exact)
    compared = "bit for bit" if exact else "within the job file's tolerances"
    return f"{name}{workers}{every}: once undisturbed, {again}, and the two compared {compared}"


def killed(verdict: "Verdict", facts: RunFacts, chaos: LegHistory) -> str:
    faults = verdict.faults
    deaths = len(chaos.events(DeathUnplanned))
    unplanned = f" {count(deaths, 'death')} nobody had planned." if deaths else ""
    if not chaos.journal:
        return "Nothing: the disturbed run never began."
    if not faults:
        return f"Nothing was planned.{unplanned}"
    if len(faults) <= MOST_FAULTS:
        doubt = " (NOT SHOWN to have happened)"
        return (
            "; ".join(f"{fault.id}: {fault.description}{'' if fault.landed else doubt}" for fault in faults) + f".{unplanned}"
        )
    kinds = ", ".join(f"{number} × {kind}" for kind, number in Counter(fault.kind for fault in faults).most_common())
    ends = f"the first {faults[0].description}, the last {faults[-1].description}"
    of = "faults" if facts.injected_faults else "planned faults"
    landed = sum(fault.landed for fault in faults)
    return f"{landed} of {len(faults)} {of} landed{facts.whose} ({kinds}): {ends}.{unplanned}"


def differed(verdict: "Verdict") -> str:
    found = verdict.divergence
    if found is not None:
        ranks = f"rank {found.rank}" if len(found.ranks) <= 1 else f"{len(found.ranks)} ranks, first rank {found.rank}"
        tensor = f", {found.tensor}" if found.tensor else ""
        return f"{found.kind} first: at step {found.step}, {ranks}, attempt {found.attempt}{tensor}."
    if verdict.status == "PASS":
        return "Nothing."
    failing = next((check for check in verdict.checks if check.status == "fail"), None)
    if failing is not None:
        return f"{failing.name.replace('_', ' ')}: {failing.summary}."
    if verdict.outcome not in CONCLUSIVE:
        return "Not known: a leg did not come to its end, so there was nothing to compare."
    return "Nothing that was compared."
