"""What the restarts took: their recovery in phases, where each attempt went on, and what the leg's time went into."""

from collections.abc import Sequence
from statistics import median

from chaosrun.report.html.page import Shown
from chaosrun.report.html.source import Source
from chaosrun.verify.recovery_times import RecoveryTimes, Work, recoveries_of, work_of
from chaosrun.wording import count, span

PHASE_MEANINGS = {
    "detect": "from the death, or a hang's last sign of life, until the supervisor knew",
    "stop": "until no process of the attempt was left",
    "start": "until the new ranks had built their training and turned to the checkpoint",
    "restore": "until the last rank held the saved state",
    "first_step": "until the first new step was recorded, DDP's buckets primed on the way",
}
MOST_ROWS = 300
Piece = tuple[int, str, float]
"""Of a bar: colour, words, seconds."""


def restarts(source: Source) -> Shown | None:
    """`times`: of each recovery; `parts`: what the wall time went into. None without a chaos leg that began."""
    leg = source.chaos
    if not leg.history.attempts:
        return None
    times, work = recoveries_of(leg.history), work_of(leg.history, leg.chain)
    return {
        "quarantined": {attempt.number: attempt.quarantined for attempt in leg.history.attempts},
        "times": times[:MOST_ROWS],
        "recovered": _recovered(times),
        "work": work,
        "parts": _parts(times, work),
    }


def _recovered(times: Sequence[RecoveryTimes]) -> str:
    known = sorted((entry.total_s, entry.attempt) for entry in times if entry.total_s is not None)
    restarted = count(len(times), "restart")
    if not known:
        return f"{restarted}, of which none came to a first step that could be timed."
    unknown = "" if len(known) == len(times) else f" {count(len(times) - len(known), 'restart')} never came to a first step."
    if len(known) == 1:
        return f"{restarted}: {span(known[0][0])} from the end of the attempt to the next first step.{unknown}"
    middle = median(total_s for total_s, _ in known)
    worst = known[-1]
    return f"{restarted}: {span(middle)} in the median, {span(worst[0])} at worst (attempt {worst[1]}).{unknown}"


def _parts(times: Sequence[RecoveryTimes], work: Work) -> tuple[Piece, ...]:
    if not work.wall_s:
        return ()
    # A recovery's first step is work: it is among the steps that were kept, or lost again.
    down_s = sum(
        seconds for entry in times for phase, seconds in entry.phases.items() if phase != "first_step" and seconds is not None
    )
    rest_s = work.wall_s - work.kept_s - work.lost_s - down_s
    found = [
        (3, "steps that count", work.kept_s),
        (0, "steps done for nothing", work.lost_s),
        (1, "down: from a death until the state was back", down_s),
        (5, "the rest: first start, and the end", max(0.0, rest_s)),
    ]
    return tuple(part for part in found if part[2] > 0)
