"""Distances between floats in units in the last place, for every dtype that torch trains in, from raw bytes."""

import json
import math
import random
import struct
from dataclasses import asdict
from typing import Any

import numpy
import pytest
import torch

from chaosrun.verify.ulp import TensorDifference, float_distance, float_distances, tensor_difference

DTYPES: dict[str, tuple[torch.dtype, torch.dtype]] = {
    "float64": (torch.float64, torch.int64),
    "float32": (torch.float32, torch.int32),
    "float16": (torch.float16, torch.int16),
    "bfloat16": (torch.bfloat16, torch.int16),
}


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def compare(left: torch.Tensor, right: torch.Tensor) -> TensorDifference | None:
    return tensor_difference(raw(left), raw(right), str(left.dtype).removeprefix("torch."), tuple(left.shape))


def differing(left: torch.Tensor, right: torch.Tensor) -> TensorDifference:
    found = compare(left, right)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize(("left", "right"), [(1.0, 1.25), (-2.25, -1.75), (3.5, 4.5)])
def test_as_many_ulp_as_there_are_floats_in_between(dtype: str, left: float, right: float) -> None:
    kind = DTYPES[dtype][0]
    here, steps = torch.tensor(left, dtype=kind), 0
    while here.item() != right:
        here = torch.nextafter(here, torch.tensor(math.inf, dtype=kind))
        steps += 1
    found = differing(torch.tensor([left], dtype=kind), torch.tensor([right], dtype=kind))
    assert (found.ulp, found.max_ulp) == (steps, steps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_across_zero_the_distances_add_up(dtype: str) -> None:
    kind = DTYPES[dtype][0]
    least = torch.nextafter(torch.tensor(0.0, dtype=kind), torch.tensor(1.0, dtype=kind))
    found = differing(-3 * least.reshape(1), 2 * least.reshape(1))
    assert (found.ulp, found.max_ulp) == (5, 5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_neighbour_is_one_ulp_away(dtype: str) -> None:
    kind = DTYPES[dtype][0]
    upwards = torch.tensor(math.inf, dtype=kind)
    for value in (1.0, 1.9921875, -1.0, -2.0, 0.0, 96.0):
        here = torch.tensor([[value, value]], dtype=kind)
        there = here.clone()
        there[0, 1] = torch.nextafter(here[0, 1], upwards)
        found = differing(here, there)
        assert (found.differing, found.elements, found.index, found.ulp, found.max_ulp) == (1, 2, (0, 1), 1, 1), value
        assert (float.fromhex(found.expected), float.fromhex(found.seen)) == (value, there[0, 1].item())


@pytest.mark.parametrize("dtype", DTYPES)
def test_random_bits_against_a_plain_count(dtype: str) -> None:
    floats, words = DTYPES[dtype]
    bits = torch.iinfo(words).bits
    chance = random.Random(7)

    def place(word: int) -> int:
        magnitude = word & ((1 << (bits - 1)) - 1)
        return -magnitude if word >> (bits - 1) else magnitude

    def as_float(word: int) -> torch.Tensor:
        signed = word - (1 << bits) if word >> (bits - 1) else word
        return torch.tensor([signed], dtype=words).view(floats)

    compared = 0
    for _ in range(300):
        left, right = (chance.getrandbits(bits) for _ in range(2))
        first, second = as_float(left), as_float(right)
        if left == right or not (first.isfinite() and second.isfinite()):
            continue
        compared += 1
        assert differing(first, second).ulp == abs(place(left) - place(right))
    assert compared > 200


def test_both_zeros_differ_by_no_ulp() -> None:
    found = differing(torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.differing, found.ulp, found.max_ulp) == (1, 0, 0)
    assert (found.expected, found.seen) == ((0.0).hex(), (-0.0).hex())


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinity_have_no_distance(dtype: str) -> None:
    kind = DTYPES[dtype][0]
    left = torch.tensor([math.nan, 1.0, math.inf, 2.0, 5.0], dtype=kind)
    right = torch.tensor([1.0, math.inf, -math.inf, 4.0, 5.0], dtype=kind)
    found = differing(left, right)
    assert (found.differing, found.not_finite, found.ulp, found.index) == (4, 3, None, (0,))
    assert found.max_ulp == differing(left[3:4], right[3:4]).ulp
    assert math.isnan(float.fromhex(found.expected))


def test_payloads_of_nan_differ() -> None:
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = differing(quiet, other)
    assert (found.differing, found.not_finite, found.max_ulp) == (1, 1, None)


def test_only_pairs_without_distance_have_no_largest() -> None:
    assert differing(torch.tensor([math.nan]), torch.tensor([1.0])).max_ulp is None


@pytest.mark.parametrize(
    ("left", "right", "distance"),
    [
        (torch.tensor([7, -3]), torch.tensor([7, 4]), 7),
        (torch.tensor([-(2**63)]), torch.tensor([2**63 - 1]), 2**64 - 1),
        (torch.tensor([-128], dtype=torch.int8), torch.tensor([127], dtype=torch.int8), 255),
        (torch.tensor([0], dtype=torch.uint8), torch.tensor([255], dtype=torch.uint8), 255),
    ],
)
def test_integers_differ_by_their_difference(left: torch.Tensor, right: torch.Tensor, distance: int) -> None:
    found = differing(left, right)
    assert (found.max_distance, found.ulp, found.max_ulp) == (distance, None, None)


def test_a_complex_number_is_as_far_off_as_its_worse_part() -> None:
    one_up = struct.unpack("<f", struct.pack("<I", struct.unpack("<I", struct.pack("<f", 1.0))[0] + 3))[0]
    left, right = numpy.array([1 + 1j], "<c8"), numpy.array([1 + one_up * 1j], "<c8")
    found = tensor_difference(left.tobytes(), right.tobytes(), "complex64", (1,))
    assert found is not None
    assert (found.elements, found.differing, found.ulp) == (1, 1, 3)
    assert found.seen == [(1.0).hex(), one_up.hex()]


@pytest.mark.parametrize("dtype", ["bool", "float8_e4m3fn", "str32"])
def test_other_dtypes_are_compared_as_bytes(dtype: str) -> None:
    found = tensor_difference(b"\x00\x01", b"\x00\x00", dtype, (2,))
    assert found is not None
    assert (found.index, found.expected, found.seen, found.ulp, found.max_distance) == ((1,), "01", "00", None, None)


def test_equal_bytes_are_no_difference() -> None:
    assert compare(torch.tensor([math.nan, -0.0]), torch.tensor([math.nan, -0.0])) is None
    assert compare(torch.zeros(0), torch.zeros(0)) is None


def test_a_scalar_has_no_index() -> None:
    assert differing(torch.tensor(1.0), torch.tensor(2.0)).index == ()


@pytest.mark.parametrize(("left", "right", "shape"), [(b"1234", b"12345678", (1,)), (b"123", b"124", (2,)), (b"", b"1", (0,))])
def test_bytes_that_are_no_such_tensors(left: bytes, right: bytes, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not two tensors"):
        tensor_difference(left, right, "float32", shape)


def test_json_has_everything() -> None:
    value: dict[str, Any] = json.loads(json.dumps(asdict(differing(torch.tensor([1.0]), torch.tensor([2.0])))))
    assert value["max_ulp"] == 1 << 23
    assert value["shape"] == [1]


def test_distances_of_many_losses_are_those_of_each() -> None:
    single = numpy.float32(1.1)
    expected = [float(single), 0.0, 1.0, math.nan, math.nan, math.inf, 1.0]
    seen = [float(numpy.nextafter(single, numpy.float32(2))), -0.0, 1.0, math.nan, 1.0, math.inf, -1.0]
    found, precision = float_distances(expected, seen)
    assert (found, precision) == ([1, 0, 0, 0, None, 0, 2 * 0x3F800000], "float32")
    assert found == [float_distance(*pair) for pair in zip(expected, seen, strict=True)]
    # One number that float32 has not makes it float64 for all of them.
    assert float_distances([1.0, 0.1], [math.nextafter(1.0, 2), 0.1]) == ([1, 0], "float64")
    assert float_distances([], []) == ([], "float32")
