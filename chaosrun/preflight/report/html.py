"""The report of a preflight as one page that loads nothing."""

from pathlib import Path

from chaosrun.preflight.report.rows import in_order, report_of
from chaosrun.preflight.result import Result
from chaosrun.report.html.page import environment
from chaosrun.wording import span

TEMPLATES = Path(__file__).parent / "templates"


def render_html(result: Result, *, good_file: str | None = None) -> str:
    """The whole page. `good_file`: where the names of the good nodes were written."""
    template = environment(TEMPLATES).get_template("preflight.html")
    return template.render(report=report_of(result, good_file), result=result, in_order=in_order, span=span)
