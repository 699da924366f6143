"""Expands one entry of a spec into its faults at one moment: one for each rank that it strikes at once. Pure."""

import random
from collections.abc import Iterator

from chaosrun.faults.fault import Fault
from chaosrun.faults.kind import Phase
from chaosrun.plan.rules import only_rank
from chaosrun.plan.sampling import distinct
from chaosrun.spec.faults import FaultOptions
from chaosrun.spec.model import JobSpec
from chaosrun.spec.places import Objection

MAX_FAULTS = 10_000
"""Most faults of one plan."""


class RefusedError(Exception):
    """Why an entry of the spec cannot be planned."""

    def __init__(self, entry: str, why: str) -> None:
        self.objection = Objection(entry, why)
        super().__init__(str(self.objection))


def at_one_moment(
    spec: JobSpec,
    entry: FaultOptions,
    source: str,
    chance: random.Random,
    *,
    phase: Phase | None,
    at_step: int | None = None,
    occurrence: int = 1,
    attempt: int | None = None,
    after_s: float | None = None,
    required: bool = True,
) -> Iterator[Fault]:
    """One fault, or one for each rank that it strikes at once; ids are still empty. Raises RefusedError."""
    ranks = _ranks(spec, entry, source, phase, chance)
    together = len(ranks) > 1
    for rank in ranks:
        yield Fault(
            id="",
            kind=entry.kind,
            rank=rank,
            phase=phase,
            at_step=at_step,
            occurrence=occurrence,
            attempt=attempt,
            target=entry.target,
            after_s=after_s,
            group=f"{source} {at_step or after_s}/{len(ranks)}" if together else None,
            required=required,
            options=entry.options,
            source=source,
        )


def _ranks(spec: JobSpec, entry: FaultOptions, source: str, phase: str | None, chance: random.Random) -> list[int]:
    if entry.rank == "random" and entry.at_once is None:
        alone = only_rank(entry.kind, phase, entry.target)
        return [int(chance.random() * spec.workers) if alone is None else alone]
    if isinstance(entry.rank, int):
        return [entry.rank]
    size = entry.at_once or spec.workers
    if size > spec.workers:
        raise RefusedError(source, f"{size} ranks at once are more than there are: {spec.workers}")
    if size > 1:
        _expect_plural(entry, source)
    return list(range(spec.workers)) if entry.rank == "all" else distinct(size, spec.workers, chance)


def _expect_plural(entry: FaultOptions, source: str) -> None:
    fault = Fault(id="", kind=entry.kind, rank=0, source=source)
    if "{rank}" not in fault.facts.words:
        raise RefusedError(source, f"a fault of kind {entry.kind} concerns the job's checkpoint, which is one: name one rank")
    if fault.facts.inside is None:
        raise RefusedError(
            source, f"a fault of kind {entry.kind} does not strike single ranks: name one rank, or add an entry for each"
        )
    if not fault.facts.outlives_its_attempt:
        raise RefusedError(
            source,
            f"of several ranks at once only the first would be seen to end by a fault of kind {entry.kind}, "
            "the others are stopped with its attempt",
        )
