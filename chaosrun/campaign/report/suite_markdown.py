"""The account of a suite in Markdown, for a job summary ($GITHUB_STEP_SUMMARY): what is not as expected first."""

import shlex
from collections.abc import Iterable
from typing import TYPE_CHECKING

from chaosrun.campaign.report.suite import headline, in_words, told, unexpected
from chaosrun.report.facts import read_facts
from chaosrun.report.markdown import SIGNS
from chaosrun.report.markdown_parts import fence, fitting, table, text
from chaosrun.report.next_commands import repeat_command
from chaosrun.wording import clock

if TYPE_CHECKING:
    from chaosrun.campaign.results import DrillResult, SuiteResult

SIGN_OF = {"as expected": "✅", "not as expected": "❌", "cut short": "🚫", "nothing to do": "➖"}
MOST_REPEATED = 5
"""Drills whose command is shown; each report has its own."""


def render_markdown(result: "SuiteResult") -> str:
    parts = [f"## {SIGN_OF[in_words(result)]} {text(result.name)}: {in_words(result)}", text(headline(result))]
    if sentences := unexpected(result):
        parts.append("\n".join(f"- {text(sentence)}" for sentence in sentences))
    parts += _repeats([drill for drill in result.drills if not drill.ok])
    if result.seed is not None:
        parts.append(f"Faults drawn with `--seed {result.seed}`: the same again with the same number\\.")
    if result.drills:
        # What is cut off of a long table is its middle.
        drills = sorted(result.drills, key=lambda drill: drill.ok)
        titles = ("drill", "verdict", "expected", "first difference or cause", "faults", "restarts", "recovery", "time")
        parts.append(table(titles, [_row(drill) for drill in drills]))
    if result.notes:
        parts.append("\n".join(f"- {text(note)}" for note in result.notes))
    return fitting(parts)


def _row(drill: "DrillResult") -> tuple[str, ...]:
    return (
        drill.name,
        f"{SIGNS.get(drill.word, '🚫')} {drill.word}",
        ("yes" if drill.ok else f"no, {drill.expected}") + (f" ({drill.label})" if drill.label else ""),
        told(drill),
        f"{drill.landed}/{drill.faults}",
        str(drill.restarts),
        "-" if drill.recovery_s is None else clock(drill.recovery_s),
        clock(drill.took_s),
    )


def _repeats(odd: "Iterable[DrillResult]") -> Iterable[str]:
    lines = []
    for drill in list(odd)[:MOST_REPEATED]:
        if drill.run is None:
            continue
        if command := repeat_command(drill.run, read_facts(drill.run)):
            lines.append(f"{shlex.join(command)}  # {drill.name}")
    if lines:
        yield fence("\n".join(lines), "sh")
