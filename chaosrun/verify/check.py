"""The result of a check, the drill that it examines, and a difference in it. A check is a function
`(Drill) -> CheckResult`, listed in `checks`. Pure."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

from chaosrun.faults.fault import FaultPlan
from chaosrun.records.began import digest_of, saved_in
from chaosrun.records.codec import changed
from chaosrun.records.history import Attempt, LegHistory
from chaosrun.records.opened import OpenedFile
from chaosrun.records.traces import BucketsRecord, RankTrace, StartRecord, StepRecord
from chaosrun.spec.model import JobSpec, Tolerance
from chaosrun.verify.codes import Cause, Params
from chaosrun.verify.compare import (
    ENVELOPES,
    EXACT,
    FIELDS,
    Field,
    Kind,
    Mismatch,
    alike,
    comes_to_the_same,
    compare,
    compared_fields,
    exact_weights,
    undecided,
)
from chaosrun.verify.lineage import Lineage, lineage
from chaosrun.verify.retired import Retired, retired

Status = Literal["pass", "fail", "inconclusive", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckResult:
    name: str = ""
    """The name of the check's function; `checks` sets it."""
    status: Status
    summary: str
    evidence: Params = field(default_factory=dict)
    """JSON values."""
    cause: Cause | None = None
    """Set if the check neither passed nor was skipped."""

    @property
    def code(self) -> str | None:
        return self.cause and self.cause.code

    def to_json(self) -> dict[str, object]:
        about = {"name": self.name, "status": self.status, "code": self.code, "summary": self.summary}
        return {**about, "evidence": dict(self.evidence)}


def passed(summary: str, **evidence: Any) -> CheckResult:
    return CheckResult(status="pass", summary=summary, evidence=evidence)


def failed(code: str, /, *, because: str | None = None, **evidence: Any) -> CheckResult:
    """`code`: a row of the table of causes, whose sentence is filled with the evidence."""
    return _found("fail", code, because, evidence)


def inconclusive(code: str, /, *, because: str | None = None, **evidence: Any) -> CheckResult:
    return _found("inconclusive", code, because, evidence)


def _found(status: Status, code: str, because: str | None, evidence: Params) -> CheckResult:
    cause = Cause(code, evidence, because)
    return CheckResult(status=status, summary=cause.sentence, evidence=evidence, cause=cause)


def skipped(summary: str, **evidence: Any) -> CheckResult:
    return CheckResult(status="skip", summary=summary, evidence=evidence)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    step: int
    ranks: tuple[int, ...]
    """Ranks on which this kind differs at this step, the lowest first."""
    attempt: int
    kind: Kind
    reason: Cause
    tensor: str | None = None
    micro_batch: int | None = None
    expected: Any = None
    seen: Any = None

    @property
    def rank(self) -> int:
        return self.ranks[0]

    @property
    def code(self) -> str:
        return self.reason.code

    @property
    def cause(self) -> str:
        """In a few words: "RNG not restored", "1 batch skipped", "gradient reduction (bucket layout)"."""
        return self.reason.sentence

    @property
    def hint(self) -> str:
        return self.reason.hint or ""

    def to_json(self) -> dict[str, object]:
        names = ("step", "rank", "ranks", "attempt", "kind", "code", "cause", "hint")
        return {name: getattr(self, name) for name in (*names, "tensor", "micro_batch", "expected", "seen")}


