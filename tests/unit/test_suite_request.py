"""Which drills run, and with which seeds."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosrun.campaign.planned_drill import derive_seed
from chaosrun.campaign.suite_plan import Shard, chosen, night_of, parse_seed, parse_shard, sharded
from chaosrun.errors import UsageError
from chaosrun.spec.suite import SuiteDrill


def named(name: str) -> SuiteDrill:
    rest: Any = dict.fromkeys(("place", "job", "overrides", "expect", "said"))
    return SuiteDrill(name=name, base=name.partition("[")[0], **rest)


NAMES = ["digits[workers=1,faults=spot]", "digits[workers=2,faults=spot]", "digits[workers=2,faults=torture]", "order", "odd"]
DRILLS = [named(name) for name in NAMES]


@pytest.mark.parametrize(
    ("only", "without", "left"),
    [
        ([], [], [0, 1, 2, 3, 4]),
        (["digits"], [], [0, 1, 2]),
        (["digits[workers=2,faults=spot]"], [], [1]),
        (["*faults=spot]"], [], [0, 1]),
        (["o*"], ["odd"], [3]),
        (["digits[workers=?,faults=spot]", "order"], ["*workers=1*"], [1, 3]),
    ],
)
def test_names_and_patterns(only: list[str], without: list[str], left: list[int]) -> None:
    assert chosen(DRILLS, only, without) == [DRILLS[place] for place in left]


def test_a_name_that_means_nothing_is_refused() -> None:
    for only, without, option in ((["orders"], [], "--only"), ([], ["digits[workers=9]"], "--except")):
        with pytest.raises(UsageError, match=f"{option}: no drill"):
            chosen(DRILLS, only, without)
    with pytest.raises(UsageError, match="no drill is left"):
        chosen(DRILLS, ["order"], ["o*"])


@pytest.mark.parametrize("text", ["0/2", "3/2", "1/0", "1", "a/b", "-1/2", "1/2/3", ""])
def test_a_shard_that_is_none(text: str) -> None:
    with pytest.raises(UsageError, match="is not a shard"):
        parse_shard(text)


@given(st.lists(st.text(min_size=1), unique=True, max_size=40), st.integers(1, 9))
def test_shards_are_disjoint_and_complete(names: list[str], of: int) -> None:
    drills = [named(name) for name in names]
    shards = [sharded(drills, Shard(number, of)) for number in range(1, of + 1)]
    assert sorted(drill.name for shard in shards for drill in shard) == sorted(names)
    # Whatever order the suite has them in.
    assert [set(sharded(drills[::-1], Shard(number, of))) for number in range(1, of + 1)] == [set(shard) for shard in shards]


@given(st.lists(st.text(min_size=1), unique=True, min_size=1, max_size=40), st.integers(1, 9))
def test_a_drill_stays_in_its_shard_whatever_else_comes_or_goes(names: list[str], of: int) -> None:
    drills = [named(name) for name in names]
    for number in range(1, of + 1):
        before, after = (sharded(some, Shard(number, of)) for some in (drills[:-1], drills))
        assert [drill for drill in after if drill != drills[-1]] == before


def test_a_shard_stays_what_it_is() -> None:
    # Machines of one night may have different versions of Python; none may have another partition.
    assert [drill.name for drill in sharded(DRILLS, parse_shard("2/2"))] == [NAMES[0], NAMES[2], NAMES[4]]


def test_seeds_of_a_night() -> None:
    noon = 1795262400.0
    assert night_of(noon) == "2026-11-21"
    assert parse_seed("today", noon) == 20261121 and parse_seed("7", noon) == 7
    for text in ("tomorrow", "-1", "1.5", "", "٣"):
        with pytest.raises(UsageError, match="is not a seed"):
            parse_seed(text, noon)
    # The same on every machine, for ever: a night can be repeated.
    assert [derive_seed(20261121, "order"), derive_seed(20261121, "order", 1)] == [1914685773, 1011990511]


@given(st.integers(0, 10**9), st.text(), st.integers(0, 50))
def test_derived_seeds_differ_and_fit(seed: int, name: str, draw: int) -> None:
    derived = derive_seed(seed, name, draw)
    assert derived == derive_seed(seed, name, draw) and 0 <= derived < 2**31
    assert derived != derive_seed(seed + 1, name, draw) and derived != derive_seed(seed, name + "x", draw)
