"""Folding of names: nothing is lost, nothing comes in, and what people number stays in order."""

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chaosrun.preflight.report.names import brief, folded, in_order


def unfolded(term: str) -> Iterator[str]:
    """What a term says, by its definition."""
    found = re.fullmatch(r"(.*)\[([^\]]*)\](.*)", term)
    if found is None:
        yield term
        return
    before, ranges, after = found.groups()
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        for number in range(int(first), int(last or first) + 1):
            yield f"{before}{str(number).zfill(len(first))}{after}"


PIECE = st.sampled_from(["gpu-", "node", "rack", ".", "-ib", "#", "a"])
NUMBER = st.one_of(
    st.integers(0, 120).map(str), st.builds(lambda n, w: str(n).zfill(w), st.integers(0, 120), st.integers(1, 4)), st.just("")
)
NAMES = st.lists(st.builds("".join, st.tuples(PIECE, NUMBER, PIECE, NUMBER)), max_size=40)


@given(NAMES)
def test_nothing_is_lost_and_nothing_comes_in(names: list[str]) -> None:
    told = [name for term in folded(names) for name in unfolded(term)]
    assert sorted(told) == sorted(set(names))


@settings(deadline=None)
@given(NAMES.filter(bool), st.integers(1, 200))
def test_brief_is_short_or_one(names: list[str], longest: int) -> None:
    text = brief(names, longest)
    shown = re.fullmatch(r"(.*?)(?: and ([0-9]+) more)?", text)
    assert shown is not None
    told = [name for term in re.split(r", (?![^\[]*\])", shown[1]) for name in unfolded(term)]
    assert len(told) + int(shown[2] or 0) == len(set(names))
    assert set(told) <= set(names)
    assert len(text) <= longest or len(told) == 1


@given(st.lists(st.text(max_size=12), max_size=10))
def test_any_text_is_a_name(names: list[str]) -> None:
    assert sum(map(len, folded(names))) <= sum(map(len, set(names))) + 3 * len(names)
    assert sorted(in_order(names)) == sorted(set(names))


@pytest.mark.parametrize(
    ("names", "terms"),
    [
        ([], []),
        (["gpu-001", "gpu-002", "gpu-003", "gpu-004", "gpu-017"], ["gpu-[001-004,017]"]),
        (["x9", "x10", "x11"], ["x[9-11]"]),
        (["x09", "x10", "x11"], ["x[09-11]"]),
        (["x1", "x2", "x01"], ["x[01,1-2]"]),
        (["head", "n1", "n2"], ["head", "n[1-2]"]),
        (["gpu-1-ib0", "gpu-2-ib0", "gpu-3-ib0"], ["gpu-[1-3]-ib0"]),
        (["r1n1", "r1n2", "r2n1", "r2n2"], ["r1n[1-2]", "r2n[1-2]"]),
        ([f"10.0.0.{number}" for number in range(1, 256)], ["10.0.0.[1-255]"]),
        (["n3", "n3"], ["n3"]),
        (["a" * 3 + "9" * 5000], ["a" * 3 + "9" * 5000]),
    ],
)
def test_terms(names: list[str], terms: list[str]) -> None:
    assert folded(names) == terms


def test_many_names_in_little_room() -> None:
    odd = [f"gpu-{number:03}" for number in range(1, 512, 2)]
    assert brief(odd, 40) == "gpu-[001,003,005,007,009] and 251 more"
    assert brief(odd, 1) == "gpu-001 and 255 more"
    assert brief(["a-very-long-name"], 3) == "a-very-long-name"
