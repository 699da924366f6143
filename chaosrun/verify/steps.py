"""Checks that compare the two legs step by step, on every rank: data, RNG, losses, learning rates, gradients, parameters.

Each one counts what it compared: fewer records than the job has steps times ranks is never a pass, but for a step that a rank
died in (`recovery.died_in`). Pure.
"""

import math
from collections.abc import Iterable
from dataclasses import asdict
from itertools import takewhile

from chaosrun.records.history import Attempt
from chaosrun.verify.check import CheckResult, Drill, excuse_unused_streams, failed, inconclusive, passed, skipped
from chaosrun.verify.codes import Params
from chaosrun.verify.compare import Field, Mismatch, compared_fields, first_difference, unlike_orders
from chaosrun.verify.recovery import died_in
from chaosrun.verify.restored import reference_state, saved_before

TOLERANCE_GIVEN = "tolerance given: fingerprints say nothing about nearly equal"


def data_order(drill: Drill) -> CheckResult:
    """Every rank saw the same samples at the same positions: by ids, if the loader has them, and by the bytes of every
    batch."""
    check = _compare(drill, ("ids", "batch", "position"), "sample ids and batch bytes")
    if check.status != "pass":
        return check
    alike = _alike(digest for record in drill.reference_lineage.records for digest in record.batch)
    if alike and not drill.by_script:
        return inconclusive("batches_all_alike", **check.evidence)
    lineages = (drill.reference_lineage, drill.chaos_lineage)
    known = all(span.knows_ids for each in lineages for rank in each.steps for span in each.of(rank).spans)
    how = "" if known else " (by the bytes of the batches: the loader does not tell every sample id)"
    how = " (every batch has the same bytes: they have no order)" if alike else how
    return passed(f"{check.summary}{how}", ids_known=known, **check.evidence)


def rng(drill: Drill) -> CheckResult:
    """The random streams had the same state before each step's first micro-batch."""
    return excuse_unused_streams(_compare(drill, ("rng",), "RNG states"), drill)


def losses(drill: Drill) -> CheckResult:
    """Every micro-batch's loss is the same, bit for bit or within `verify.losses` or `verify.profile`."""
    check = _compare(drill, ("loss",), "losses")
    if check.status == "pass" and drill.by_script and not any(record.loss for record in drill.reference_lineage.records):
        return passed("no losses are seen of a script without backward passes: gradients and weights tell", **check.evidence)
    nan_since = _nan_since(drill)
    if check.status == "pass" and nan_since is not None:
        return inconclusive("loss_nan", nan_since=nan_since, **check.evidence)
    return check


def lr(drill: Drill) -> CheckResult:
    """The optimizer used the same learning rates."""
    check = _compare(drill, ("lr",), "learning rates")
    if check.status == "pass" and not any(record.lr for record in drill.reference_lineage.records):
        return inconclusive("steps_all_skipped", **check.evidence)
    return check


def gradients(drill: Drill) -> CheckResult:
    """The optimizer saw the same gradients, reduced and clipped."""
    if not drill.exact_weights:
        return skipped(TOLERANCE_GIVEN)
    check = _compare(drill, ("grad",), "gradient fingerprints")
    if check.status == "pass" and _constant((record.grad for record in drill.reference_lineage.records), drill):
        return inconclusive("gradients_constant", **check.evidence)
    return check


def parameters(drill: Drill) -> CheckResult:
    """The parameters were the same after each step, and right after each restore, under the same names."""
    if not drill.exact_weights:
        return skipped(TOLERANCE_GIVEN)
    problem = _wrong_names(drill) or _wrong_restore(drill)
    if problem:
        return problem
    check = _compare(drill, ("param", "state"), "parameter fingerprints")
    if check.status == "pass" and _constant((record.param for record in drill.reference_lineage.records), drill):
        return inconclusive("parameters_constant", **check.evidence)
    return check


