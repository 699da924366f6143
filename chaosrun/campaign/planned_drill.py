"""Plans every drill of a suite before any of them starts. Pure, except for reading the job files that the suite names."""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from chaosrun.campaign.drill import takes_agents
from chaosrun.campaign.scheduler import Shape, Task
from chaosrun.errors import UsageError
from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.kinds import KINDS
from chaosrun.plan.planner import make_plan
from chaosrun.spec.fragment import as_entries, flow
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Problem, spec_error
from chaosrun.spec.suite import Expectation, SuiteDrill
from chaosrun.supervise.reference import IRRELEVANT

NO_LENGTH = "give the suite, or the drill, set: {max_steps: 60}, with as many steps as the job makes"
DRAWS = 50
"""Seeds that are tried for a drill, until its faults can all happen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDrill:
    """One planned drill: all that is needed to run it, and to repeat it."""

    name: str
    drill: str
    """The suite's drill that this is, or repeats."""
    base: str
    job: str
    """Absolute path of the job file."""
    overrides: tuple[str, ...]
    expect: Expectation
    workers: int
    cpu: float
    gpu: int | Literal["auto"]
    faults: int
    kinds: tuple[str, ...]
    seed: int
    plan: str
    """Digest of the drill, the job and the faults; equal when the same drill is repeated."""
    reference: str
    """Digest of what its reference leg depends on, as far as the job file shows."""
    rerun: str | None = None
    """Night whose failure it repeats, with that night's plan."""

    @property
    def shape(self) -> Shape:
        return Shape(self.workers, self.cpu, self.gpu)

    @property
    def task(self) -> "Task[PlannedDrill]":
        alone = any(KINDS[kind].takes_ray_along for kind in self.kinds)
        return Task(self, self.name, self.shape, self.reference, needs_all=alone, needs_fresh=takes_agents(self.kinds))


def derive_seed(seed: int, drill: str, draw: int = 0) -> int:
    """The seed of one drill's faults, for its first, second, … draw: from the drill's name alone, independent of other
    drills."""
    digest = hashlib.sha256(f"{seed}/{drill}/{draw}".encode()).digest()
    return int.from_bytes(digest[:4]) >> 1


def plan_drills(drills: Sequence[SuiteDrill], seed: int | None = None) -> list[PlannedDrill]:
    """`seed`: the one from which each drill's is derived. Raises SpecError naming each drill that cannot be planned."""
    planned: list[PlannedDrill] = []
    problems: list[Problem] = []
    for drill in drills:
        spec = drill.job.spec
        try:
            plan = make_plan(spec, drill.job.trace) if seed is None else _drawn(drill, seed)
        except UsageError as error:
            message, hint = f"drill {drill.name!r} cannot be planned: {error.message}", error.hint
            if spec.max_steps is None and spec.faults.preset is not None:
                if any(told.hint == NO_LENGTH and told.place == drill.place for told in problems):
                    continue  # already reported for another combination
                hint = NO_LENGTH
            problems.append(Problem(place=drill.place, message=message, hint=hint))
        else:
            drawn = [] if seed is None else [f"faults.seed={plan.seed}"]
            planned.append(planned_drill(drill, [*drill.overrides, *drawn], plan))
    if problems:
        raise spec_error(problems)
    return planned


def planned_drill(
    drill: SuiteDrill, overrides: Sequence[str], plan: FaultPlan, *, name: str | None = None, rerun: str | None = None
) -> PlannedDrill:
    spec = drill.job.spec
    fault_free = spec.model_dump(mode="json", exclude=IRRELEVANT)
    return PlannedDrill(
        name=name or drill.name,
        drill=drill.name,
        base=drill.base,
        job=str(drill.job.path.resolve()),
        overrides=tuple(overrides),
        expect=drill.expect,
        workers=spec.workers,
        cpu=spec.per_worker.cpu,
        gpu=spec.per_worker.gpu,
        faults=len(plan.faults),
        kinds=tuple(dict.fromkeys(fault.kind for fault in plan.faults)),
        seed=plan.seed,
        plan=plan_digest(drill.name, spec, plan),
        reference=_digest([str(drill.job.path.resolve()), fault_free]),
        rerun=rerun,
    )


def _drawn(drill: SuiteDrill, seed: int) -> FaultPlan:
    """The plan of the first derived seed that gives at least one fault, all of which can happen."""
    refused: UsageError | None = None
    plan: FaultPlan | None = None
    for draw in range(DRAWS):
        faults = drill.job.spec.faults.model_copy(update={"seed": derive_seed(seed, drill.name, draw)})
        try:
            plan = make_plan(drill.job.spec.model_copy(update={"faults": faults}), drill.job.trace)
        except UsageError as error:
            refused = error
            continue
        if plan.faults:
            return plan
    if plan is None:
        assert refused is not None
        raise refused
    return plan


def exact_overrides(spec: JobSpec, overrides: Sequence[str], plan: FaultPlan) -> tuple[str, ...] | None:
    """Overrides that reproduce exactly this plan; None where its faults cannot be listed one by one: at times that the training
    may outrun, on some ranks at once."""
    groups = Counter(fault.group for fault in plan.faults if fault.group is not None)
    if not all(fault.required for fault in plan.faults) or any(size != spec.workers for size in groups.values()):
        return None
    kept = [override for override in overrides if override.partition("=")[0].partition(".")[0] != "faults"]
    faults: dict[str, object] = {"seed": plan.seed, "schedule": as_entries(plan.faults, spec.workers)}
    if spec.faults.allow_cluster_faults:
        faults["allow_cluster_faults"] = True
    return (*kept, f"faults={flow(faults)}")


def plan_digest(drill: str, spec: JobSpec, plan: FaultPlan) -> str:
    """Equal for the same faults on the same job of the same drill, independent of how they were requested and of the job file's
    path."""
    return _digest([drill, spec.model_dump(mode="json", exclude={"faults"}), [_what(fault) for fault in plan.faults]])


def _what(fault: Fault) -> Mapping[str, object]:
    told = fault.to_json()
    return {key: told[key] for key in told if key not in ("id", "source", "group", "required")} | {
        "together": bool(fault.group)
    }


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]
