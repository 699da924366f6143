"""A straggler's steps are as long as it says, or its note says that they were not."""

import time
from typing import Any, cast

import pytest

from chaosrun.faults.stalls import SlowNote, slow
from chaosrun.faults.strike import Pace, Strike


class Notes:
    """What of a strike is used."""

    def __init__(self, pace: Pace, **options: Any) -> None:
        self.pace = pace
        self.options = options
        self.written: list[SlowNote] = []

    def option(self, name: str) -> Any:
        return self.options[name]

    def note(self, note: SlowNote) -> None:
        self.written.append(note)


def make(pace: Pace, steps: int) -> None:
    for _ in range(steps):
        pace.begin()
        time.sleep(0.005)
        pace.step_done()


def stretch(pace: Pace, *, factor: float, steps: int) -> Notes:
    notes = Notes(pace, factor=factor, steps=steps)
    slow(cast(Strike, notes))
    return notes


def test_steps_are_stretched_for_as_long_as_asked() -> None:
    pace = Pace()
    make(pace, 3)
    notes = stretch(pace, factor=4.0, steps=2)
    make(pace, 1)
    assert (notes.written[-1].final, notes.written[-1].problem) == (False, "only 1 of 2 steps were stretched")
    make(pace, 3)
    last = notes.written[-1]
    assert len(notes.written) == 3, "steps after the last stretched one are nothing to tell of"
    assert (last.final, last.steps, last.problem) == (True, 2, None)
    assert last.during_s is not None and last.before_s is not None
    assert last.during_s >= 4 * last.before_s >= 4 * 0.005


def test_a_rank_that_made_no_step_cannot_be_slowed() -> None:
    notes = stretch(Pace(), factor=2.0, steps=1)
    assert notes.written == [SlowNote(problem="no step was timed before it")]


def test_a_step_that_was_not_stretched_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pace = Pace()
    make(pace, 3)
    notes = stretch(pace, factor=4.0, steps=1)
    real_sleep = time.sleep
    monkeypatch.setattr("chaosrun.faults.stalls.time.sleep", lambda seconds: None)
    pace.begin()
    pace.step_done()
    monkeypatch.setattr("chaosrun.faults.stalls.time.sleep", real_sleep)
    assert "not 4 times" in str(notes.written[-1].problem)
