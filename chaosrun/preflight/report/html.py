"""The account of a preflight as one page that loads nothing: what the terminal says, folded in the same way, and how the
numbers of all nodes lie beside each other."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from chaosrun.preflight.model import Finding, Status, worst
from chaosrun.preflight.report.account import (
    WHOLE,
    Group,
    Standing,
    about,
    cluster_statuses,
    commands,
    counted,
    groups,
    groups_named,
    headline,
    problems,
    short,
    skips,
    wheres,
    whole_title,
)
from chaosrun.preflight.report.names import brief, in_order
from chaosrun.preflight.report.numbers import MeasureRow, measures, whole_values
from chaosrun.preflight.result import Result
from chaosrun.report.html.page import environment
from chaosrun.wording import clock

TEMPLATES = Path(__file__).parent / "templates"
PLACES = 60
"""Where a value may stand in a strip: however many nodes there are, it stays as large as these."""
HIGH = 14
LONGEST_NAMES = 160


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRow:
    title: str
    nodes: tuple[str, ...]
    """All of them, where the title does not say which they are."""
    statuses: tuple[Status | None, ...]
    standing: Standing


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckRow:
    name: str
    about: str
    status: Status
    counts: str
    seconds: float
    share: float
    """Of the longest check, in percent."""


def render_html(result: Result, *, good_file: str | None = None) -> str:
    """The whole page. `good_file`: where the names of the good nodes were written."""
    nodes = len(result.nodes)
    return (
        environment(TEMPLATES)
        .get_template("preflight.html")
        .render(
            result=result,
            words="FIT" if result.fit else "NOT FIT",
            headline=headline(result),
            about=about(result),
            counted=counted(result),
            wrong=problems(result, Status.FAIL, Status.ERROR),
            doubts=problems(result, Status.WARN),
            skips=skips(result),
            found_in=lambda problem: wheres(problem, nodes, LONGEST_NAMES),
            place=lambda place: short(place, nodes, LONGEST_NAMES),
            groups=_groups(result),
            checks=_checks(result),
            values=whole_values(result),
            measures=[(row, _strip(row)) for row in measures(result)],
            against=[(name, _titles(result, found)) for name, found in result.bad().items()],
            good=in_order(result.good),
            brief=brief,
            commands=commands(result, good_file),
            clock=clock,
        )
    )


def _groups(result: Result) -> list[GroupRow]:
    found = groups(result)
    titles = groups_named(found, len(result.nodes), LONGEST_NAMES)
    rows = [_group(title, group) for title, group in zip(titles, found, strict=True)]
    whole = cluster_statuses(result)
    if whole is not None:
        rows.append(GroupRow(title=WHOLE, nodes=(), statuses=whole, standing="good"))
    return rows


def _group(title: str, group: Group) -> GroupRow:
    told = brief(group.nodes, LONGEST_NAMES) in title and " more" not in title
    return GroupRow(title=title, nodes=() if told else group.nodes, statuses=group.statuses, standing=group.standing)


def _checks(result: Result) -> list[CheckRow]:
    found: dict[str, list[Finding]] = {}
    for finding in result.findings:
        found.setdefault(finding.check, []).append(finding)
    longest = max((run.seconds for run in result.checks), default=0.0) or 1.0
    rows = []
    for run in result.checks:
        counts = Counter(each.status for each in found.get(run.name, ()))
        rows.append(
            CheckRow(
                name=run.name,
                about=run.about,
                status=worst(list(counts)),
                counts=", ".join(f"{counts[status]} {status}" for status in reversed(Status) if counts[status]),
                seconds=run.seconds,
                share=100 * run.seconds / longest,
            )
        )
    return rows


def _titles(result: Result, findings: Sequence[Finding]) -> list[str]:
    return list(dict.fromkeys(whole_title(result, each) for each in findings))


def _strip(row: MeasureRow) -> Markup:
    """All the values on a line from bad to good: the worst one red, a long stroke for the median."""
    if row.number < 2:
        return Markup("")
    low, high = row.numbers[0], row.numbers[-1]
    middle = row.numbers[len(row.numbers) // 2]

    def at(number: float) -> int:
        return round(PLACES * (number - low) / (high - low)) if high != low else PLACES // 2

    places = sorted({at(number) for number in row.numbers[1:]} | {at(middle)})
    path = "".join(
        f"M{2 * place + 3} {0 if place == at(middle) else 4}V{HIGH if place == at(middle) else HIGH - 4}" for place in places
    )
    words = f"{row.number} values, from bad to good: worst {row.worst}, median {row.median}"
    return Markup(
        '<svg class="values" width="{}" height="{}" role="img" aria-label="{}"><path class="value" d="{}"/>'
        '<path class="worst" d="M{} 2V{}"/></svg>'
    ).format(2 * PLACES + 6, HIGH, words, path, 2 * at(low) + 3, HIGH - 2)
