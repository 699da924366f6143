"""What a page's figures are made from: both legs with their traces, read once. What is damaged in them is named."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from chaosrun.records.history import LegHistory, read_leg
from chaosrun.records.layout import RunLayout
from chaosrun.records.run_file import RunInfo, read_run, recorded_leg
from chaosrun.report.diagnosis import read_diagnosis
from chaosrun.report.view import RunView, readable
from chaosrun.verify.lineage import Lineage, lineage

if TYPE_CHECKING:
    from chaosrun.verify.diagnosis import Diagnosis


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    history: LegHistory
    chain: Lineage

    @property
    def name(self) -> str:
        return self.history.name

    @property
    def began(self) -> bool:
        return bool(self.history.journal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    view: RunView
    reference: Leg
    chaos: Leg
    diagnosis: "Diagnosis | None"
    problems: tuple[str, ...]
    """Sentences on files that could not be read, or not in full."""

    @property
    def told(self) -> Leg:
        """The leg whose course is shown: the disturbed one, or the one that it never came to."""
        return self.chaos if self.chaos.began else self.reference


def read_source(view: RunView) -> Source:
    """Never fails on content. Raises OSError when a file of the run cannot be read at all."""
    run, problems = view.run, list(view.damage)
    info = readable(lambda: read_run(run), problems)
    legs = [_leg(run, info, name, problems) for name in ("reference", "chaos")]
    return Source(
        view=view,
        reference=legs[0],
        chaos=legs[1],
        diagnosis=readable(lambda: read_diagnosis(run), problems) if run.diagnosis_json.exists() else None,
        problems=tuple(dict.fromkeys(problems)),
    )


def _leg(run: RunLayout, info: RunInfo | None, name: str, problems: list[str]) -> Leg:
    layout = recorded_leg(run, info, name) if info else run.leg(name)
    if not layout.journal.exists() and not layout.attempts():
        # A leg that never began: nothing is damaged.
        history = LegHistory(name=name, layout=layout)
    else:
        history = read_leg(layout)
        problems.extend(f"{name} leg: {problem}" for problem in history.problems)
    return Leg(history=history, chain=lineage(history))
