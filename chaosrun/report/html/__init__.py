"""The report of a drill as one HTML page that loads nothing: `render_html`.

source (files, read once) → answers, timeline, losses, samples, restarts, particulars (values and figures) → templates.
"""

from chaosrun.records.layout import RunLayout
from chaosrun.report.html.answers import answers
from chaosrun.report.html.drawing import SHAPES
from chaosrun.report.html.losses import losses
from chaosrun.report.html.page import environment
from chaosrun.report.html.particulars import particulars
from chaosrun.report.html.restarts import PHASE_MEANINGS, PHASE_NAMES, restarts
from chaosrun.report.html.samples import ledger
from chaosrun.report.html.source import read_source
from chaosrun.report.html.timeline import timeline
from chaosrun.verify.verdict import Verdict

__all__ = ["render_html"]


def render_html(run: RunLayout, verdict: Verdict) -> str:
    """The whole page. What is damaged in the run is named on it; raises OSError when a file cannot be read at all."""
    source = read_source(run, verdict)
    template = environment().get_template("drill.html")
    return template.render(
        run=run,
        verdict=verdict,
        source=source,
        answers=answers(source),
        timeline=timeline(source),
        losses=losses(source),
        ledger=ledger(source),
        restarts=restarts(source),
        particulars=particulars(source),
        shapes=SHAPES,
        phases=PHASE_NAMES,
        meanings=PHASE_MEANINGS,
    )