@dataclass(frozen=True, kw_only=True)
class Drill:
    """All data that a check may use."""

    reference: LegHistory
    chaos: LegHistory
    reference_lineage: Lineage
    chaos_lineage: Lineage
    spec: JobSpec
    plan: FaultPlan
    in_both: int
    """Number of steps in both lineages, over all ranks."""
    apart: Mapping[tuple[int, int], AbstractSet[int]]
    """By attempt of the chaos leg and rank, the steps whose record differs from the reference's in any field."""
    confirming: LegHistory | None = None
    """The confirming leg, a second one without faults; None if there is none."""
    ended_early: int | None = None
    """The step at which the chaos leg ended early: both legs are compared up to there."""
    whole: int = 0
    """The last step of the whole reference, if the drill is cut at an earlier one (`ended_early`)."""
    found_whole: bool = False
    """The verdict at the end of the run found both legs' final checkpoints valid."""
    began: int = 0
    """The step that the chaos leg started at, from the reference's checkpoint; see `unproven`."""
    retired: Retired = field(default_factory=dict)
    """Optimizers whose lost state does not count."""

    @classmethod
    def of(
        cls,
        reference: LegHistory,
        chaos: LegHistory,
        spec: JobSpec,
        plan: FaultPlan,
        confirming: LegHistory | None = None,
        *,
        recorded: Lineage | None = None,
        looked_at: Sequence[Attempt] | None = None,
    ) -> "Drill":
        """`recorded`: the records that a leg without a reference is compared with; `looked_at`: attempts to compare, None:
        all."""
        expected, began = recorded or lineage(reference), 0 if recorded else _began_at(reference, chaos, spec)
        seen = lineage(chaos, expected, began)
        idle = retired(reference, chaos, expected) if spec.by == "script" and exact_weights(spec.verify) else {}
        return cls(
            reference=reference,
            chaos=chaos,
            reference_lineage=expected,
            chaos_lineage=seen,
            spec=spec,
            plan=plan,
            confirming=confirming,
            in_both=sum(expected.common(span) for rank in range(spec.workers) for span in seen.of(rank).spans),
            apart=_differing_steps(expected, chaos.attempts if looked_at is None else looked_at, idle),
            began=began,
            retired=idle,
        )

    @property
    def confirmed(self) -> LegHistory | None:
        """The confirming leg, if it completed."""
        return self.confirming if self.confirming and self.confirming.outcome == "completed" else None

    @property
    def hash_seeds(self) -> tuple[object, object] | None:
        """PYTHONHASHSEED in the reference and in the last attempt, if restarts had different ones: see `spec.hash_order`."""
        first, last = ((leg.environment or {}).get("python_hash_seed") for leg in (self.reference, self.chaos))
        return (first, last) if self.by_script and first and last and first != last else None

    @property
    def hash_order(self) -> str:
        """Where the script depends on hashes (" at file:line"), as recorded by a restart; empty if it is not recorded."""
        place = (self.chaos.environment or {}).get("hash_order")
        return f" at {place}" if place else ""

    @cached_property
    def streams_count(self) -> bool:
        """Whether differing random streams count as a difference: not if a script resumes by itself and nothing depends on
        them."""
        return not (self.by_script and (self._numbers_agree() or self._streams_rest()))

    def _streams_rest(self) -> bool:
        """Nothing draws from the random streams in the reference run."""
        return all(len({record.rng for record in steps.values()}) == 1 for steps in self.reference_lineage.steps.values())

    def _numbers_agree(self) -> bool:
        """Each step of each attempt equals the reference's bit for bit, except for the random streams; tolerances do not
        apply."""
        numbers: list[Field] = [field for field in FIELDS if field not in ("position", "rng")]
        pairs = (pair for attempt in self.chaos.attempts for pair in self.pairs_apart(attempt))
        return not any(self.mismatch(*pair, numbers, exact=True) for pair in pairs)

    @cached_property
    def given(self) -> int:
        """Number of steps at the start of the chaos leg's lineage that are the reference's own, and so are not compared."""
        bases = (attempt.start_of(rank) for attempt in self.chaos.attempts for rank in attempt.traces)
        return min(bases, default=0) if self.began else 0

    @property
    def ranks(self) -> range:
        return range(self.spec.workers)

    @property
    def by_script(self) -> bool:
        """Whether the script resumes by itself, from its own checkpoints."""
        return self.spec.by == "script"

    def reference_start(self, rank: int) -> StartRecord | None:
        """The start record of the attempt that made the reference's first step."""
        span = self.reference_lineage.of(rank).span_of(1)
        return span.trace.start if span else None

    @property
    def left_unprimed(self) -> BucketsRecord | None:
        """The record that says why the gradient buckets of a DDP model were not primed; None: no model was left out."""
        return next((record for trace in self.chaos.traces for record in trace.buckets if record.left), None)

    @property
    def outside(self) -> list[str]:
        """Names of state that the training changes in the reference run and no checkpoint holds."""
        return [name for _, end in sorted(self.reference.ends.items()) for name in end.outside]

    def steps_that_differ(self, attempt: Attempt) -> set[int]:
        """Steps whose records differ from the reference's, and are to be compared field by field."""
        return set[int]().union(*(self.apart.get((attempt.number, rank), ()) for rank in attempt.traces))

    def pairs_apart(self, attempt: Attempt) -> Iterator[tuple[StepRecord, StepRecord]]:
        """Records of the attempt that differ, each with the reference's, in time order."""
        steps, apart = attempt.steps, self.steps_that_differ(attempt)
        for step in (step for step in steps if step in apart):
            for rank, record in steps[step].items():
                if self.differs(record) and (expected := self.reference_lineage.at(rank, step)):
                    yield expected, record

    def before(self, attempt: int, rank: int | None = None) -> list[RankTrace]:
        """The traces that the chaos leg's earlier attempts left; `rank`: only this rank's."""
        earlier = [each.traces for each in self.chaos.attempts if each.number < attempt]
        if rank is None:
            return [trace for traces in earlier for trace in traces.values()]
        return [traces[rank] for traces in earlier if rank in traces]

    def differs(self, record: StepRecord) -> bool:
        """Whether this record of the chaos leg differs from the reference's."""
        return record.step in self.apart.get((record.attempt, record.rank), ())

    @property
    def exact_weights(self) -> bool:
        return exact_weights(self.spec.verify)

    @property
    def fields(self) -> tuple[Field, ...]:
        """The fields of a step that can be compared and that count."""
        return tuple(field for field in compared_fields(self.spec) if field != "rng" or self.streams_count)

    def mismatch(
        self, expected: StepRecord, seen: StepRecord, fields: Iterable[Field], *, exact: bool = False
    ) -> Mismatch | None:
        """The first of these fields in which a record of the chaos leg is wrong; `exact`: without a tolerance."""
        aside = {"state"} if (seen.attempt, seen.rank) in self.retired else set[str]()
        losses = EXACT if exact else self.losses_of(seen)
        found = (compare(field, expected, seen, self.chaos, losses) for field in fields if field not in aside)
        return next(filter(None, found), None)

    def losses_of(self, record: StepRecord) -> Tolerance:
        """How far this step's losses may be from the expected ones."""
        verify = self.spec.verify
        if verify.profile == "strict" or not verify.losses.exact:
            return verify.losses
        first, later = ENVELOPES[verify.profile]
        attempt = next((attempt for attempt in self.chaos.attempts if attempt.number == record.attempt), None)
        return first if attempt and attempt.went_on and record.step == attempt.start_of(record.rank) + 1 else later

    def opened(self) -> tuple[tuple[str, tuple[OpenedFile, ...]], ...]:
        """By leg, the files of other legs that it read."""
        second = self.confirming.opened if self.confirming else ()
        return (("chaos", self.chaos.opened), ("reference", self.reference.opened), ("confirm", second))


