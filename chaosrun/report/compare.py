"""The losses of runs beside each other: one line a run, what tells the runs apart, and whether all lie within the tolerance."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from chaosrun.report.page import columns, section, unwrapped
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.verify.trajectory import ComparedRun, Comparison, Difference

LEGS = {"reference": "undisturbed", "chaos": "under faults"}


def render_comparison(found: "Comparison") -> RenderableType:
    first, others = found.runs[0], found.runs[1:]
    parts = section(f"Losses {LEGS[found.leg]}, beside those of {first.run_id}", _table(found.runs))[1:]
    if any(run.changes for run in found.runs):
        parts += section("Changes to the job file", None)
        # On one line however long, to be told apart and copied.
        parts += [unwrapped(f"  {run.run_id}  {' '.join(run.changes)}".rstrip()) for run in found.runs]
    far = [run for run in others if not run.difference.within]
    if far:
        verdict = Text(f"BEYOND    {len(far)} of {count(len(others), 'run')} by more than {found.atol:g}", style="bold red")
    else:
        verdict = Text(f"WITHIN    {found.atol:g} at every step: {count(len(others), 'run')}", style="bold green")
    return Group(*parts, "", verdict)


def _table(runs: "Sequence[ComparedRun]") -> Table:
    table = columns("run", "workers", "steps", "largest", "mean", "first beyond", right=("workers", "steps", "largest", "mean"))
    table.columns[0].no_wrap = True
    for number, run in enumerate(runs):
        found = run.difference
        distances = ("-", "-", "the first") if number == 0 else (f"{found.largest:.3g}", f"{found.mean:.3g}", _beyond(found))
        table.add_row(run.run_id, str(run.workers), str(found.lengths[1]), *distances)
    return table


def _beyond(found: "Difference") -> str:
    if found.first_beyond is None:
        return "never"
    if found.first_beyond > found.steps:
        return f"step {found.first_beyond}: missing"
    return f"step {found.first_beyond}: {found.seen:.7g}, not {found.expected:.7g}"
