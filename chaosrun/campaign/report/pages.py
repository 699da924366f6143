"""The pages of a suite: JUnit XML, a summary in Markdown, the HTML index. A page that cannot be written is reported in the
result."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote

from chaosrun.campaign.files import SuiteFolder
from chaosrun.campaign.report.view import DrillRow, SuiteView, suite_view
from chaosrun.errors import UsageError
from chaosrun.records.journal import write_durably

if TYPE_CHECKING:
    from chaosrun.campaign.history import Night
    from chaosrun.campaign.results import SuiteResult
    from chaosrun.report.junit import Case

TEMPLATES = Path(__file__).parent / "templates"
SIGNS = {"as expected": "✅", "not as expected": "❌", "cut short": "🚫", "nothing to do": "➖"}
MOST_REPEATED = 5
"""Drills whose command is in the summary; each report has its own."""


def write_pages(folder: SuiteFolder, result: "SuiteResult", history: Path) -> "SuiteResult":
    """Write all pages. The returned result lists those that could not be written."""
    from chaosrun.campaign.history import nights, read_history

    pages: Sequence[tuple[Path, Callable[[], str]]] = (
        (folder.junit_xml, lambda: junit_text(result)),
        (folder.summary_md, lambda: render_markdown(result)),
        (folder.index_html, lambda: render_index(result, nights(read_history(history).entries), folder.path)),
    )
    notes: list[str] = []
    for path, render in pages:
        try:
            write_durably(path, render().encode(errors="replace"))
        except OSError as error:
            notes.append(f"{path} could not be written: {error.strerror}")
        except Exception as error:  # a failing page must not lose the record of a night
            notes.append(f"{path} could not be written, this is a bug in chaosrun: {type(error).__name__}: {error}")
    return replace(result, notes=(*result.notes, *notes))


def render_markdown(result: "SuiteResult") -> str:
    """For a job summary ($GITHUB_STEP_SUMMARY): drills that are not as expected come first."""
    from chaosrun.report.markdown import render

    view = suite_view(result)
    cells = [
        (
            row.name,
            f"{_sign(row)} {row.status}",
            f"{row.expected} ({row.label})" if row.label else row.expected,
            row.told or "-",
            row.faults,
            row.restarts,
            row.recovery,
            row.time,
        )
        for row in view.by_interest
    ]
    repeats = [replace(row.repeat, label=row.name, note=None) for row in view.odd[:MOST_REPEATED] if row.repeat is not None]
    return render("suite.md", TEMPLATES, view=view, sign=SIGNS[view.words], cells=cells, repeats=repeats)


def _sign(row: DrillRow) -> str:
    """A drill's sign: whether it is as expected, not whether it passed."""
    from chaosrun.report.markdown import SIGNS as VERDICTS

    if row.ok:
        return SIGNS["as expected"]
    return SIGNS["not as expected"] if row.status == "PASS" else VERDICTS.get(row.status, SIGNS["cut short"])


def render_index(result: "SuiteResult", known: "Sequence[Night]", folder: Path) -> str:
    """The whole page, for `folder`: links are relative to it. `known`: the nights that are shown, oldest first."""
    from chaosrun.campaign.report.figures import rates, recoveries, strip
    from chaosrun.report.html.page import environment

    def link(path: Path) -> str | None:
        """Link to an existing page."""
        return quote(os.path.relpath(path, folder)) if path.is_file() else None

    pages = {night.night: folder.parent / night.suite / "index.html" for night in known}
    return (
        environment(TEMPLATES)
        .get_template("suite.html")
        .render(
            result=result,
            view=suite_view(result),
            past=f"The last {len(known)} nights" if len(known) > 1 else "One night",
            links={drill.name: link(drill.run.report_html) for drill in result.drills if drill.run is not None},
            strips={drill.name: strip(drill.name, known) for drill in result.drills},
            nights=known[::-1],
            pages={night: link(page) for night, page in pages.items() if page.parent != folder},
            rates=rates(known),
            recoveries=recoveries(known),
        )
    )


def junit_text(result: "SuiteResult") -> str:
    """One suite of cases per drill, even for drills that were not begun, and one for the comparison of losses."""
    from chaosrun.report.junit import Case, drill_suite, suite_of, to_xml
    from chaosrun.report.view import read_view
    from chaosrun.verify.verdict import judge

    def without(name: str, result: Literal["error", "skipped"], why: str, instead: str) -> None:
        """The cases of a drill without a verdict."""
        suites.append(suite_of(name, [Case(name="verdict", result=result, message=why, type=instead)]))

    view, suites = suite_view(result), []
    for drill in result.drills:
        if drill.run is None or drill.status is None:
            why = drill.error or "the drill could not be carried out"
            without(drill.name, "error", why, "cancelled" if drill.cancelled else "not carried out")
        else:
            suites.append(drill_suite(drill.name, read_view(drill.run, judge(drill.run)), surprises=drill.surprises))
    why = "after a drill that was not as expected" if result.cut_short is None else "the suite was cut short before"
    for name in result.left:
        without(name, "skipped", f"{view.not_done}, {why}", view.not_done)
    if result.cut_short is not None:  # so that CI does not show the suite as passed
        without(f"suite {result.name}", "error", f"cut short: {result.cut_short}", "cut short")
    if cases := _compared(view):
        suites.append(suite_of("comparison", cases))
    if result.empty:
        without(result.name, "skipped", view.headline, "not begun")
    return to_xml(suites)


def _compared(view: SuiteView) -> "list[Case]":
    """The losses of a suite's drills compared with its first: one case each."""
    from chaosrun.report.junit import Case

    result, cases = view.result, []
    if result.not_compared is not None:
        why = f"the losses could not be compared: {result.not_compared}"
        cases.append(Case(name="losses", result="error", message=why, type="not compared"))
    for entry, row in zip(result.compared, view.losses, strict=True):
        about = f"beside {result.first}: beyond the tolerance: {row.beyond}, largest difference {row.largest}"
        case = Case(name=entry.name, output=[about, "a control, as expected" if entry.control and row.ok else None])
        surprise = replace(case, result="failure", message=row.surprise, type="unexpected", about=[about])
        cases.append(case if row.ok else surprise)
    return cases


def hand_out(result: "SuiteResult", junit: Path | None, markdown: Path | None) -> None:
    """Write the pages also to the user's paths; the summary is appended to its file, after other summaries. Raises
    UsageError."""
    assert result.path is not None
    folder = SuiteFolder(result.path)
    for page, path, option, mode in (
        (folder.junit_xml, junit, "--junit", "wb"),
        (folder.summary_md, markdown, "--markdown", "ab"),
    ):
        try:
            if path is not None:
                with path.open(mode) as file:
                    file.write(page.read_bytes())
        except OSError as error:
            raise UsageError(f"cannot write {path}: {error.strerror}", hint=f"name another file with {option}") from error
