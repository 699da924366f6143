"""The difference of two tensors of one dtype and shape, from their raw bytes: elements, the first of them, and ULP. Pure.

Bits decide what differs. The distance of two floats is counted in units in the last place: each is a sign and a magnitude, and
the magnitudes of one sign are the integers from zero up, in the order of the floats (B. Dawson, "Comparing floating point
numbers", 2012). So -0.0 and 0.0 are 0 apart, and neighbours 1, across powers of two as well. NaN has no place in that order,
and the number of steps from a number to infinity means nothing: such pairs are counted separately.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy

FLOAT_BITS = {
    # dtype: (bits, bits of the magnitude of infinity; None where there is none)
    "float64": (64, 0x7FF0_0000_0000_0000),
    "float32": (32, 0x7F80_0000),
    "float16": (16, 0x7C00),
    "bfloat16": (16, 0x7F80),
}
COMPLEX = {"complex128": "float64", "complex64": "float32"}
INTEGERS = frozenset({f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)})


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorDifference:
    dtype: str
    shape: tuple[int, ...]
    elements: int
    differing: int
    index: tuple[int, ...]
    """Of the first element that differs."""
    expected: Any
    """Its value: a float as float.hex() text, an integer, or hex digits for any other dtype."""
    seen: Any
    ulp: int | None
    """Of the first element; None if one of the two is not finite, or for a dtype without ULP."""
    max_ulp: int | None
    """Largest distance over the finite elements."""
    max_distance: int | None
    """For integers: the largest absolute difference."""
    not_finite: int
    """Number of differing pairs in which one is NaN or infinite."""


def tensor_difference(expected: bytes, seen: bytes, dtype: str, shape: tuple[int, ...]) -> TensorDifference | None:
    """Compare little-endian bytes of two tensors; None when they are equal. Raises ValueError when the bytes do not fit."""
    if expected == seen:
        return None
    elements = prod(shape)
    if not elements or len(expected) != len(seen) or len(expected) % elements:
        raise ValueError(f"{len(expected)} and {len(seen)} bytes are not two tensors of shape {shape}")
    width = len(expected) // elements
    rows = [numpy.frombuffer(raw, dtype=numpy.uint8).reshape(elements, width) for raw in (expected, seen)]
    apart = numpy.flatnonzero((rows[0] != rows[1]).any(axis=1))
    first = int(apart[0])
    values = [_value(row[first].tobytes(), dtype) for row in rows]
    ulp, max_ulp, not_finite = _ulp_of([row[apart] for row in rows], dtype)
    return TensorDifference(
        dtype=dtype,
        shape=shape,
        elements=elements,
        differing=len(apart),
        index=tuple(int(place) for place in numpy.unravel_index(first, shape)) if shape else (),
        expected=values[0],
        seen=values[1],
        ulp=ulp,
        max_ulp=max_ulp,
        max_distance=_distance([row[apart] for row in rows], dtype),
        not_finite=not_finite,
    )


def float_distance(expected: float, seen: float) -> int | None:
    """ULP between two numbers, in float32 if both fit it, else in float64; None if one is not finite, unless they are equal."""
    (found,), _ = float_distances([expected], [seen])
    return found


def float_distances(expected: Sequence[float], seen: Sequence[float]) -> tuple[list[int | None], str]:
    """The same for many pairs at once, all in the precision of the widest number, which is returned, too."""
    rows: list[Any] = [numpy.array(values, dtype=numpy.float64) for values in (expected, seen)]
    with numpy.errstate(over="ignore"):
        singles: list[Any] = [row.astype(numpy.float32) for row in rows]
    single = all(
        bool(((narrow == row) | (numpy.isnan(narrow) & numpy.isnan(row))).all())
        for narrow, row in zip(singles, rows, strict=True)
    )
    dtype = "float32" if single else "float64"
    if not len(rows[0]):
        return [], dtype
    told, whole = _distances([row.reshape(-1, 1) for row in (singles if single else rows)], dtype)
    alike: Any = numpy.isnan(rows[0]) & numpy.isnan(rows[1]) | (rows[0] == rows[1])
    found = [
        0 if equal else int(distance) if finite else None for distance, finite, equal in zip(told, whole, alike, strict=True)
    ]
    return found, dtype


def _ulp_of(rows: list[Any], dtype: str) -> tuple[int | None, int | None, int]:
    """Distance of the first pair, the largest one, and the number of pairs that have none."""
    if COMPLEX.get(dtype, dtype) not in FLOAT_BITS:
        return None, None, 0
    worst, whole = _distances(rows, dtype)
    largest = int(worst[whole].max()) if whole.any() else None
    return (int(worst[0]) if whole[0] else None), largest, int((~whole).sum())


def _distances(rows: list[Any], dtype: str) -> tuple[Any, Any]:
    """The distance of each pair of floats, and whether it has one."""
    bits, infinity = FLOAT_BITS[COMPLEX.get(dtype, dtype)]
    words: list[Any] = [numpy.ascontiguousarray(row).view(f"<u{bits // 8}").astype(numpy.uint64) for row in rows]
    sign = numpy.uint64(1 << (bits - 1))
    negative = [(word & sign) != 0 for word in words]
    magnitude = [word & (sign - numpy.uint64(1)) for word in words]
    opposite: Any = negative[0] != negative[1]
    # For equal signs the distance is a difference, for different signs a sum: below 2^64 in both cases.
    difference = numpy.maximum(*magnitude) - numpy.minimum(*magnitude)
    distance = numpy.where(opposite, magnitude[0] + magnitude[1], difference).reshape(len(rows[0]), -1)
    finite: Any = ((magnitude[0] < infinity) & (magnitude[1] < infinity)).reshape(distance.shape)
    # The distance of a complex number is that of its worse part.
    return distance.max(axis=1, initial=0), finite.all(axis=1)


def _distance(rows: list[Any], dtype: str) -> int | None:
    if dtype not in INTEGERS:
        return None
    left, right = (numpy.ascontiguousarray(row).view(numpy.dtype(dtype).newbyteorder("<")).reshape(-1) for row in rows)
    high, low = numpy.maximum(left, right), numpy.minimum(left, right)
    # In unsigned arithmetic the difference of two int64 does not overflow.
    return int((high.astype(numpy.uint64) - low.astype(numpy.uint64)).max())


def _value(raw: bytes, dtype: str) -> Any:
    if dtype in COMPLEX:
        half = len(raw) // 2
        return [_value(part, COMPLEX[dtype]) for part in (raw[:half], raw[half:])]
    if dtype == "bfloat16":
        # The upper half of a float32.
        return float(numpy.frombuffer(b"\0\0" + raw, dtype="<f4")[0]).hex()
    if dtype in FLOAT_BITS:
        return float(numpy.frombuffer(raw, dtype=f"<f{len(raw)}")[0]).hex()
    if dtype in INTEGERS:
        return int(numpy.frombuffer(raw, dtype=numpy.dtype(dtype).newbyteorder("<"))[0])
    return raw.hex()
