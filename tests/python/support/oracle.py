"""Expected results of collectives, by NumPy and Python's integers only."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

from hororing._requests.arguments import Adasum, Average, Max, Min, Product, Sum

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = ["uint8", "int8", "uint16", "int16", "int32", "int64"]
SHORT_FLOATS = ["float16", "bfloat16"]
FLOATS = [*SHORT_FLOATS, "float32", "float64"]
DTYPES = [*INTEGERS, *FLOATS, "bool"]


def type_of(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype, or bfloat16."""
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Array:
    """Return random values: integers of the whole range, moderate floats."""
    dtype = type_of(name)
    if name == "bool":
        drawn = rng.random(shape) < 0.7
    elif name in INTEGERS:
        limits = np.iinfo(dtype)
        drawn = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
    else:
        drawn = np.clip(rng.normal(0, 2, shape), -4, 4)  # products stay small enough for float16
    return np.asarray(drawn, dtype)


def share(rows: int, size: int, place: int) -> tuple[int, int]:
    """Return the rows [begin, end) of this place's part of a reduce-scatter."""
    counts = [rows // size + (other < rows % size) for other in range(size)]
    return sum(counts[:place]), sum(counts[: place + 1])


def equal(result: Any, wanted: Array) -> None:
    """Fail unless type, shape and bits are equal."""
    assert isinstance(result, np.ndarray)
    assert result.dtype == wanted.dtype, f"{result.dtype} instead of {wanted.dtype}"
    assert result.shape == wanted.shape, f"{result.shape} instead of {wanted.shape}"
    assert result.tobytes() == wanted.tobytes(), f"{result} instead of {wanted}"


@dataclasses.dataclass
class Wanted:
    """The expected reduction; floats are not rounded to their type, and have a tolerance."""

    value: Array
    dtype: np.dtype[Any]
    slack: Array | None = None  # the tolerance; None: exact

    def rows(self, first: int, last: int) -> Wanted:
        """Return some of its rows."""
        slack = None if self.slack is None else self.slack[first:last]
        return Wanted(self.value[first:last], self.dtype, slack)

    def compare(self, result: Any) -> None:
        """Raise AssertionError unless `result` is within the tolerance."""
        assert isinstance(result, np.ndarray)
        assert result.dtype == self.dtype, f"{result.dtype}, not {self.dtype}"
        assert result.shape == self.value.shape, f"{result.shape}, not {self.value.shape}"
        if self.slack is None:
            np.testing.assert_array_equal(_plain(result), self.value)
            return
        wrong = ~(np.abs(_plain(result) - self.value) <= self.slack)
        assert not wrong.any(), (
            f"{result[wrong][:5]} instead of {self.value[wrong][:5]}, "
            f"slack {self.slack[wrong][:5]}, at {np.argwhere(wrong)[:5].tolist()}"
        )


def _plain(array: Array) -> Array:
    return array.astype(np.float64) if str(array.dtype) in FLOATS else array


def reduced(
    arrays: Sequence[Array], op: int, pre: float, post: float, absent: Sequence[int] = ()
) -> Wanted:
    """Return the reduction without absent ranks, which count only for the divisor of an average."""
    size = len(arrays)
    if op == Adasum:
        arrays = [
            np.zeros_like(array) if place in absent else array for place, array in enumerate(arrays)
        ]
    else:
        arrays = [array for place, array in enumerate(arrays) if place not in absent]
    name = str(arrays[0].dtype)
    if name == "bool":
        function = np.logical_or if op in (Sum, Max) else np.logical_and
        return Wanted(functools.reduce(function, arrays), arrays[0].dtype)
    if name in INTEGERS:
        return Wanted(_reduced_integers(arrays, op, pre, post, size), arrays[0].dtype)
    return _reduced_floats(arrays, op, pre, post, size)


def _reduced_integers(
    arrays: Sequence[Array], op: int, pre: float, post: float, size: int
) -> Array:
    """Sums and products wrap around; averages and scaled values are truncated toward zero."""
    dtype = arrays[0].dtype
    limits = np.iinfo(dtype)
    low, high = int(limits.min), int(limits.max)

    def scaled(value: int, factor: float) -> int:
        return value if factor == 1.0 else min(max(int(float(value) * factor), low), high)

    def one(of_ranks: tuple[int, ...]) -> int:
        parts = [scaled(value, pre) for value in of_ranks]
        if op == Average:
            total = sum(parts)
            result = abs(total) // size * (-1 if total < 0 else 1)
        elif op in (Min, Max):
            result = min(parts) if op == Min else max(parts)
        else:
            result = sum(parts) if op == Sum else functools.reduce(int.__mul__, parts)
            result = (result - low) % (high - low + 1) + low
        return scaled(result, post)

    if (pre, post) == (1.0, 1.0) and op != Average:  # NumPy wraps around, and is faster
        functions = {Sum: np.add, Product: np.multiply, Min: np.minimum, Max: np.maximum}
        return np.asarray(functools.reduce(functions[op], arrays))
    columns = zip(*(array.ravel().tolist() for array in arrays), strict=True)
    return np.array([one(column) for column in columns], dtype).reshape(arrays[0].shape)


def _reduced_floats(arrays: Sequence[Array], op: int, pre: float, post: float, size: int) -> Wanted:
    """Compute in float64, with a tolerance for the roundings of the accumulation type.

    Every rounding costs at most half a unit (eps) of its result; results are bounded by
    `largest`. There is one rounding per operand and per factor, and a last one to the type itself.
    """
    dtype = arrays[0].dtype
    scaled = [np.float64(pre) * _plain(array) for array in arrays]
    sizes = [np.abs(array) for array in scaled]
    largest = functools.reduce(np.multiply if op == Product else np.add, sizes)
    if op in (Min, Max):
        value = functools.reduce(np.minimum if op == Min else np.maximum, scaled)
    elif op == Product:
        value = functools.reduce(np.multiply, scaled)
    elif op == Adasum:
        value = _adasum(scaled)
    else:
        value = functools.reduce(np.add, scaled)
        if op == Average:
            value = value / size
    value = np.asarray(value * post)
    wide = 2.0**-52 if str(dtype) == "float64" else 2.0**-23
    own = {"float16": 2.0**-11, "bfloat16": 2.0**-8}.get(str(dtype), wide)
    tiny = 2.0**-24 if str(dtype) == "float16" else 0.0  # subnormal numbers of float16
    roundings = 3 + len(arrays) * (16 if op == Adasum else 1)
    slack = own * np.abs(value) + roundings * wide * largest * abs(post) + tiny
    unchanged = op in (Min, Max) and (pre, post) == (1.0, 1.0)
    return Wanted(value, dtype, None if unchanged else np.asarray(slack))


def _adasum(vectors: list[Array]) -> Array:
    """Combine pairs of neighbours, then pairs of pairs, ...: a (1 - ab/2aa) + b (1 - ab/2bb)."""
    if len(vectors) == 1:
        return vectors[0]
    a, b = (_adasum(half) for half in (vectors[: len(vectors) // 2], vectors[len(vectors) // 2 :]))
    ab, aa, bb = np.sum(a * b), np.sum(a * a), np.sum(b * b)
    return a * (1 - ab / (2 * aa) if aa else 1.0) + b * (1 - ab / (2 * bb) if bb else 1.0)


def exchanged(
    arrays: Sequence[Array], splits: Sequence[Sequence[int] | None], place: int
) -> tuple[Array, list[int]]:
    """Return the result of an alltoall at one place, and the number of rows from each rank."""
    pieces = []
    for array, given in zip(arrays, splits, strict=True):
        counts = given if given is not None else [len(array) // len(arrays)] * len(arrays)
        first = sum(counts[:place])
        pieces.append(array[first : first + counts[place]])
    return np.concatenate(pieces), [len(piece) for piece in pieces]
