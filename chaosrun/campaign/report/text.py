"""Sweeps, shrinks and suites on a terminal: what would run, the results, and the commands to repeat them."""

import shlex
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from chaosrun.campaign.files import SuitePlan, Sweep
from chaosrun.campaign.report.view import SuiteView, suite_view
from chaosrun.campaign.results import SuiteResult
from chaosrun.campaign.shrink import Shrunk
from chaosrun.records.grouping import grouped
from chaosrun.records.naming import root_arguments, run_arguments, shortest
from chaosrun.report.page import columns, indented, labelled, section, unwrapped
from chaosrun.report.text import STYLES
from chaosrun.wording import count

MOST_SHOWN = 20
"""Points that did not pass; sweep.json has all."""
ORDER = ("FAIL", "INCONCLUSIVE", "PASS", "left")
WIDEST_NAME = 40
WIDTH_BESIDE = 90
"""Columns that a table needs beside the drills' names to have a place for the differences."""
LABELS = {"new": "bold red", "still": "red", "fixed": "green", "flaky": "yellow"}


def render_sweep(sweep: Sweep, *, root: Path | None = None, quiet: bool = False) -> RenderableType:
    """Points that did not pass and how to repeat them, the phases, coverage, and the overall verdict. `root`: where it is kept;
    None for the default. `quiet`: the verdict alone."""
    took_s = sum(tried.took_s for tried in sweep.tried.values())
    drills = f"{count(len(sweep.tried), 'drill')}, {took_s / max(1, len(sweep.tried)):.2f} s each"
    label, style = sweep.status, STYLES[sweep.status]
    told = f"{drills}: {_counted(tried.status for tried in sweep.tried.values()).plain}"
    if sweep.status == "PASS" and sweep.left:
        label, style, told = "NOT DONE", "bold yellow", f"{drills}, all PASS; {count(len(sweep.left), 'point')} left"
    if quiet:
        return unwrapped(f"{label}  {sweep.sweep_id}: {told}")
    where = () if root is None else root_arguments(root)
    about = f"{sweep.job}, {count(sweep.workers, 'worker')}, {count(sweep.final_step, 'step')}"
    parts: list[RenderableType] = [unwrapped(f"sweep {sweep.sweep_id}  {about}", style="bold")]
    bad = [(point, tried) for point in sweep.points if (tried := sweep.tried.get(point.id)) and tried.status != "PASS"]
    bad.sort(key=lambda pair: ORDER.index(pair[1].status))
    if bad:
        parts += section(f"Not passed: {count(len(bad), 'point')}", None)
    for point, tried in bad[:MOST_SHOWN]:
        repeat = shlex.join(["chaosrun", "submit", sweep.job, *sweep.overrides_of(point), *where])
        parts += [
            Text.assemble((f"  {tried.status}", STYLES[tried.status]), f"  {point.id}  {tried.cause}"),
            unwrapped(f"    {repeat}", style="dim"),
        ]
    if len(bad) > MOST_SHOWN:
        parts.append(Text(f"  and {len(bad) - MOST_SHOWN} more: chaosrun sweep … -o json"))
    parts += section(f"Points: {len(sweep.points)}, one drill each", _phases(sweep))
    places = {point.place for point in sweep.points}
    reached = [point for point in sweep.points if point.id in sweep.tried and sweep.tried[point.id].reached]
    coverage = (
        f"{len(reached)} of {len(sweep.points)} points reached, {len({point.place for point in reached})} of {len(places)} "
        f"places (phase, rank, file); the job reaches {sweep.passages} points in all"
    )
    parts += ["", labelled("coverage", coverage), labelled(label, told, style=style)]
    if sweep.left:
        resume = shlex.join(["chaosrun", "sweep", sweep.job, "--resume", sweep.sweep_id, *where])
        parts.append(labelled("resume", resume, wrap=False))
    return Group(*parts)


def _phases(sweep: Sweep) -> RenderableType:
    table = columns("phase", "steps", "ranks", "files", "reached", "verdicts", right=("files", "reached"))
    table.columns[0].no_wrap = True
    for (recovering, phase), points in grouped(sweep.points, lambda point: (point.recovering, point.phase)).items():
        files = {point.target for point in points} - {None}
        tried = [sweep.tried.get(point.id) for point in points]
        table.add_row(
            f"recovery/{phase}" if recovering else phase,
            "-" if phase == "rendezvous" else ",".join(map(str, sorted({point.step for point in points}))),
            ",".join(map(str, sorted({point.rank for point in points}))),
            str(len(files)) if files else "-",
            f"{sum(entry is not None and entry.reached for entry in tried)}/{len(points)}",
            _counted("left" if entry is None else entry.status for entry in tried),
        )
    return indented(table)


def _counted(statuses: Iterable[str]) -> Text:
    counts = Counter(statuses)
    return Text(", ").join(Text(f"{counts[name]} {name}", STYLES.get(name, "")) for name in ORDER if counts[name])


