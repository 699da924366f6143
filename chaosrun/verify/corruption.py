"""Injected corruption: where it struck and where it was first seen. Pure.

A difference is attributed to a corruption unless it came before, or after a restart from a checkpoint saved before the
corruption.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from chaosrun.faults.fault import Fault, FaultPlan
from chaosrun.faults.landed import fault_problem, requests_of
from chaosrun.faults.memory import MemoryNote
from chaosrun.faults.observed import Observation
from chaosrun.faults.storage_damage import DamageNote
from chaosrun.records.codec import to_plain
from chaosrun.records.events import FaultObserved, FaultRequested
from chaosrun.verify import finals
from chaosrun.verify.check import CheckResult, Divergence, Drill, failed, inconclusive
from chaosrun.verify.codes import Params
from chaosrun.verify.compare import FIELDS, Field
from chaosrun.verify.divergence import first_divergence
from chaosrun.verify.replicas import Drift, chaos_drift

FINALS = (finals.final_weights, finals.final_optimizer, finals.final_scheduler, finals.final_registered)

_KINDS: Mapping[str, tuple[Field | None, str, str]] = {
    "data order": ("ids", "samples", "data_order"),
    "batch": ("batch", "batches", "data_order"),
    "position": ("position", "the position", "data_order"),
    "rng": ("rng", "random streams", "rng"),
    "loss": ("loss", "losses", "losses"),
    "gradient": ("grad", "gradients", "gradients"),
    "learning rate": ("lr", "learning rates", "lr"),
    "optimizer": ("param", "parameters", "parameters"),
    "weights": (None, "weights", "checkpointed_state"),
    "buffers": (None, "buffers", "checkpointed_state"),
    "registered": (None, "registered state", "checkpointed_state"),
    "saved state": (None, "what the script saves", "resume_evidence"),
}
"""By kind of divergence: the differing field of a step (None: in the state after the step), its name, its check."""


NEVER_CORRUPTED: frozenset[Field] = frozenset({"ids", "batch", "position", "rng"})
"""Fields that do not depend on the model's numbers: if one of these differs, recovery is wrong, not just corrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Injection:
    """A corruption that took place, according to its fault's note."""

    fault: Fault
    attempt: int
    step: int
    """The step being computed (phase optimizer) or completed (phase step) when it struck."""
    clean_save: int
    """The last step whose checkpoint, if there was one, was saved before it struck."""
    healed: int | None
    """The first attempt that resumed from a checkpoint saved before it struck; None if there is none."""
    note: MemoryNote

    @property
    def clean_step(self) -> int:
        """The last uncorrupted step before it struck."""
        return self.step - 1 if self.fault.phase == "optimizer" else self.step

    @property
    def what(self) -> str:
        """In words: "F1 flipped bit 30 of 0.weight[17] on rank 1 at step 12"."""
        article = "the " if self.note.state == "gradient" else ""
        place = f"{article}{self.note.place}"
        element = f"{place}[{self.note.element}]"
        did = {
            "flip_bit": f"flipped bit {self.note.bit} of {element}",
            "nan": f"wrote NaN into {element}",
            "diverge": f"shifted {place}",
        }[self.fault.kind]
        return f"{self.fault.id} {did} on rank {self.fault.rank} at step {self.step}"

    def may_show(self, attempt: int, step: int, field: Field | None) -> bool:
        """Whether a difference at this step can come from it. `field` None: the difference is in the state after the step."""
        if field in NEVER_CORRUPTED:
            return False
        if attempt != self.attempt:
            return attempt > self.attempt and (self.healed is None or attempt < self.healed)
        if field is None:
            return step > self.clean_save
        if step == self.clean_step + 1 and self.fault.phase == "optimizer":
            return FIELDS.index(field) >= FIELDS.index("grad")  # the fields before the gradients had been recorded by then
        return step > self.clean_step

    def to_json(self) -> dict[str, object]:
        about = {"fault": self.fault.id, "attempt": self.attempt, "step": self.step, "rank": self.fault.rank}
        seen = {key: value for key, value in to_plain(self.note).items() if key not in ("final", "problem", "problem_code")}
        return {**about, **seen}


@dataclass(frozen=True, slots=True, kw_only=True)
class _FirstDifference:
    """The place of a difference in time, to compare it with another."""

    attempt: int
    step: int
    field: Field | None
    ranks: tuple[int, ...]
    tensor: str | None
    what: str
    check: str
    between_ranks: bool = False
    at_end: bool = False
    """Whether it is in the digests of the end, which are taken after the faults of the last step."""

    @property
    def order(self) -> tuple[int, int, int]:
        return (self.attempt, self.step, len(FIELDS) if self.field is None else FIELDS.index(self.field))

    @property
    def words(self) -> str:
        where = f"{self.what} of step {self.step}, rank {self.ranks[0]}"
        return where + (f", {self.tensor}" if self.tensor else "") + f" ({self.check})"

    def to_json(self) -> dict[str, object]:
        about = {key: getattr(self, key) for key in ("attempt", "step", "tensor", "what", "check")}
        return {**about, "ranks": list(self.ranks)}


def corrupts(plan: FaultPlan) -> bool:
    """Whether the plan holds a fault after which the training's results may differ."""
    return any(fault.facts.family == "memory" for fault in plan.faults)


