"""The account of a suite: one table of its drills, one of their losses beside each other, and whether all is as expected."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from chaosrun.report.page import columns, indented
from chaosrun.report.progress import count
from chaosrun.report.text import STYLES

if TYPE_CHECKING:
    from chaosrun.suite import DrillResult, SuiteResult
    from chaosrun.verify.divergence import Divergence

__all__ = ["render_suite"]


def render_suite(result: "SuiteResult", *, root: Path | None = None) -> RenderableType:
    """`root`: the --root that the user gave, to be repeated in the commands shown."""
    parts: list[RenderableType] = [Text(f"suite {result.name}", style="bold"), "", _drills(result.drills)]
    if result.compared:
        parts += ["", Text(f"Losses beside those of {result.first}", style="bold"), _compared(result)]
    if result.not_compared is not None:
        parts += ["", Text(f"The losses could not be compared: {result.not_compared}")]
    parts += ["", *_verdict(result)]
    where = [] if root is None else ["--root", str(root)]
    carried_out = [drill for drill in result.drills if drill.run is not None]
    width = max((len(drill.name) for drill in carried_out), default=0)
    for drill in carried_out:
        assert drill.run is not None
        command = shlex.join(["chaosrun", "verify", drill.run.run_id, *where])
        style = "bold" if drill.surprises else "dim"
        parts.append(Text(f"  {drill.name:<{width}}  {command}", style=style, no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _drills(drills: "Sequence[DrillResult]") -> RenderableType:
    table = columns("drill", "verdict", "expected", "first difference")
    for drill in drills:
        status = drill.verdict.status if drill.verdict else "not run"
        table.add_row(
            drill.name,
            Text(status, style=STYLES.get(status, "bold red")),
            Text("no", style="bold red") if drill.surprises else Text("yes", style="green"),
            _difference(drill),
        )
    return indented(table)


def _difference(drill: "DrillResult") -> str:
    if drill.verdict is None:
        return drill.error or "-"
    if drill.verdict.divergence is None:
        return "-" if drill.verdict.status == "PASS" else drill.verdict.cause
    return describe_divergence(drill.verdict.divergence)


def describe_divergence(found: "Divergence") -> str:
    """`data order at step 8, rank 0: expected [9], seen [3] (sampler epoch not set)`."""
    values = "" if found.kind != "data order" else f": expected samples {_ids(found.expected)}, seen {_ids(found.seen)}"
    return f"{found.kind} at step {found.step}, rank {found.rank}{values} ({found.cause})"


def _ids(value: Any) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, list | tuple) else str(value)


def _compared(result: "SuiteResult") -> RenderableType:
    table = columns("drill", "steps", "largest", "mean", "beyond the tolerance", "expected", right=("steps", "largest", "mean"))
    for entry in result.compared:
        found = entry.difference
        beyond = "no" if found.first_beyond is None else f"from step {found.first_beyond} on"
        table.add_row(
            f"{entry.name} (control)" if entry.control else entry.name,
            str(found.steps),
            f"{found.largest:.3g}",
            f"{found.mean:.3g}",
            beyond,
            Text("yes", style="green") if entry.as_expected else Text("no", style="bold red"),
        )
    return indented(table)


def _verdict(result: "SuiteResult") -> list[RenderableType]:
    if result.as_expected:
        return [Text(f"AS EXPECTED  {count(len(result.drills), 'drill')}", style="bold green")]
    lines: list[RenderableType] = [Text("NOT AS EXPECTED", style="bold red")]
    for drill in result.drills:
        lines += [Text(f"  {drill.name}: {surprise}") for surprise in drill.surprises]
    for entry in result.compared:
        if not entry.as_expected:
            what = "within the tolerance, a control must not be" if entry.control else "beyond the tolerance"
            lines.append(Text(f"  {entry.name}: losses {what}"))
    return lines
