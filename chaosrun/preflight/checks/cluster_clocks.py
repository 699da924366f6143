"""Do the nodes' clocks agree? Pure.

A clock is known between two bounds only: whoever asks knows no more than when he asked and when the answer came (Cristian,
Probabilistic clock synchronization, 1989). What the uncertainty could explain is held against nobody, and what it could hide is
no PASS.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

from chaosrun.preflight.model import Finding, Rows, Status

ROWS = Rows(check="cluster")

NAME = "clock"
WARN_S = 0.1
"""Events of different nodes can no longer be put in order."""
FAIL_S = 1.0
"""More than any clock that is set by the network is off: nothing sets this one."""
SURE_S = 0.2
"""A clock that may be further off than this is not known well enough: processes take a moment to start."""
REMEDY = "have chrony or another NTP client set the clock there, then try again"


def clocks(bounds: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """`bounds` (low, high), by node: how far its clock is ahead of the one that asked, in seconds."""
    if len(bounds) < 2:
        why = "one node: nothing to compare with"
        yield from (ROWS.skip(why, name=NAME, node=node) for node in bounds)
    elif len(bounds) == 2:
        yield from _of_two(bounds)
    else:
        # The true median lies between the medians of all lower and of all upper bounds.
        least, most = (median(pair[index] for pair in bounds.values()) for index in (0, 1))
        for node, (low, high) in bounds.items():
            yield replace(_judged(low - most, high - least, "the median of all nodes"), node=node)


def _of_two(bounds: Mapping[str, Sequence[float]]) -> Iterator[Finding]:
    """They are compared with each other: nothing says which is right."""
    (one, (low, high)), (other, (other_low, other_high)) = bounds.items()
    found = _judged(low - other_high, high - other_low, other)
    if found.status in (Status.WARN, Status.FAIL):
        reason = "nothing says which of the two is right"
        remedy = "have chrony or another NTP client set both clocks, then try again"
        yield replace(found, measured=f"{one}: {found.measured} of {other}", blames=(one, other), reason=reason, remedy=remedy)
        return
    yield replace(found, node=one)
    yield replace(_judged(other_low - high, other_high - low, one), node=other)


def _judged(low_s: float, high_s: float, of: str) -> Finding:
    offset_s, bound_s = (low_s + high_s) / 2, (high_s - low_s) / 2
    surely_s = abs(offset_s) - bound_s
    status = Status.FAIL if surely_s > FAIL_S else Status.WARN if surely_s > WARN_S else Status.PASS
    if status is Status.PASS and abs(offset_s) + bound_s > SURE_S:
        why = f"its clock is known to ± {bound_s:.2g} s only ({abs(offset_s):.2g} s from {of}): the node was slow to answer"
        return ROWS.skip(why, name=NAME)
    return ROWS.row(
        status,
        f"{abs(offset_s):.3g} s {'ahead' if offset_s > 0 else 'behind'} (± {bound_s:.2g} s)",
        f"at most {WARN_S:g} s from {of}",
        name=NAME,
        remedy="" if status is Status.PASS else REMEDY,
    )