def _differing_steps(expected: Lineage, attempts: Sequence[Attempt], idle: Retired) -> dict[tuple[int, int], set[int]]:
    """Steps whose records differ, by attempt and rank: only these must be compared field by field. Blocks with equal digests
    are not opened. The state of `idle` optimizers is left out."""
    found: dict[tuple[int, int], set[int]] = {}
    for attempt in attempts:
        for rank, trace in attempt.traces.items():
            rest = attempt.start_of(rank) + 1 if attempt.by == "script" else None
            for span in trace.spans:
                unlike = expected.unlike(span)
                if (attempt.number, rank) in idle:
                    unlike = ((known, changed(seen, state=known.state)) for known, seen in unlike)
                pairs = (pair for pair in unlike if not alike(*pair))
                steps = (seen for _, seen in pairs if not (seen.step == rest and _excused(expected, trace, seen)))
                found.setdefault((attempt.number, rank), set()).update(seen.step for seen in steps)
    return found


def _excused(known: Lineage, trace: RankTrace, seen: StepRecord) -> bool:
    """A first step of an attempt that differs only in ways that do not count: see `comes_to_the_same`."""
    expected, following = (known.at(seen.rank, step) for step in (seen.step, seen.step + 1))
    return expected is not None and comes_to_the_same(expected, seen, following, trace.steps.get(seen.step + 1))


def _began_at(reference: LegHistory, chaos: LegHistory, spec: JobSpec) -> int:
    """The step that the first attempt resumed at, if its state is shown to be the reference's; else 0."""
    first = chaos.attempts[0] if chaos.attempts else None
    return first.resume_step if first and first.resume and not unproven(reference, chaos, spec) else 0


def records_damaged(problems: Sequence[str]) -> CheckResult | None:
    if not problems:
        return None
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return inconclusive("records_damaged", first=problems[0], more=more, problems=list(problems))


def unproven(reference: LegHistory, chaos: LegHistory, spec: JobSpec) -> str | None:
    """Why the records do not show that the first attempt's checkpoint was the reference's; None if they do. See
    docs/exactness.md, "Where a drill begins"."""
    first, began = chaos.attempts[0], chaos.began
    if began is None or not began.states:
        return "the records do not say whose it was"
    if first.number != 1 or first.resume not in began.states:
        return f"attempt {first.number} resumed from {first.resume}, but had been given {', '.join(began.states)}"
    if why := next(undecided(spec, reference.layout), None):
        return why
    for name, state in began.states.items():
        with suppress(LookupError):
            traces = [reference.attempts[-1].traces[rank] for rank in range(spec.workers)]
            if state == digest_of(saved_in(traces, name)):
                continue
        return f"{name} is not what the reference saved"
    return None


def excuse_unused_streams(check: CheckResult, drill: Drill) -> CheckResult:
    """The result of a check that found random streams to differ: passed if nothing depends on them (`Drill.streams_count`)."""
    if check.status != "fail" or drill.streams_count:
        return check
    return passed(f"{check.summary}; nothing that was trained depends on them", **check.evidence)
