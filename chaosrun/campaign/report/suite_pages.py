"""The pages of a suite: JUnit XML, a summary in Markdown, and the HTML index, in its folder and where the user wants them.

Written from the result, and never change it: one that cannot be written is told.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from chaosrun.campaign.folder import SuiteFolder
from chaosrun.campaign.report.suite import headline, not_done
from chaosrun.errors import UsageError
from chaosrun.records.destination import is_stream
from chaosrun.records.journal import write_durably

if TYPE_CHECKING:
    from chaosrun.campaign.results import SuiteResult


def write_pages(folder: SuiteFolder, result: "SuiteResult", history: Path) -> "SuiteResult":
    """Write all of them. The result returned tells what could not be written."""
    from chaosrun.campaign.history import nights, read_history
    from chaosrun.campaign.report.suite_html import render_index
    from chaosrun.campaign.report.suite_markdown import render_markdown

    def index() -> str:
        return render_index(result, nights(read_history(history).entries), folder.path)

    pages: Sequence[tuple[Path, Callable[[], str]]] = (
        (folder.junit_xml, lambda: junit_text(result)),
        (folder.summary_md, lambda: render_markdown(result)),
        (folder.index_html, index),
    )
    notes: list[str] = []
    for path, render in pages:
        try:
            write_durably(path, render().encode(errors="replace"))
        except OSError as error:
            notes.append(f"{path} could not be written: {error.strerror}")
        except Exception as error:  # a page that fails is no reason to lose the account of a night
            notes.append(f"{path} could not be written, this is a bug in chaosrun: {type(error).__name__}: {error}")
    return replace(result, notes=(*result.notes, *notes))


def junit_text(result: "SuiteResult") -> str:
    """One suite of cases a drill, also for those that were not begun, and one for the comparison of losses."""
    from chaosrun.report.junit import comparison_suite, drill_suite, skipped_suite, to_xml
    from chaosrun.verify.verdict import judge

    suites = [
        drill_suite(
            drill.name,
            drill.run,
            judge(drill.run) if drill.run is not None and drill.status is not None else None,
            surprises=drill.surprises,
            error=drill.error,
            instead="cancelled" if drill.cancelled else "not carried out",
        )
        for drill in result.drills
    ]
    why = "after a drill that was not as expected" if result.cut_short is None else "the suite was cut short before"
    suites += [skipped_suite(name, f"{not_done(result)}, {why}", not_done(result)) for name in result.left]
    if result.cut_short is not None:  # what CI shows is not all green then
        whole = f"suite {result.name}"
        suites.append(drill_suite(whole, None, None, error=f"cut short: {result.cut_short}", instead="cut short"))
    if result.compared or result.not_compared is not None:
        suites.append(comparison_suite(result))
    if result.empty:
        suites.append(skipped_suite(result.name, headline(result)))
    return to_xml(suites)


def hand_out(result: "SuiteResult", junit: Path | None, markdown: Path | None) -> None:
    """Put the pages of the suite's folder where the user wants them, too: the summary at its file's end, since others may have
    written to a step's summary before. Raises UsageError when one cannot be written there."""
    assert result.path is not None
    folder = SuiteFolder(result.path)
    if junit is not None:
        _copy(folder.junit_xml, junit, "--junit", "wb")
    if markdown is not None:
        _copy(folder.summary_md, markdown, "--markdown", "ab")


def expect_writable(option: str, path: Path) -> None:
    """Raises UsageError when a page, or the history, could not be written there. Leaves nothing."""
    if not path.parent.is_dir():
        raise UsageError(f"{option} {path}: there is no directory {path.parent}", hint="make it, or name another file")
    if is_stream(path):
        return
    new = not path.exists()
    try:
        path.open("ab").close()
        if new:
            path.unlink()
    except OSError as error:
        raise UsageError(f"{option} {path} cannot be written: {error.strerror}", hint="name another file") from error


def _copy(page: Path, path: Path, option: str, mode: Literal["wb", "ab"]) -> None:
    try:
        with path.open(mode) as file:
            file.write(page.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}", hint=f"name another file with {option}") from error
