"""The page of a suite: tonight's drills, what is new among them, and the nights before. Loads nothing: `render_index`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from chaosrun.campaign.report.suite import headline, in_words, not_done, unexpected
from chaosrun.campaign.report.suite_html.figures import rates, recoveries
from chaosrun.campaign.report.suite_html.rows import night_rows, rows
from chaosrun.report.html.page import environment
from chaosrun.wording import clock

if TYPE_CHECKING:
    from chaosrun.campaign.history import Night
    from chaosrun.campaign.results import SuiteResult

__all__ = ["render_index"]

TEMPLATES = Path(__file__).parent / "templates"


def render_index(result: "SuiteResult", known: "Sequence[Night]", folder: Path) -> str:
    """The whole page, to lie in `folder`: links are relative to it. `known`: the nights that are shown, oldest first."""
    return (
        environment(TEMPLATES)
        .get_template("suite.html")
        .render(
            result=result,
            headline=headline(result),
            words=in_words(result).capitalize(),
            past=f"The last {len(known)} nights" if len(known) > 1 else "One night",
            odd=sum(not drill.ok for drill in result.drills),
            not_done=not_done,
            unexpected=unexpected(result),
            rows=rows(result, known, folder),
            nights=night_rows(known, folder),
            rates=rates(known),
            recoveries=recoveries(known),
            clock=clock,
        )
    )