def injections(drill: Drill) -> tuple[Injection, ...]:
    faults = {fault.id: fault for fault in drill.plan.faults if fault.facts.family == "memory"}
    requested = {record.fault: record for record in drill.chaos.events(FaultRequested)}
    found: list[Injection] = []
    for record in drill.chaos.events(FaultObserved):
        fault, asked = faults.get(record.fault), requested.get(record.fault)
        if fault is None or asked is None or asked.step is None or fault_problem(fault, drill.chaos):
            continue
        step, number = asked.step, record.attempt
        clean = step - 1 if fault.phase == "optimizer" else step
        # Saved before a fault after its step: a periodic checkpoint, a script's own. After it: the final one, one on notice.
        clean_save = clean if clean < step or step % drill.spec.checkpoint.every_steps == 0 else clean - 1
        heals = clean if drill.by_script else clean_save
        later = (each.number for each in drill.chaos.attempts if each.number > number and each.resume_step <= heals)
        found.append(
            Injection(
                fault=fault,
                attempt=number,
                step=step,
                clean_save=clean_save,
                healed=next(later, None),
                note=Observation.of(fault, record).note,
            )
        )
    return tuple(sorted(found, key=lambda injection: (injection.attempt, injection.clean_step)))


def explained(divergence: Divergence, drill: Drill) -> Injection | None:
    """The injection that explains this difference: the last one before it."""
    return _source(_of_legs(divergence, drill), drill)


def damage_taken(drill: Drill, divergence: Divergence) -> str | None:
    """The fault, in words, that had damaged the script's newest save, from which the attempt of this difference resumed."""
    for fault in drill.plan.faults:
        if fault.phase != "save" or fault.facts.note is not DamageNote or fault_problem(fault, drill.chaos):
            continue
        asked = requests_of(fault, drill.chaos)[0]
        if asked.step is None or asked.attempt >= divergence.attempt:
            continue
        since = (attempt for attempt in drill.chaos.attempts if asked.attempt <= attempt.number < divergence.attempt)
        saves = (save.step for attempt in since for trace in attempt.traces.values() for save in trace.saves)
        if not any(saved > asked.step for saved in saves):
            return f"{fault.id} ({fault.describe()})"
    return None


def silent_corruption(drill: Drill) -> CheckResult:
    """Every injected corruption was detected. This check never passes: a damaged training is not exact."""
    injected = injections(drill)
    evidence: Params = {"injected": [injection.to_json() for injection in injected]}
    if not injected:
        return inconclusive("corruption_absent", **evidence)
    first, parted = _first_difference_of_any(drill), chaos_drift(drill)
    if first is None:
        return inconclusive("corruption_unseen", what=injected[0].what, **evidence)
    source = _source(first, drill)
    if source is None:
        return inconclusive("corruption_elsewhere", where=first.words, what=injected[0].what, **evidence)
    more = ""
    if parted is not None and not first.between_ranks:
        more = f"; the replicas part at step {parted.step} (rank_agreement)"
    if len(injected) > 1:
        more += f" ({len(injected) - 1} more injected)"
    prompt = first.step <= source.clean_step + 1 and source.fault.rank in first.ranks
    told = {"what": source.what, "where": first.words, "more": more}
    return failed("corruption_seen", **told, **evidence, source=source.fault.id, seen=first.to_json(), prompt=prompt)


def _source(difference: _FirstDifference, drill: Drill) -> Injection | None:
    step = difference.step + difference.at_end
    suspects = [entry for entry in injections(drill) if entry.may_show(difference.attempt, step, difference.field)]
    return suspects[-1] if suspects else None


def _first_difference_of_any(drill: Drill) -> _FirstDifference | None:
    """The first difference, between the legs or between the ranks of the chaos leg; if no step differs, that of the final
    state."""
    legs, ranks = first_divergence(drill), chaos_drift(drill)
    between_legs = None if legs is None else _of_legs(legs, drill)
    between_ranks = None if ranks is None else _of_ranks(ranks)
    if between_legs is None or between_ranks is None:
        return between_legs or between_ranks or next(_at_the_end(drill), None)
    if between_legs.order == between_ranks.order:
        check = f"{between_legs.check}, {between_ranks.check}"
        return replace(between_legs, check=check, between_ranks=True)
    return min(between_legs, between_ranks, key=lambda difference: difference.order)


def _at_the_end(drill: Drill) -> Iterator[_FirstDifference]:
    for finder in FINALS:
        check = finder(drill)
        if check.status == "fail":
            first = check.evidence.get("first") or {}
            yield _FirstDifference(
                attempt=drill.chaos.attempts[-1].number,
                step=drill.chaos_lineage.final_step,
                field=None,
                ranks=(first.get("rank", 0),),
                tensor=first.get("name"),
                what="the state at the end",
                check=finder.__name__,
                at_end=True,
            )


def _of_ranks(found: Drift) -> _FirstDifference:
    return _FirstDifference(
        attempt=found.attempt,
        step=found.step,
        field=None if found.at_start else "param",
        # If two ranks differ, it is unknown which one is wrong.
        ranks=(found.rank, found.other),
        tensor=found.tensor,
        what="parameters",
        check="rank_agreement",
        between_ranks=True,
    )


def _of_legs(found: Divergence, drill: Drill) -> _FirstDifference:
    field, what, check = _KINDS[found.kind]
    trace = drill.chaos.trace(found.attempt, found.rank)
    names = trace.start.tensors if trace and trace.start else ()
    if field is not None and found.tensor is not None and found.tensor not in names:
        # A step's fields name parameters or nothing; this is the name of a saved value.
        what = "the optimizer's state" if found.kind == "optimizer" else what
        field, check = None, "checkpointed_state"
    return _FirstDifference(
        attempt=found.attempt, step=found.step, field=field, ranks=found.ranks, tensor=found.tensor, what=what, check=check
    )
