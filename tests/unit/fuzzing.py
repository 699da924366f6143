"""Inputs that are almost right: bytes with a few changes, JSON values with another value in a place, and how many to try."""

import copy
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from chaosrun.records.trace_blocks import frames

AMOUNTS = [50, pytest.param(10_000, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
"""Inputs to try: `make test`, `make nightly`."""

NASTY = [
    b"\0",
    b"\xff",
    b"\n",
    b"\r",
    b"{",
    b"}",
    b"[" * 3000,
    b'"',
    b"\\",
    b"1e999",
    b"NaN",
    b"\xed\xa0\x80",
    b"9" * 5000,
    b"null",
]

odd_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.sampled_from([0, -1, 2**63, 10**400, "", "\ud800", "../..", "/etc/passwd", "a\0b", "n" * 300, "nan", 0.5, [], {}]),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=5,
)


def tried(examples: int, inputs: st.SearchStrategy[Any], check: Callable[[Any], None]) -> None:
    """Call `check` with so many inputs, the same ones every time in `make test`."""
    quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much, HealthCheck.large_base_example]
    limits = settings(
        max_examples=examples, deadline=None, derandomize=examples < 1000, database=None, suppress_health_check=quiet
    )
    limits(given(inputs)(check))()


@st.composite
def changed_bytes(draw: st.DrawFn, whole: bytes) -> bytes:
    """One to four places cut out, put in, doubled or replaced; or the end cut off."""
    data = whole
    for _ in range(draw(st.integers(1, 4))):
        first = draw(st.integers(0, len(data)))
        last = min(len(data), first + draw(st.integers(0, 40)))
        put = draw(st.one_of(st.binary(max_size=12), st.sampled_from(NASTY)))
        how = draw(st.sampled_from(["cut", "put", "double", "replace", "end"]))
        data = {
            "cut": data[:first] + data[last:],
            "put": data[:first] + put + data[first:],
            "double": data[:last] + data[first:],
            "replace": data[:first] + put + data[last:],
            "end": data[:first],
        }[how]
    return data


@st.composite
def changed_value(draw: st.DrawFn, whole: Any) -> Any:
    """A JSON value with something else, or nothing, in one or two of its places."""
    value = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 2))):
        places = list(_places(value))
        if not places:
            return draw(odd_values)
        holder, key = places[draw(st.integers(0, len(places) - 1))]
        if draw(st.booleans()):
            holder[key] = draw(odd_values)
        elif isinstance(holder, dict):
            del holder[key]
        else:
            holder.insert(key, draw(odd_values))
    return value


@st.composite
def changed_lines(draw: st.DrawFn, whole: bytes) -> bytes:
    """A JSON-lines file with one record changed, dropped, doubled or moved; or its bytes changed."""
    if draw(st.booleans()):
        return draw(changed_bytes(whole))
    lines = whole.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    how = draw(st.sampled_from(["change", "change", "change", "drop", "double", "move"]))
    if how == "change":
        lines[at] = dumped(draw(changed_value(json.loads(lines[at]))))
    elif how == "drop":
        del lines[at]
    else:
        line = lines[at] if how == "double" else lines.pop(at)
        lines.insert(draw(st.integers(0, len(lines))), line)
    return b"".join(line + b"\n" for line in lines)


def changed_file(whole: bytes) -> st.SearchStrategy[bytes]:
    """The bytes of a JSON file with something wrong in them."""
    return st.one_of(changed_bytes(whole), changed_value(json.loads(whole)).map(dumped), odd_values.map(dumped))


@st.composite
def changed_trace(draw: st.DrawFn, whole: bytes) -> bytes:
    """A trace with a record dropped, doubled or moved; or its bytes changed."""
    if draw(st.booleans()):
        return draw(changed_bytes(whole))
    ends = [0, *(end for end, _ in frames(whole))]
    records = [whole[begin:end] for begin, end in pairwise(ends)]
    at = draw(st.integers(0, len(records) - 1))
    how = draw(st.sampled_from(["drop", "double", "move"]))
    record = records[at] if how == "double" else records.pop(at)
    if how != "drop":
        records.insert(draw(st.integers(0, len(records))), record)
    return b"".join(records)


def changed_as(name: str, whole: bytes) -> st.SearchStrategy[bytes]:
    """A file with something wrong in it, whose form its name tells."""
    if name.endswith(".trace"):
        return changed_trace(whole)
    return changed_lines(whole) if name.endswith("jsonl") else changed_file(whole)


def dumped(value: Any) -> bytes:
    return json.dumps(value).encode()


def _places(value: Any) -> Any:
    """Every (container, key) of a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(pairs):
        yield value, key
        yield from _places(inner)
