"""Where an attempt stands, by what it begins with: pure, on traces made by hand."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from chaosrun.observe.resumed_at import RankStart, find
from chaosrun.protocol import earlier_traces
from chaosrun.records.layout import LegLayout
from chaosrun.records.trace_reader import TraceMoment
from chaosrun.records.traces import NEAREST


def moment(step: int, last: int, **changes: object) -> TraceMoment:
    after = {"rates_after": (f"r{step + 1}",), "rng_after": f"g{step}", "data_after": f"d{step % 6}"} if step < last else {}
    about = {"weights": f"w{step}", "optimizer": f"o{step}", "rates": (f"r{step}",) if step else None, **after}
    return TraceMoment(step=step, **{**about, **changes})


TRACE = [moment(step, 20) for step in range(21)]


def standing(step: int, **changes: object) -> RankStart:
    about = {"weights": f"w{step}", "optimizer": f"o{step}", "rates": (f"r{step + 1}",), "rng": f"g{step}"}
    return RankStart(**{**about, "data": f"d{step % 6}", **changes})


def test_a_step_that_agrees_in_everything_though_its_data_come_again():
    place = find(standing(10), TRACE)
    assert (place.step, place.found.step) == (10, 10)
    assert place.found.data == (4, 10, 16) and place.found.weights == (10,)


def test_optimizers_that_step_together_are_known_as_far_as_the_place():
    by_turns = [TRACE[0], *(replace(each, stepped=("A", "B") if each.step % 2 else ("C",)) for each in TRACE[1:12])]
    by_turns += [replace(each, stepped=("A",)) for each in TRACE[12:]]
    known = [find(standing(step), by_turns).together for step in (0, 10, 12)]
    assert known == [{}, {"A": 2, "C": 1}, {"A": 1, "C": 1}]


def test_streams_before_the_first_pass_after_a_save_inside_a_step_are_right():
    within = [replace(each, rng_within="within") if each.step == 10 else each for each in TRACE]
    assert find(standing(10, rng="within"), within).found.step == 10
    assert find(standing(10, rng="within"), TRACE).found.rng == ()


def test_the_beginning():
    assert find(standing(0), TRACE).found.step == 0


def test_each_quantity_that_is_of_another_step_is_named():
    place = find(standing(10, optimizer="o0"), TRACE)
    assert (place.step, place.found.step, place.found.optimizer, place.found.weights) == (10, None, (0,), (10,))
    place = find(standing(10, data="d2"), TRACE)
    assert (place.step, place.found.step, place.found.data) == (10, None, (2, 8, 14))


def test_weights_that_a_warm_up_from_zero_leaves_as_they_are_name_no_step_alone():
    still = [replace(each, weights="w0") if each.step in (1, 2) else each for each in TRACE]
    assert find(standing(2, weights="w0"), still).found.step == 2
    assert find(standing(0), still).found.step == 0


def test_without_weights_the_data_number_the_attempt_and_without_them_the_optimizer():
    assert find(standing(3, weights="?"), TRACE).step == 3
    assert find(standing(3, weights="?", data="d0", rng="?", optimizer="o12"), TRACE).step == 12
    assert find(standing(3, weights="?", data="?"), TRACE).step == 3
    lost = find(standing(3, weights="?", data="?", optimizer="?"), TRACE)
    assert (lost.step, lost.found.step, lost.found.rng) == (0, None, (3,))


def test_data_of_the_beginning_do_not_outweigh_an_optimizer_that_was_restored():
    other_each_epoch = [replace(each, data_after=each.data_after and f"e{each.step}") for each in TRACE]
    assert find(standing(12, weights="?", data="e0", rng="?"), other_each_epoch).step == 12
    assert find(standing(12, weights="?", data="e5", rng="?"), other_each_epoch).step == 5
    assert find(standing(12, weights="?", data="e0", rng="?", optimizer="?"), other_each_epoch).step == 0
    idle = [replace(each, optimizer="none") for each in other_each_epoch]
    assert find(standing(12, weights="?", data="e0", optimizer="none"), idle).step == 0


def test_rates_that_are_set_after_the_forward_pass_are_still_those_of_the_step_before():
    assert find(standing(10, rates=("r10",)), TRACE).found.step == 10
    assert find(standing(10, rates=("r9",)), TRACE).found.step is None


def test_rates_as_they_were_built_are_the_beginnings_though_a_later_step_has_them_too():
    warmed = [replace(moment(0, 20), rates=("r9",)), *TRACE[1:]]
    place = find(standing(0, rates=("r9",)), warmed)
    assert (place.step, place.found.step, place.found.rates) == (0, 0, (0, 8, 9))
    assert find(standing(12, rates=("r9",)), warmed).found.step is None


def test_an_attempt_that_ended_at_once_is_judged_by_its_state_alone():
    place = find(standing(20, rates=None, rng=None, data=None), TRACE)
    assert (place.step, place.found.step) == (20, 20)
    assert find(standing(20, rates=None, rng=None, data=None, optimizer="o7"), TRACE).found.step is None


def test_after_the_last_step_of_a_leg_that_is_compared_with_no_other_nothing_tells_what_comes():
    assert find(standing(20), TRACE).found.step is None
    assert find(standing(20), TRACE, own=True, alone=True).found.step == 20
    wrong = find(standing(20, optimizer="o7"), TRACE, own=True, alone=True)
    assert (wrong.step, wrong.found.step, wrong.found.optimizer) == (20, None, (7,))
    assert all(20 in getattr(wrong.found, name) for name in ("rates", "rng", "data")), "what is not known is not wrong"
    assert find(standing(10, data="d2"), TRACE, own=True, alone=True).found.step is None


def test_of_many_steps_the_nearest_are_told():
    constant = [replace(each, optimizer="none") for each in TRACE]
    found = find(standing(10, optimizer="none"), constant).found
    assert found.step == 10 and len(found.optimizer) == NEAREST and 10 in found.optimizer


def test_data_that_come_again_are_of_no_step_that_the_leg_has_not_reached(monkeypatch: pytest.MonkeyPatch):
    own = [replace(each, weights=f"drifted{each.step}", rng_after="?") for each in TRACE[:13]]
    monkeypatch.setattr(earlier_traces, "read_moments", lambda path: TRACE if "reference" in str(path) else own)
    monkeypatch.setattr(LegLayout, "attempts", lambda leg: [1])
    order: Any = SimpleNamespace(reference_path="reference", attempt=2, rank=1)
    traces = earlier_traces.EarlierTraces(order, LegLayout(Path("chaos")))
    lost = standing(10, weights="?", optimizer="?", rates=("?",), rng="?")
    assert find(lost, TRACE).step == 16
    place = traces.place(lost)
    assert place and (place.step, place.found.data) == (10, (4, 10))
    other_run = traces.place(standing(16, optimizer="?"))
    assert other_run and other_run.step == 16, "weights that only another run's checkpoint holds"