def _compare(drill: Drill, wanted: tuple[Field, ...], what: str) -> CheckResult:
    fields: list[Field] = [field for field in wanted if field in compared_fields(drill.spec)]
    first: Mismatch | None = None
    differing = 0
    for rank in drill.ranks:
        expected, seen = (each.of(rank) for each in (drill.reference_lineage, drill.chaos_lineage))
        # At the other steps nothing differs.
        for step in sorted({step for (_, each), steps in drill.apart.items() if each == rank for step in steps}):
            if step not in expected or step not in seen or not drill.differs(seen[step]):
                continue
            if mismatch := drill.mismatch(expected[step], seen[step], fields):
                differing += 1
                first = min(first or mismatch, mismatch, key=lambda each: (each.step, each.rank))
    compared = drill.in_both - drill.given * len(drill.ranks)
    total = (drill.reference_lineage.final_step - drill.given) * len(drill.ranks)
    total -= sum(len(died_in(drill, rank)) for rank in drill.ranks)
    evidence: Params = {"compared": compared, "of": total, "differing": differing}
    if first:
        where = f"{first.place}{f' ({first.tensor})' if first.tensor else ''}"
        return failed("records_differ", **evidence, what=what, where=where, first=asdict(first))
    if not compared or compared < total:
        return inconclusive("records_lacking", **evidence)
    return passed(f"{what} of {compared} records are equal", **evidence)


def _alike(values: Iterable[str]) -> bool:
    """Whether there are two or more, all equal. Reads only up to the first different one."""
    rest = iter(values)
    first = next(rest, None)
    second = next(rest, None)
    return second is not None and second == first and all(value == first for value in rest)


def _constant(values: Iterable[str], drill: Drill) -> bool:
    return drill.reference_lineage.final_step > 1 and _alike(values)


def _nan_since(drill: Drill) -> int | None:
    """First step of an unbroken run of NaN losses up to the end, on any rank."""
    found: list[int] = []
    for by_step in drill.reference_lineage.steps.values():
        from_the_end = (by_step[step] for step in sorted(by_step, reverse=True))
        last = takewhile(lambda record: all(math.isnan(float.fromhex(value)) for value in record.loss), from_the_end)
        found += [record.step for record in last if record.loss]
    return min(found, default=None)


def _wrong_names(drill: Drill) -> CheckResult | None:
    for rank in drill.ranks:
        start = drill.reference_start(rank)
        if start is None:
            return inconclusive("parameters_unnamed", rank=rank)
        for attempt in drill.chaos.attempts:
            other = attempt.starts.get(rank)
            if other and other.tensors != start.tensors:
                if message := unlike_orders((start, other)):
                    return failed("parameter_order", message=message)
                index = first_difference(start.tensors, other.tensors) or 0
                names = [tensors[index : index + 1] for tensors in (start.tensors, other.tensors)]
                about: Params = {"rank": rank, "attempt": attempt.number, "index": index}
                return failed("parameters_renamed", **about, expected=names[0], seen=names[1])
    return None


def _wrong_restore(drill: Drill) -> CheckResult | None:
    """Parameters right after a restore that are not the reference's after that step."""
    for attempt in drill.chaos.attempts:
        for rank, start in attempt.starts.items():
            expected = parameters_expected(drill, attempt, rank)
            if expected is not None:
                where: Params = {"attempt": attempt.number, "step": start.position.step, "rank": rank}
                return failed("weights_differ_at_start", **where, expected=expected, seen=start.param)
    return None


def parameters_expected(drill: Drill, attempt: Attempt, rank: int) -> str | None:
    """Fingerprint of the parameters that an attempt should have begun with, if it began with others; None if they are right. If
    the reference saved no checkpoint there, or ended there, changes by the script after `run.step` are not recorded: then the
    saved parameters are right.
    """
    start = attempt.starts[rank]
    step = start.position.step
    following = drill.reference_lineage.at(rank, step + 1)
    # The script may have changed them before its next step: it clips them, draws some anew, copies them from others.
    expected = (following.began if following else "") or reference_parameters(drill, rank, step)
    if expected in (None, start.param):
        return None
    held = reference_state(drill, rank, step)
    if held is None or following is None:
        own = saved_before(drill, attempt, rank, step)
        held = held or (own.digests if own and not own.changed else None)
        if held and start.digests and held["model"] == start.digests["model"]:
            return None
    return expected


def reference_parameters(drill: Drill, rank: int, step: int) -> str | None:
    """Fingerprint of the reference's parameters after `step`, 0 for the initial ones; None if it recorded none."""
    if step:
        record = drill.reference_lineage.at(rank, step)
        return record.param if record else None
    start = drill.reference_start(rank)
    return start and start.param
