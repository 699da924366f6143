"""Whether a live drill has come to a moment that a command waits for. Reads its files alone."""

from collections.abc import Callable

from chaosrun.records.events import AttemptStarting
from chaosrun.records.layout import RunLayout
from chaosrun.records.supervision import read_supervision
from chaosrun.report.follow import RunFollower


def has_come(run: RunLayout, *, attempt: int, step: int) -> Callable[[], bool]:
    """Answers, each time anew, whether attempt `attempt` of the chaos leg has begun and a rank has completed `step`."""
    follower = RunFollower(run, legs=(run.main,))

    def has_come() -> bool:
        follower.poll()
        seen, leg = read_supervision(run), follower.picture.legs.get(run.main)
        if seen is None or leg is None or leg.attempt < attempt or leg.reached < step:
            return False
        # Not those of a supervisor before this one: it has yet to open the leg, and would refuse a fault.
        return any(begun.time_s >= seen.began_s for begun in leg.history.events(AttemptStarting))

    return has_come
