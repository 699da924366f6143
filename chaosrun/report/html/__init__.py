"""The report of a drill as one HTML page that loads nothing. Figures that only a page has room for are made from the legs'
traces."""

from pathlib import Path

from chaosrun.report.html.losses import losses
from chaosrun.report.html.page import environment
from chaosrun.report.html.particulars import particulars, restarts
from chaosrun.report.html.samples import ledger
from chaosrun.report.html.source import read_source
from chaosrun.report.html.timeline import timeline
from chaosrun.report.view import RunView
from chaosrun.verify.recovery_times import PHASES

__all__ = ["render_html"]


def render_html(view: RunView) -> str:
    """The whole page. It names damaged files of the run; raises OSError when a file cannot be read at all."""
    source = read_source(view)
    template = environment().get_template("drill.html")
    return template.render(
        view=view,
        verdict=view.verdict,
        source=source,
        timeline=timeline(source),
        losses=losses(source),
        ledger=ledger(source),
        restarts=restarts(source),
        particulars=particulars(source),
        phases=PHASES,
        here=Path.cwd(),
    )
