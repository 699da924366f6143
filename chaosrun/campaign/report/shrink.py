"""The account of a shrink: how far it came, the part of a job file that is left, and what to type to see it fail."""

import shlex
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType

from chaosrun.records.naming import run_arguments
from chaosrun.report.page import labelled, unwrapped
from chaosrun.wording import count

if TYPE_CHECKING:
    from chaosrun.campaign.shrink import Shrunk


def render_shrunk(shrunk: "Shrunk") -> RenderableType:
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
