"""A suite over the nights: what is written down, what is read of it, and what tonight is beside it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosrun.campaign.files import plain
from chaosrun.campaign.history import NightResult, append, expect_writable, label, nights, read_history, trend
from chaosrun.errors import UsageError
from tests.unit.suites import NIGHT


def nightly(number: int, drill: str = "a", *, ok: bool = True) -> NightResult:
    return replace(NIGHT, suite=f"nightly-{number}", night=f"2026-11-{number:02}", time_s=float(number), drill=drill, ok=ok)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "history" / "nightly.jsonl"
    entries = [nightly(1), nightly(1, "b"), nightly(2, ok=False)]
    assert read_history(path).entries == ()
    for entry in entries:
        append(path, entry)
    assert read_history(path).entries == tuple(entries) and read_history(path).damaged == ()
    # A drill that ended twice, because the machine went down in between, is one entry.
    append(path, replace(entries[2], took_s=9.0))
    assert [entry.took_s for entry in read_history(path).entries] == [3.5, 3.5, 9.0]


def test_a_damaged_line_is_told_and_costs_no_other(tmp_path: Path) -> None:
    path = tmp_path / "nightly.jsonl"
    append(path, nightly(1))
    whole = path.read_bytes()
    with path.open("ab") as file:
        file.write(whole[: len(whole) // 2])  # cut off
    append(path, nightly(2))
    foreign = [
        b"[]",
        b'{"v": 99}',
        b"\xff",
        b"[" * 100_000,
        json.dumps({"v": 1, **plain(nightly(3)), "took_s": "long"}).encode(),
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(foreign) + b"\n")
    append(path, nightly(4))
    history = read_history(path)
    assert [entry.suite for entry in history.entries] == ["nightly-1", "nightly-2", "nightly-4"]
    assert history.damaged == (2, 4, 5, 6, 7, 8)


def test_a_history_that_cannot_be_written_is_an_error_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write the history") as caught:
        append(tmp_path / "file" / "history.jsonl", NIGHT)
    assert "--history" in str(caught.value.hint)
    with pytest.raises(UsageError, match="cannot read the history"):
        read_history(tmp_path)
    # Told before the night.
    for path in (tmp_path, tmp_path / "file" / "history.jsonl"):
        with pytest.raises(UsageError, match="the history"):
            expect_writable(path)
    expect_writable(tmp_path / "new" / "history.jsonl")
    assert read_history(tmp_path / "new" / "history.jsonl").entries == ()


def test_the_last_thirty_nights_oldest_first() -> None:
    entries = [nightly(number, drill) for number in range(1, 41) for drill in ("a", "b")]
    again = [replace(entry, suite=f"{entry.suite}-again", time_s=entry.time_s + 0.5) for entry in entries[-2:]]
    known = nights([*again, *entries])
    assert [night.night for night in known] == [f"2026-11-{number:02}" for number in range(11, 41)]
    assert all(night.passed == 2 and night.recoveries == [0.25, 0.25] for night in known)
    assert len(trend("a", known)) == 30 and trend("c", known) == []


def test_a_date_is_one_night_and_its_latest_results_count() -> None:
    first = [nightly(1, drill, ok=drill == "a") for drill in ("a", "b")]
    second = [replace(entry, suite="again", time_s=1.5, ok=not entry.ok) for entry in first[:1]]
    shard = replace(nightly(1, "c"), suite="shard", time_s=1.2)
    (known,) = nights([*second, *first, shard])
    assert {name: entry.ok for name, entry in known.drills.items()} == {"a": False, "b": False, "c": True}
    assert known.suite == "again"


def test_what_ran_by_hand_is_no_night_that_lost_drills(tmp_path: Path) -> None:
    whole = [nightly(1, drill) for drill in ("a", "b")]
    by_hand = [replace(nightly(number, "a", ok=False), suite=f"mine-{number}", by_hand=True) for number in (1, 2)]
    path = tmp_path / "nightly.jsonl"
    for entry in [*whole, *by_hand]:
        append(path, entry)
    entries = read_history(path).entries
    (known,) = nights(entries)
    assert (known.night, known.suite, len(known.drills)) == ("2026-11-01", "nightly-1", 2)
    assert [night.night for night in nights(entries, by_hand=True)] == ["2026-11-01", "2026-11-02"]
    # Where nobody runs the whole suite, those are the nights.
    assert len(nights(by_hand)) == 2


@pytest.mark.parametrize(
    ("before", "ok", "expected"),
    [
        ([], True, None),
        ([], False, "new"),
        ([True, True], True, None),
        ([True, True], False, "new"),
        ([True, False], False, "still"),
        ([False, False], False, "still"),
        ([True, False], True, "fixed"),
        ([True, False, True], False, "flaky"),
        ([True, False, True, False], True, "flaky"),
        ([False, True], False, "flaky"),
        # What was long ago is forgotten.
        ([True, False, True, False, *[True] * 9], True, None),
        ([False, *[True] * 9], False, "new"),
    ],
)
def test_what_tonight_is(before: list[bool], ok: bool, expected: str | None) -> None:
    assert label(before, ok) == expected


@given(st.lists(st.booleans(), max_size=40), st.booleans())
def test_every_failure_is_told_and_nothing_else_is_new(before: list[bool], ok: bool) -> None:
    found = label(before, ok)
    if not ok:
        assert found in ("new", "still", "flaky")
    else:
        assert found in (None, "fixed", "flaky")
    if all(before):
        assert found == (None if ok else "new")
