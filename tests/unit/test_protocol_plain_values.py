"""What a registered object's state may hold is restored, and nothing else is loaded."""

from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from chaosrun.protocol.plain_values import load_values, plain_values, unpicklable


@pytest.mark.parametrize(
    "value",
    [
        numpy.array(["a", "bc"]),
        numpy.array([b"a"]),
        numpy.array(["2020-01-01"], dtype="M8[D]"),
        numpy.array([(1, 2.0)], dtype=[("count", int), ("mean", float)]),
        numpy.float16(0.5),
        numpy.str_("a"),
    ],
    ids=["texts", "bytes", "dates", "records", "number", "text"],
)
def test_values_of_numpy_come_back(tmp_path: Path, value: Any) -> None:
    torch.save({"value": value}, tmp_path / "state.pt")
    with plain_values(()):
        assert unpicklable((tmp_path / "state.pt").read_bytes()) == []
        found = load_values(tmp_path / "state.pt", map_location="cpu")["value"]
    assert type(found) is type(value) and found.dtype == value.dtype and numpy.array_equal(found, value)
