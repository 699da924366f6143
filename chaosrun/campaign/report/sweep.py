"""The account of a sweep: what did not pass and how to repeat it, one table of the phases, coverage, and the verdict on all."""

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from chaosrun.records.naming import root_arguments
from chaosrun.report.page import columns, indented, labelled, section, unwrapped
from chaosrun.report.text import STYLES
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.campaign.sweep_file import PointResult, Sweep
    from chaosrun.plan.points import Point

MOST_SHOWN = 20
"""Points that did not pass; sweep.json has all."""
ORDER = ("FAIL", "INCONCLUSIVE", "PASS", "left")


def render_sweep(sweep: "Sweep", *, root: Path | None = None) -> RenderableType:
    """`root`: where it is kept; None for the usual place."""
    about = f"{sweep.job}, {count(sweep.workers, 'worker')}, {count(sweep.final_step, 'step')}"
    parts: list[RenderableType] = [unwrapped(f"sweep {sweep.sweep_id}  {about}", style="bold")]
    bad = [(point, tried) for point in sweep.points if (tried := sweep.tried.get(point.id)) and tried.status != "PASS"]
    bad.sort(key=lambda pair: ORDER.index(pair[1].status))
    if bad:
        parts += section(f"Not passed: {count(len(bad), 'point')}", None)
        for point, tried in bad[:MOST_SHOWN]:
            parts += _failure(sweep, point, tried, root)
        if len(bad) > MOST_SHOWN:
            parts.append(Text(f"  and {len(bad) - MOST_SHOWN} more: chaosrun sweep … -o json"))
    parts += section(f"Points: {len(sweep.points)}, one drill each", _table(sweep))
    parts += ["", labelled("coverage", _coverage(sweep)), _verdict(sweep)]
    if sweep.left:
        resume = ["chaosrun", "sweep", sweep.job, "--resume", sweep.sweep_id, *_where(root)]
        parts.append(labelled("go on", shlex.join(resume), wrap=False))
    return Group(*parts)


def _failure(sweep: "Sweep", point: "Point", tried: "PointResult", root: Path | None) -> list[RenderableType]:
    repeat = ["chaosrun", "submit", sweep.job, *sweep.overrides_of(point), *_where(root)]
    said = Text(f"  {tried.status}", style=STYLES[tried.status])
    said.append(f"  {point.id}  {tried.cause}", style="")
    return [said, unwrapped(f"    {shlex.join(repeat)}", style="dim")]


def _table(sweep: "Sweep") -> RenderableType:
    table = columns("phase", "steps", "ranks", "files", "reached", "verdicts", right=("files", "reached"))
    table.columns[0].no_wrap = True
    groups: dict[tuple[bool, str], list[Point]] = {}
    for point in sweep.points:
        groups.setdefault((point.recovering, point.phase), []).append(point)
    for (recovering, phase), points in groups.items():
        files = {point.target for point in points} - {None}
        tried = [sweep.tried[point.id] for point in points if point.id in sweep.tried]
        table.add_row(
            f"recovery/{phase}" if recovering else phase,
            "-" if phase == "rendezvous" else _listed(point.step for point in points),
            _listed(point.rank for point in points),
            str(len(files)) if files else "-",
            f"{sum(entry.reached for entry in tried)}/{len(points)}",
            _counted(points, sweep),
        )
    return indented(table)


def _counted(points: "Sequence[Point]", sweep: "Sweep") -> Text:
    counts = Counter(sweep.tried[point.id].status if point.id in sweep.tried else "left" for point in points)
    text = Text()
    for status in ORDER:
        if counts[status]:
            text.append(", " if text else "").append(f"{counts[status]} {status}", style=STYLES.get(status, ""))
    return text


def _coverage(sweep: "Sweep") -> str:
    places = {point.place for point in sweep.points}
    reached = {point.place for point in sweep.points if point.id in sweep.tried and sweep.tried[point.id].reached}
    return (
        f"{sweep.reached} of {len(sweep.points)} points reached, {len(reached)} of {len(places)} places (phase, rank, file); "
        f"the job comes by {sweep.passages} points in all"
    )


def _verdict(sweep: "Sweep") -> RenderableType:
    took_s = sum(tried.took_s for tried in sweep.tried.values())
    drills = f"{count(len(sweep.tried), 'drill')}, {took_s / max(1, len(sweep.tried)):.2f} s each"
    seen = {tried.status for tried in sweep.tried.values()}
    status = next((status for status in ORDER[:2] if status in seen), "PASS")
    if status == "PASS" and sweep.left:
        return labelled("NOT DONE", f"{drills}, all PASS; {count(len(sweep.left), 'point')} left", style="bold yellow")
    counts = Counter(tried.status for tried in sweep.tried.values())
    told = ", ".join(f"{counts[name]} {name}" for name in ORDER if counts[name])
    return labelled(status, f"{drills}: {told}", style=STYLES[status])


def _listed(numbers: Iterable[int]) -> str:
    return ",".join(map(str, sorted(set(numbers))))


def _where(root: Path | None) -> tuple[str, ...]:
    return () if root is None else root_arguments(root)
