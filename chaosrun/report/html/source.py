"""The data of a page's figures: both legs with their traces, read once. Names damaged files."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import RunInfo, read_run, readable, recorded_leg
from chaosrun.records.spans import StepsByNumber
from chaosrun.report.diagnosis import read_diagnosis
from chaosrun.report.view import RunView
from chaosrun.verify.lineage import Lineage, lineage

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    history: LegHistory
    chain: Lineage


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSource:
    view: RunView
    reference: Leg
    chaos: Leg
    diagnosis: "Diagnosis | None"
    problems: tuple[str, ...]
    """Sentences on files that could not be read, or not in full."""

    @property
    def words(self) -> tuple[str, str]:
        """Names of the two sides of the comparison."""
        return ("as first done", "as it continued") if self.view.facts.in_production else ("reference", "under faults")

    @property
    def shown(self) -> Leg:
        """The leg whose course is shown: the chaos leg, or the reference leg if the chaos leg never began."""
        return self.chaos if self.chaos.history.journal else self.reference


def read_source(view: RunView) -> PageSource:
    """Never fails on a file's content. Raises OSError when a file of the run cannot be read at all."""
    run, problems = view.run, list(view.damage)
    info = readable(lambda: read_run(run), problems)
    legs = [_leg(run, info, name, problems) for name in ("reference", run.main)]
    if view.facts.in_production:
        legs[0] = _rolled_back(legs[1])
    return PageSource(
        view=view,
        reference=legs[0],
        chaos=legs[1],
        diagnosis=readable(lambda: read_diagnosis(run), problems) if run.diagnosis_json.exists() else None,
        problems=tuple(dict.fromkeys(problems)),
    )


def _rolled_back(leg: Leg) -> Leg:
    """The first records of steps that were done again after a restart: a run in production is compared with these."""
    chains = {rank: StepsByNumber() for rank in leg.chain.steps}
    for span in leg.chain.cut_off:
        chains[span.trace.rank].add(span)
    return Leg(history=LegHistory(name=leg.history.name, layout=leg.history.layout), chain=Lineage(steps=chains))


def _leg(run: RunLayout, info: RunInfo | None, name: str, problems: list[str]) -> Leg:
    layout = recorded_leg(run, info, name) if info else run.leg(name)
    if not layout.journal.exists() and not layout.attempts():
        # A leg that never began is not damage.
        history = LegHistory(name=name, layout=layout)
    else:
        history = read_leg(layout)
        problems.extend(f"{name} leg: {problem}" for problem in history.problems)
    return Leg(history=history, chain=lineage(history))