def render_shrunk(shrunk: Shrunk) -> RenderableType:
    """How far the shrink came, the remaining part of a job file, and the command that shows the failure."""
    _, *where = run_arguments(shrunk.run)
    refused = f", {count(shrunk.refused, 'plan')} that cannot be" if shrunk.refused else ""
    tried = f"{count(shrunk.drills, 'drill')}{refused}"
    head = unwrapped(f"shrink of run {shrunk.run.run_id}: {shrunk.symptom or 'no verdict'}", style="bold")
    if shrunk.verified is None:
        then = "had no verdict" if shrunk.symptom is None else f"failed with {shrunk.symptom}"
        cause = f"the run {then}, its plan repeated ends with {shrunk.seen or 'no failure'}"
        hint = "a failure that comes and goes cannot be shrunk: `chaosrun submit` it a few times to see how often it comes"
        return Group(head, "", labelled("not again", cause, style="bold yellow"), labelled("hint", hint))
    left = f"{count(shrunk.faults, 'fault')} to {len(shrunk.schedule)} in {tried}"
    parts: list[RenderableType] = [head, "", unwrapped(shrunk.fragment.rstrip()), ""]
    if shrunk.smallest:
        parts.append(labelled("shrunk", f"{left}; nothing more can be left out", style="bold green"))
    else:
        parts.append(labelled("shrunk", f"{left}, when no more were allowed (--max-drills)", style="bold yellow"))
    if shrunk.seen == shrunk.symptom:
        parts.append(labelled("verified", f"run {shrunk.verified.run_id}: {shrunk.seen}"))
    else:
        said = f"run {shrunk.verified.run_id} of it ends with {shrunk.seen or 'no failure'}: it comes and goes"
        parts.append(labelled("NOT SHOWN", said, style="bold yellow"))
    parts.append(labelled("written", str(shrunk.path), wrap=False))
    parts.append(labelled("repeat", shlex.join(["chaosrun", "submit", shrunk.job, *shrunk.overrides, *where]), wrap=False))
    return Group(*parts)


def render_plan(plan: SuitePlan) -> RenderableType:
    table = columns("drill", "expected", "workers", "faults", "what", "seed", right=("workers", "faults", "seed"))
    for column in table.columns:
        column.no_wrap = column.header not in ("drill", "what")
    for drill in plan.drills:
        numbers = map(str, (drill.workers, drill.faults))
        table.add_row(drill.name, drill.expect.verdict, *numbers, ", ".join(drill.kinds), str(drill.seed))
    part = "" if plan.shard is None else f", shard {plan.shard}"
    seed = "" if plan.seed is None else f", seed {plan.seed}"
    faults = count(sum(drill.faults for drill in plan.drills), "fault")
    title = Text(f"suite {plan.name}: {count(len(plan.drills), 'drill')}, {faults}{part}{seed}", style="bold")
    return Group(title, "", indented(table), *map(Text, plan.notes))


def render_suite(result: SuiteResult, *, quiet: bool = False) -> RenderableType:
    """Its drills, those not as expected, and how to look closer. `quiet`: the outcome alone, on one line."""
    view = suite_view(result)
    if quiet:
        return unwrapped(f"{view.words.upper()}  {result.name} {result.night}: {view.headline}")
    seed = "" if result.seed is None else f", seed {result.seed} (--seed {result.seed} draws the same faults again)"
    parts: list[RenderableType] = [Text(f"suite {result.name}  {result.night}{seed}", style="bold")]
    if view.drills:
        parts += ["", _Drills(view)]
    if view.losses:
        parts += ["", Text(f"Losses beside those of {result.first}", style="bold"), indented(_losses(view))]
    if result.not_compared is not None:
        parts += ["", Text(f"The losses could not be compared: {result.not_compared}")]
    style = "bold" if result.empty else "bold green" if result.as_expected else "bold red"
    parts += ["", Text(f"{view.words.upper()}  {view.headline}", style=style)]
    if not result.empty:
        parts += [Text(f"  {sentence}") for sentence in view.unexpected]
    return Group(*parts, *[Text(f"note: {note}") for note in result.notes], *_commands(view))


@dataclass(frozen=True, slots=True)
class _Drills:
    """One line per drill where the terminal is wide enough; else the differences follow on their own lines."""

    view: SuiteView

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        names = max(len(row.name) for row in self.view.drills)
        wide = options.max_width >= min(names, WIDEST_NAME) + WIDTH_BESIDE
        yield indented(self._table(wide=wide))
        for row in self.view.drills:
            if not wide and row.told:
                yield Text(f"  {row.name}: {row.told}", style="dim" if row.ok else "")

    def _table(self, *, wide: bool) -> Table:
        numbers = ("faults", *(["restarts"] if wide else []), "recovery", "time")
        titles = ["drill", "verdict", "expected", *(["first difference or cause"] if wide else []), *numbers]
        table = columns(*titles, right=numbers)
        for column in table.columns:
            column.no_wrap = column.header != ("first difference or cause" if wide else "drill")
        for row in self.view.drills:
            expected = Text(row.expected, style="green" if row.ok else "bold red")
            if row.rerun is not None:
                expected.append(" (again)", style="dim")
            if row.label is not None:
                expected.append(f" ({row.label})", style=LABELS[row.label])
            table.add_row(
                row.name,
                Text(row.status, style=STYLES.get(row.status, "bold red")),
                expected,
                *([row.told or "-"] if wide else []),
                row.faults,
                *([row.restarts] if wide else []),
                row.recovery,
                row.time,
            )
        return table


def _losses(view: SuiteView) -> Table:
    table = columns("drill", "steps", "largest", "mean", "beyond the tolerance", "expected", right=("steps", "largest", "mean"))
    for row in view.losses:
        ok = Text("yes", style="green") if row.ok else Text("no", style="bold red")
        table.add_row(row.name, row.steps, row.largest, row.mean, row.beyond, ok)
    return table


def _commands(view: SuiteView) -> list[RenderableType]:
    """Commands to look closer: at unexpected drills first, at all drills if there are few."""
    shown = [(row, row.look) for row in view.drills if row.look is not None]
    width = max((len(row.name) for row, _ in shown), default=0)
    lines: list[RenderableType] = [
        unwrapped(f"  {row.name:<{width}}  {look.line}", style="dim" if row.ok else "bold") for row, look in shown
    ]
    if view.result.path is not None:
        lines.append(unwrapped(f"  page: {shortest(view.result.path / 'index.html')}", style="dim"))
    return lines
