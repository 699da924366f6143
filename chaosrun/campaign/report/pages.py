"""The pages of a suite: JUnit XML, a summary in Markdown, the HTML index. A page that cannot be written is reported in the
result."""

import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from chaosrun.campaign.files import SuiteFolder
from chaosrun.campaign.history import Night, nights, read_history
from chaosrun.campaign.report.view import DrillRow, SuiteView, suite_view
from chaosrun.campaign.results import SuiteResult
from chaosrun.errors import UsageError
from chaosrun.records.journal import write_durably
from chaosrun.report import markdown
from chaosrun.report.html.page import WIDE, Scale, Shown, environment, path_of, ticks
from chaosrun.report.junit import Case, drill_suite, suite_of, to_xml
from chaosrun.report.view import read_view
from chaosrun.verify.verdict import judge
from chaosrun.wording import count, span

TEMPLATES = Path(__file__).parent / "templates"
SIGNS = {"as expected": "✅", "not as expected": "❌", "cut short": "🚫", "nothing to do": "➖"}
MOST_REPEATED = 5
"""Drills whose command is in the summary; each report has its own."""
TOP, FLOOR, HEIGHT = 12, 126, 150
"""Top and floor of the drawn area, and the height of a figure."""
LEAST_NIGHTS = 12
"""A figure has room for at least this many nights: the bar of one alone does not fill it."""


def write_pages(folder: SuiteFolder, result: SuiteResult, history: Path) -> SuiteResult:
    """Write all pages. The returned result lists those that could not be written."""
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


def render_markdown(result: SuiteResult) -> str:
    """For a job summary ($GITHUB_STEP_SUMMARY): drills that are not as expected come first."""
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
    return markdown.render("suite.md", TEMPLATES, view=view, sign=SIGNS[view.words], cells=cells, repeats=repeats)


def _sign(row: DrillRow) -> str:
    """A drill's sign: whether it is as expected, not whether it passed."""
    if row.ok:
        return SIGNS["as expected"]
    return SIGNS["not as expected"] if row.status == "PASS" else markdown.SIGNS.get(row.status, SIGNS["cut short"])


def render_index(result: SuiteResult, known: Sequence[Night], folder: Path) -> str:
    """The whole page, for `folder`: links are relative to it. `known`: the nights that are shown, oldest first."""

    def link(path: Path) -> str | None:
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


def junit_text(result: SuiteResult) -> str:
    """One suite of cases per drill, even for drills that were not begun, and one for the comparison of losses."""

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


def _compared(view: SuiteView) -> list[Case]:
    """The losses of a suite's drills compared with its first: one case each."""
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


def hand_out(result: SuiteResult, junit: Path | None, markdown: Path | None) -> None:
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


# The figures of the index, as rows that its template draws. Heights are in pixels, places across in percent.


def rates(known: Sequence[Night]) -> Shown | None:
    """A bar per night: all of its drills, and how many were as expected. None without nights."""
    if not known:
        return None
    most = max(len(night.drills) for night in known)
    scale = Scale(0, most)
    bars = [
        {
            "said": f"{night.night}: {night.passed} of {len(night.drills)} as expected",
            "x": _share(known) * (place + 0.15),
            "width": _share(known) * 0.7,
            "well": _y(scale, night.passed),
            "all": _y(scale, len(night.drills)),
        }
        for place, night in enumerate(known)
    ]
    latest = known[-1]
    told = f"Drills as expected over {count(len(known), 'night')}, last {latest.passed} of {len(latest.drills)}"
    return _figure(known, scale, {value: str(value) for value in sorted({0, most})}, told) | {"bars": bars}


def recoveries(known: Sequence[Night]) -> Shown | None:
    """Per night the drills' median, and the range from shortest to longest. None when no night had a restart."""
    found = [(place, night, night.recoveries) for place, night in enumerate(known) if night.recoveries]
    if not found:
        return None
    middles = [statistics.median(times) for *_, times in found]
    # One long hang must not flatten all other values.
    scale = Scale(0.0, min(max(times[-1] for *_, times in found), 4 * max(middles)))
    spans: list[Shown] = []
    for (place, night, times), middle in zip(found, middles, strict=True):
        over = count(len(times), "drill")
        spans.append(
            {
                "said": f"{night.night}: median {span(middle)}, {span(times[0])} to {span(times[-1])} over {over}",
                "x": _share(known) * place,
                "width": _share(known),
                "at": _share(known) * (place + 0.5),
                "ends": (_y(scale, times[0]), _y(scale, times[-1])),
                "y": _y(scale, middle),
            }
        )
    line = [
        (WIDE * _share(known) * (place + 0.5) / 100, _y(scale, middle))
        for (place, *_), middle in zip(found, middles, strict=True)
    ]
    told = f"Recovery over {count(len(found), 'night')} with restarts, last median {span(middles[-1])}"
    values = {value: f"{value:g} s" for value in ticks(0.0, scale.high, 3)}
    return _figure(known, scale, values, told) | {"spans": spans, "trend": path_of(line) if len(line) > 1 else ""}


def strip(drill: str, known: Sequence[Night]) -> Shown:
    """A drill's nights, oldest first: whether it was as expected, None where it did not run."""
    oks = {night.night: night.drills[drill].ok if drill in night.drills else None for night in known}
    ran = [ok for ok in oks.values() if ok is not None]
    odd = [night for night, ok in oks.items() if ok is False]
    said = f"{sum(ran)} of {len(ran)} nights as expected" + (f", not on {', '.join(odd[-3:])}" if odd else "")
    return {"said": said, "nights": list(oks.values())}


def _share(known: Sequence[Night]) -> float:
    return 100 / max(len(known), LEAST_NIGHTS)


def _figure(known: Sequence[Night], scale: Scale, values: Mapping[float, str], told: str) -> dict[str, object]:
    """A figure with its values at the side, and the first and last night below; `told`: the same in words."""
    ends = list(dict.fromkeys((known[0].night, known[-1].night)))
    if len(known) < LEAST_NIGHTS:
        ends = [" to ".join(ends)]  # next to each other they would overlap
    labels = [(_y(scale, value), words) for value, words in values.items()]
    return {
        "height": HEIGHT,
        "floor": FLOOR,
        "labels": labels,
        "dates": list(enumerate(ends)),
        "ends": Scale(0, 1),
        "told": told,
    }


def _y(scale: Scale, value: float) -> float:
    return FLOOR - (FLOOR - TOP) * scale.at(value)
