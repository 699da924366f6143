"""Numbers and lists in the words of people."""

from collections.abc import Iterable

import pytest

from chaosrun.wording import GIB, MIB, ago, count, duration, listed, rank_list, size, span, with_unit


def test_counts() -> None:
    assert [count(number, "step") for number in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert count(3, "process", "processes") == "3 processes"


@pytest.mark.parametrize(
    ("number", "most", "words"), [(0, 2, ""), (1, 2, "a"), (2, 2, "a, b"), (3, 2, "a, b and 1 more"), (4, 1, "a and 3 more")]
)
def test_lists(number: int, most: int, words: str) -> None:
    assert listed(list("abcd")[:number], most) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "0.999 KiB"),
        (1536, "1.5 KiB"),
        (1023.9 * 1024, "1 MiB"),
        (64 * MIB, "64 MiB"),
        (2000 * GIB, "1.95 TiB"),
        (1 << 62, "4.1e+03 PiB"),
    ],
)
def test_sizes(number: float, words: str) -> None:
    assert size(number) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (2e-6, "2 µs"),
        (0.00031, "310 µs"),
        (0.0123, "12.3 ms"),
        (0.9999, "1 s"),
        (-0.002, "-2 ms"),
        (6.44, "6.44 s"),
        (59.97, "1 min"),
        (75.0, "1 min 15 s"),
        (250.0, "4 min 10 s"),
        (7500.0, "2 h 5 min"),
        (90061.0, "1 d 1 h"),
    ],
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words


def test_moments() -> None:
    assert [ago(seconds) for seconds in (5, 120, 7300, 200000)] == ["5 s ago", "2 min ago", "2 h ago", "2 d ago"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.184, "0.18 s"), (4.21, "4.2 s"), (9.97, "10 s"), (37.4, "37 s"), (59.7, "1m00s"), (125, "2m05s"), (11_220, "3h07m")],
)
def test_span(seconds: float, text: str) -> None:
    assert span(seconds) == text


def test_units() -> None:
    assert [with_unit(*each) for each in ((3e9, "B/s"), (0.5, "s"), (12.3456, "GB/s"), (3.0, ""))] == [
        "2.79 GiB/s",
        "500 ms",
        "12.35 GB/s",
        "3",
    ]


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([3], "rank 3"),
        ([1, 0], "ranks 0 and 1"),
        (range(500), "ranks 0-499"),
        ([0, 1, 2, 3, 7, 9, 10, 11], "ranks 0-3, 7 and 9-11"),
        ([0, 1, 5], "ranks 0, 1 and 5"),
    ],
)
def test_ranks(ranks: Iterable[int], words: str) -> None:
    assert rank_list(ranks) == words
