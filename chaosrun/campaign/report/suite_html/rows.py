"""The rows of a suite's page: drills of tonight, what is not as expected first, and the nights."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from markupsafe import Markup

from chaosrun.campaign.report.suite import told
from chaosrun.campaign.report.suite_html.figures import strip
from chaosrun.records.layout import RunLayout
from chaosrun.report.facts import read_facts
from chaosrun.report.next_commands import repeat_command

if TYPE_CHECKING:
    from chaosrun.campaign.history import Night
    from chaosrun.campaign.results import DrillResult, SuiteResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    drill: "DrillResult"
    told: str
    link: str | None
    """Of its report, relative to the page; None where there is none."""
    strip: Markup
    repeat: str | None
    """The command that does the same again, of a drill that is not as expected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NightRow:
    night: "Night"
    seed: int | None
    odd: tuple[str, ...]
    link: str | None


def rows(result: "SuiteResult", known: "Sequence[Night]", folder: Path) -> list[Row]:
    found = [_row(drill, known, folder) for drill in result.drills]
    return sorted(found, key=lambda row: row.drill.ok)


def _row(drill: "DrillResult", known: "Sequence[Night]", folder: Path) -> Row:
    run = drill.run
    has_page = run is not None and run.report_html.is_file()
    return Row(
        drill=drill,
        told=told(drill),
        link=_link(run.report_html, folder) if run is not None and has_page else None,
        strip=strip([(n.night, n.drills[drill.name].ok if drill.name in n.drills else None) for n in known]),
        repeat=None if run is None or drill.ok else _repeat(run),
    )


def _repeat(run: RunLayout) -> str | None:
    command = repeat_command(run, read_facts(run))
    return None if command is None else shlex.join(command)


def night_rows(known: "Sequence[Night]", folder: Path) -> list[NightRow]:
    """Newest first."""
    found = []
    for night in reversed(known):
        page = folder.parent / night.suite / "index.html"
        here = page.parent == folder
        found.append(
            NightRow(
                night=night,
                seed=next((entry.seed for entry in night.drills.values()), None),
                odd=tuple(entry.drill for entry in night.drills.values() if not entry.ok),
                link=_link(page, folder) if page.is_file() and not here else None,
            )
        )
    return found


def _link(path: Path, folder: Path) -> str:
    return quote(os.path.relpath(path, folder))
