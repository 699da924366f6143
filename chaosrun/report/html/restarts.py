"""What the restarts took: their recovery in phases, where each attempt went on, and what the leg's time went into."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from markupsafe import Markup

from chaosrun.report.html.drawing import Scale, beneath, join, rules, text, ticks
from chaosrun.report.html.source import Source
from chaosrun.verify.recovery_times import PHASES, RecoveryTimes, Work, recoveries_of, work_of
from chaosrun.wording import count, span

PHASE_MEANINGS = {
    "detect": "from the death, or a hang's last sign of life, until the supervisor knew",
    "stop": "until no process of the attempt was left",
    "start": "until the new ranks had built their training and turned to the checkpoint",
    "restore": "until the last rank held the saved state",
    "first_step": "until the first new step was recorded, DDP's buckets primed on the way",
}
ROW = 28.0
MOST_BARS = 30
MOST_ROWS = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarts:
    quarantined: Mapping[int, tuple[str, ...]]
    """By attempt, the checkpoints that were set aside before it."""
    times: tuple[RecoveryTimes, ...]
    bars: Markup | None
    axis: Markup
    height: float
    slowest_only: bool
    recovered: str
    """How long it took, in a sentence."""
    work: Work
    shares: Markup | None
    parts: tuple[tuple[int, str, float], ...]
    """What the wall time went into: colour, words, seconds."""


def restarts(source: Source) -> Restarts | None:
    """None without a chaos leg that began."""
    leg = source.chaos
    if not leg.history.attempts:
        return None
    times = recoveries_of(leg.history)
    work = work_of(leg.history, leg.chain)
    drawn = [recovery for recovery in times if recovery.total_s is not None]
    slowest = sorted(sorted(drawn, key=lambda entry: -(entry.total_s or 0.0))[:MOST_BARS], key=lambda entry: entry.attempt)
    parts = _parts(times, work)
    bars, axis, height = _bars(slowest)
    return Restarts(
        quarantined={attempt.number: attempt.quarantined for attempt in leg.history.attempts},
        times=times[:MOST_ROWS],
        bars=bars,
        axis=axis,
        height=height,
        slowest_only=len(slowest) < len(drawn),
        recovered=_recovered(times),
        work=work,
        shares=_shares(parts),
        parts=parts,
    )


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


def _bars(times: Sequence[RecoveryTimes]) -> tuple[Markup | None, Markup, float]:
    if not times:
        return None, Markup(""), 0.0
    scale = Scale(0.0, max(entry.total_s or 0.0 for entry in times) or 1.0)
    height = ROW * len(times)
    at = ticks(0.0, scale.high, 5)
    words = [f"{value:g}{' s' if number == len(at) - 1 else ''}" for number, value in enumerate(at)]
    drawn = [rules([height])]
    labels: list[Markup] = []
    for number, entry in enumerate(times):
        y = ROW * number
        labels.append(text("0", y + 18, f"attempt {entry.attempt}"))
        drawn.append(_stack(entry, scale, y + 5, first=number == 0))
    drawn.append(beneath(at, words, scale, height + 18))
    return join(drawn), join(labels), height + 24


def _stack(entry: RecoveryTimes, scale: Scale, y: float, *, first: bool) -> Markup:
    """Phases that are not known are one grey piece with their neighbours' rest."""
    total = entry.total_s or 0.0
    pieces: list[tuple[int, float]] = []
    unknown = total - sum(seconds for seconds in entry.phases.values() if seconds is not None)
    told = False
    for number, phase in enumerate(PHASES):
        seconds = entry.phases[phase]
        if seconds is not None:
            pieces.append((number, seconds))
        elif not told:
            told = True
            pieces.append((len(PHASES), max(0.0, unknown)))
    phases = [f"{phase.replace('_', ' ')} {_told(seconds)}" for phase, seconds in entry.phases.items()]
    label = f"Attempt {entry.attempt}: recovered in {span(total)}\n" + "\n".join(phases)
    left = 0.0
    boxes: list[Markup] = []
    for colour, seconds in pieces:
        boxes.append(_piece(colour, left, seconds, scale))
        left += seconds
    return Markup(
        '<svg class="mark" tabindex="{}" role="img" aria-label="{}" x="0" y="{:g}" width="100%" height="18" overflow="visible">'
        '<rect class="halo" x="-3" y="-3" width="{}" height="24" rx="3" transform="translate(0 0)"/>{}</svg>'
    ).format(0 if first else -1, label, y, scale.percent(total), join(boxes))


def _piece(colour: int, left: float, seconds: float, scale: Scale) -> Markup:
    width = 100 * scale.at(left + seconds) - 100 * scale.at(left)
    return Markup('<rect class="part p{}" x="{}" width="{:.3f}%" height="18"/>').format(colour, scale.percent(left), width)


def _told(seconds: float | None) -> str:
    return "not known" if seconds is None else span(seconds)


def _parts(times: Sequence[RecoveryTimes], work: Work) -> tuple[tuple[int, str, float], ...]:
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


def _shares(parts: Sequence[tuple[int, str, float]]) -> Markup | None:
    whole = sum(seconds for *_, seconds in parts)
    if not whole:
        return None
    scale, left, boxes = Scale(0.0, whole), 0.0, []
    for colour, _, seconds in parts:
        boxes.append(_piece(colour, left, seconds, scale))
        left += seconds
    return join(boxes)
