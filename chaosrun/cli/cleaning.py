"""What a cleaning removed, or would: a line for each, what stays and why, and the room that it makes."""

import time
from collections import Counter
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from chaosrun.report.page import columns, unwrapped
from chaosrun.wording import count, size, span

if TYPE_CHECKING:
    from chaosrun.housekeeping.cleaning import Cleaning

DAY_S = 86400.0


def render_cleaning(cleaning: "Cleaning", *, short: bool = False) -> RenderableType:
    """`short`: the last line alone."""
    choice, parts = cleaning.choice, []
    if choice.removed and not short:
        table = columns("what", "name", "status", "age", "size", right=("age", "size"))
        now_s = time.time()
        for found, bytes_ in zip(choice.removed, cleaning.sizes, strict=True):
            table.add_row(found.kind, found.name, found.status, _age(max(0.0, now_s - found.used_s)), size(bytes_))
        parts += [table, ""]
    if not short:
        for (kind, why), number in Counter((kept.found.kind, kept.why) for kept in choice.kept).items():
            parts.append(Text(f"kept      {count(number, kind)}: {why}"))
        parts += [
            unwrapped(f"kept      {place}: nothing shows that these checkpoints are no other run's")
            for place in cleaning.spared
        ]
    parts.append(unwrapped(cleaning_sentence(cleaning)))
    return Group(*parts)


def cleaning_sentence(cleaning: "Cleaning") -> str:
    """What was removed, or would be, and how much room that makes."""
    counts = Counter(found.kind for found in cleaning.choice.removed)
    what = [count(number, kind) for kind, number in counts.items()]
    if cleaning.leftovers:
        what.append("what an earlier cleaning left")
    if not what:
        return f"there is nothing to remove under {cleaning.root}"
    return f"{'removed' if cleaning.done else 'to be removed'}: {', '.join(what)}, {size(cleaning.freed_bytes)}"


def _age(age_s: float) -> str:
    return span(age_s) if age_s < 2 * DAY_S else f"{age_s / DAY_S:.0f} days"
