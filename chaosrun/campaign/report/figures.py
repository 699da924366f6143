"""The figures of a suite's page, as rows that its template draws: drills as expected, recovery times, one drill's nights.

Heights are in pixels, places across in percent."""

import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from chaosrun.report.html.page import WIDE, Scale, Shown, path_of, ticks
from chaosrun.wording import clock, count

if TYPE_CHECKING:
    from chaosrun.campaign.history import Night

TOP, FLOOR, HEIGHT = 12, 126, 150
"""Where what is drawn begins and ends, and all of a figure."""
LEAST_NIGHTS = 12
"""Places for so many: a bar of one night is not as wide as the figure."""


def rates(known: "Sequence[Night]") -> Shown | None:
    """A bar per night: all of its drills, and how many were as expected. None for nights without drills."""
    if not known:
        return None
    most = max(len(night.drills) for night in known)
    scale = Scale(0, most)
    bars = [
        {
            "said": f"{night.night}: {night.passed} of {len(night.drills)} as expected",
            "x": _share(known) * (place + 0.15),
            "width": _share(known) * 0.7,
            "well": _y(scale, night.passed),
            "all": _y(scale, len(night.drills)),
        }
        for place, night in enumerate(known)
    ]
    latest = known[-1]
    told = f"Drills as expected over {count(len(known), 'night')}, last {latest.passed} of {len(latest.drills)}"
    return _figure(known, scale, {value: str(value) for value in sorted({0, most})}, told) | {"bars": bars}


def recoveries(known: "Sequence[Night]") -> Shown | None:
    """Per night the drills' median, and the range from shortest to longest. None when no night had a restart."""
    found = [(place, night, night.recoveries) for place, night in enumerate(known) if night.recoveries]
    if not found:
        return None
    middles = [statistics.median(times) for *_, times in found]
    # One long hang must not flatten all other values.
    scale = Scale(0.0, min(max(times[-1] for *_, times in found), 4 * max(middles)))
    spans: list[Shown] = []
    for (place, night, times), middle in zip(found, middles, strict=True):
        over = count(len(times), "drill")
        spans.append(
            {
                "said": f"{night.night}: median {clock(middle)}, {clock(times[0])} to {clock(times[-1])} over {over}",
                "x": _share(known) * place,
                "width": _share(known),
                "at": _share(known) * (place + 0.5),
                "ends": (_y(scale, times[0]), _y(scale, times[-1])),
                "y": _y(scale, middle),
            }
        )
    line = [
        (WIDE * _share(known) * (place + 0.5) / 100, _y(scale, middle))
        for (place, *_), middle in zip(found, middles, strict=True)
    ]
    told = f"Recovery over {count(len(found), 'night')} with restarts, last median {clock(middles[-1])}"
    values = {value: f"{value:g} s" for value in ticks(0.0, scale.high, 3)}
    return _figure(known, scale, values, told) | {"spans": spans, "trend": path_of(line) if len(line) > 1 else ""}


def strip(drill: str, known: "Sequence[Night]") -> Shown:
    """A drill's nights, oldest first: whether it was as expected, None where it did not run."""
    oks = {night.night: night.drills[drill].ok if drill in night.drills else None for night in known}
    ran = [ok for ok in oks.values() if ok is not None]
    odd = [night for night, ok in oks.items() if ok is False]
    said = f"{sum(ran)} of {len(ran)} nights as expected" + (f", not on {', '.join(odd[-3:])}" if odd else "")
    return {"said": said, "nights": list(oks.values())}


def _share(known: "Sequence[Night]") -> float:
    """The share of the width that one night takes."""
    return 100 / max(len(known), LEAST_NIGHTS)


def _figure(known: "Sequence[Night]", scale: Scale, values: Mapping[float, str], told: str) -> dict[str, object]:
    """A figure with its values at the side, and the first and last night below; `told`: the same in words."""
    ends = list(dict.fromkeys((known[0].night, known[-1].night)))
    if len(known) < LEAST_NIGHTS:
        ends = [" to ".join(ends)]  # next to each other they would overlap
    labels = [(_y(scale, value), words) for value, words in values.items()]
    return {
        "height": HEIGHT,
        "floor": FLOOR,
        "labels": labels,
        "dates": list(enumerate(ends)),
        "ends": Scale(0, 1),
        "told": told,
    }


def _y(scale: Scale, value: float) -> float:
    return FLOOR - (FLOOR - TOP) * scale.at(value)
