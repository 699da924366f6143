"""The run before a sweep that finds out what there is to try: the job undisturbed, then killed once, every rank writing down
which points it comes by. Its undisturbed leg is the reference of the whole sweep."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from chaosrun.campaign.place import Listener, WarmPlace, Watch, new_run
from chaosrun.errors import ChaosrunError, RecoveryError, ResourcesError, RunTimeoutError, UserScriptError
from chaosrun.plan.fragment import cleared, scheduled
from chaosrun.plan.points import Passage, first_kill
from chaosrun.records.layout import LegLayout, RunLayout
from chaosrun.records.trace import read_lines
from chaosrun.supervise.drill import leg_of, read_run
from chaosrun.supervise.reference import leg_end

ERRORS: dict[str, type[ChaosrunError]] = {
    "user_error": UserScriptError,
    "resources": ResourcesError,
    "timeout": RunTimeoutError,
}
"""Outcome of the undisturbed job → what a sweep ends with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    run: RunLayout
    reference_key: str
    undisturbed: tuple[Passage, ...]
    recovering: tuple[Passage, ...]
    """Of the attempt after the first kill; empty when it came to none."""
    epoch_of_step: dict[int, int]

    @property
    def passages(self) -> int:
        """How many different points were come by in all."""
        return len({*((False, passage) for passage in self.undisturbed), *((True, passage) for passage in self.recovering)})


def survey(place: WarmPlace, folder: Path, overrides: Sequence[str], *, watch: Watch, on_record: Listener) -> Survey:
    """Raises what the undisturbed job failed with; whether it comes back from the kill is for the sweep to tell."""
    job = place.job
    workers = job.spec.workers
    kill = [*cleared(job.spec), scheduled([first_kill(job.spec)])]
    run = new_run(folder, job.path, [*overrides, *kill], reference="fresh")
    place.drill(run, watch=watch, on_record=on_record, survey=True)
    reference = leg_of(run, "reference")
    end = leg_end(reference)
    assert end is not None, "a drill ends with its legs"
    if end["outcome"] != "completed":
        error = ERRORS.get(end["outcome"], RecoveryError)
        raise error(f"the undisturbed job did not end well: {end['message']}", hint=end["hint"])
    return Survey(
        run=run,
        reference_key=read_run(run)["reference"]["key"],
        undisturbed=tuple(_passages(reference, reference.attempts()[-1], workers)),
        recovering=tuple(_passages(leg_of(run, "chaos"), 2, workers)),
        epoch_of_step=_epochs(reference, reference.attempts()[-1]),
    )


def _passages(leg: LegLayout, attempt: int, workers: int) -> Iterator[Passage]:
    for rank in range(workers):
        path = leg.attempt(attempt).points(rank)
        for line in read_lines(path) if path.exists() else ():
            yield Passage(rank=rank, **line)


def _epochs(leg: LegLayout, attempt: int) -> dict[int, int]:
    lines = read_lines(leg.attempt(attempt).trace(0))
    return {line["step"]: line["epoch"] for line in lines if line["kind"] == "step"}
