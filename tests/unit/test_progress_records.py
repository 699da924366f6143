"""What is made something of in a journal's record, and what is refused."""

from typing import Any

import pytest

from chaosrun.report.progress import sound


@pytest.mark.parametrize("value", [0, 1.5, 10**300])
def test_a_finite_time_is_sound(value: Any) -> None:
    assert sound({"event": "leg.started", "time_s": value})


@pytest.mark.parametrize("value", ["1", None, float("nan"), float("inf"), -float("inf"), 10**400, -(10**400)])
def test_a_time_that_no_clock_shows_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="time_s is"):
        sound({"event": "leg.started", "time_s": value})
