"""Writes the reports of a run: the formats, where each is kept, and how failures are handled."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from chaosrun.errors import DISK_FAILS, DISK_FULL, ChaosrunError, ResourcesError, UsageError
from chaosrun.records.destination import expect_folder, write_to
from chaosrun.records.journal import write_durably
from chaosrun.records.layout import RunLayout
from chaosrun.records.naming import run_argument
from chaosrun.report.view import RunView, read_view

if TYPE_CHECKING:
    from chaosrun.verify.verdict import Verdict

ReportFormat = Literal["html", "junit", "markdown", "tensorboard", "text"]
TEXT_WIDTH = 120


_FILES: Mapping[str, str] = {"html": "report_html", "markdown": "report_md", "junit": "junit_xml", "text": "report_txt"}
"""Formats that are one text file, and its name in a `RunLayout`."""


def _rendered(format: str, view: RunView) -> str:
    # Each has its own libraries, which are loaded only when needed.
    match format:
        case "html":
            from chaosrun.report.html import render_html as render
        case "markdown":
            from chaosrun.report.markdown import render_markdown as render
        case "junit":
            from chaosrun.report.junit import render_junit as render
        case _:
            from chaosrun.report.output import rendered
            from chaosrun.report.text import render_text

            return rendered(render_text(view, whole=True), width=TEXT_WIDTH, colour=False)
    return render(view)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    run_id: str
    verdict: "Verdict"
    path: Path | None
    """None where it is only `text`."""
    text: str | None


def make_report(run: RunLayout, verdict: "Verdict", format: ReportFormat, to: str | None) -> Report:
    """Write one report `to` a path, by default into the run's directory; "-" returns the text. Raises UsageError where it
    cannot be written, ResourcesError when the disk is full."""
    if to == "-":
        if format == "tensorboard":
            raise UsageError("event files are a directory, not text", hint="name a directory with --to")
        return Report(run_id=run.run_id, verdict=verdict, path=None, text=_rendered(format, read_view(run, verdict)))
    path = _write(run, verdict, format, None if to is None else Path(to))
    return Report(run_id=run.run_id, verdict=verdict, path=path, text=None)


def _write(run: RunLayout, verdict: "Verdict", format: ReportFormat, to: Path | None) -> Path:
    path = to or (run.tensorboard if format == "tensorboard" else getattr(run, _FILES[format]))
    try:
        if format == "tensorboard":
            from chaosrun.report.tensorboard import write_tensorboard

            if to is not None:
                path = to.resolve()
                expect_folder(path)
            write_tensorboard(run, verdict, path, replace=to is None)
        elif path.is_dir():
            raise UsageError(
                f"{path} is a directory", hint=f"name a file with --to, such as {path / getattr(run, _FILES[format]).name}"
            )
        else:
            data = _rendered(format, read_view(run, verdict)).encode(errors="replace")
            if to is None:
                write_durably(path, data)
            else:
                write_to(path, data)
    except OSError as error:
        raise _unwritable(path, error) from error
    return path


def write_reports(run: RunLayout, verdict: "Verdict") -> list[str]:
    """Write the reports that every drill has. Returns a warning, a sentence or two for people, for each that could not be
    written."""
    warnings: list[str] = []
    view: RunView | None = None
    for format in ("html", "markdown", "junit"):
        path: Path = getattr(run, _FILES[format])
        why = f"{path.name} was not written"
        try:
            view = view or read_view(run, verdict)
            write_durably(path, _rendered(format, view).encode(errors="replace"))
        except ChaosrunError as error:
            warnings.append(f"{why}: {error.message}")
        except OSError as error:
            warnings.append(f"{why}: {_unwritable(path, error).message}")
        except Exception as error:  # a crashing renderer must not lose the verdict
            again = f"`chaosrun report {run_argument(run)} --format {format}` says where"
            warnings.append(f"{why}; this is a bug in chaosrun: {type(error).__name__}: {error}; the verdict stands, {again}")
    return warnings


def _unwritable(path: Path, error: OSError) -> ChaosrunError:
    named = str(error.filename or "")
    place = named if named and not named.endswith(".tmp") else path
    if error.errno in DISK_FAILS:
        space = "free some space, or " if error.errno in DISK_FULL else ""
        return ResourcesError(f"{place}: {error.strerror}", hint=f"{space}write it elsewhere with --to")
    return UsageError(f"{place} cannot be written: {error.strerror}", hint="write it elsewhere with --to")
