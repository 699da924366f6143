import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosrun.checkpoint.retention import FEWEST_KEPT, to_delete


@pytest.mark.parametrize(
    ("steps", "keep", "invalid", "deleted"),
    [
        ([], 3, [], []),
        ([10], 3, [], []),
        ([10, 20, 30], 3, [], []),
        ([10, 20, 30, 40], 3, [], [10]),
        ([40, 10, 30, 20], 3, [], [10]),
        ([10, 20, 30, 40, 50], 2, [], [10, 20, 30]),
        ([10, 20, 30], 1, [], [10]),
        ([10, 20, 30], 0, [], [10]),
        ([10, 20, 30, 40], 3, [40], []),
        ([10, 20, 30, 40, 50], 3, [40], [10]),
        ([10, 20, 30, 40, 50], 2, [10], [10, 20, 30]),
        ([10, 20, 30], 2, [10, 20, 30], []),
        ([10, 20, 30, 40], 2, [20, 30, 40], []),
    ],
)
def test_table(steps, keep, invalid, deleted):
    assert to_delete(steps, keep, lambda step: step not in invalid) == deleted


def test_no_more_are_audited_than_needed_and_none_when_there_are_few():
    asked = []
    to_delete([1, 2, 3], 3, lambda step: asked.append(step) or True)
    assert asked == []
    to_delete(range(1, 10), 3, lambda step: asked.append(step) or True)
    assert asked == [9, 8, 7]


@given(st.sets(st.integers(0, 60)), st.sets(st.integers(0, 60)), st.integers(0, 8))
def test_never_below_two_valid_and_never_the_newest(steps, invalid, keep):
    valid = steps - invalid
    deleted = set(to_delete(steps, keep, valid.__contains__))
    assert deleted <= steps
    assert len(valid - deleted) >= min(len(valid), max(keep, FEWEST_KEPT))
    assert all(step < kept for step in deleted for kept in sorted(valid, reverse=True)[: max(keep, FEWEST_KEPT)])
