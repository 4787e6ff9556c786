"""Expected weighted averages, by NumPy and fractions only."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction

import ml_dtypes
import mpirun
import numpy as np

import hororing.numpy as hvd

UNITS = {"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2}


def draws(key: int) -> np.random.Generator:
    """Return a random generator, the same on every rank."""
    return np.random.default_rng([mpirun.seed(), key])


def weighted_mean(arrays: list[np.ndarray], weights: list[float]) -> np.ndarray:
    """Return the weighted average, in float64 with exact shares."""
    total = sum(map(Fraction, weights))
    result = np.zeros(np.shape(arrays[0]))
    for array, weight in zip(arrays, weights, strict=True):
        if weight:
            result += np.asarray(array, np.float64) * float(Fraction(weight) / total)
    return result


def some_weights(rng: np.random.Generator) -> Iterator[list[float]]:
    size = hvd.size()
    yield [1.0] * size
    yield rng.integers(0, 5, size).tolist()
    yield (10 ** rng.uniform(-3, 6, size)).tolist()
    yield [1e308] * size  # whose sum is infinite
    yield [5e-324 * (rank + 1) for rank in range(size)]
    yield [float(rank == size - 1) for rank in range(size)]
    yield [0.0] * size


def check_numpy(sizes: Sequence[int]) -> None:
    """Check averages of every float type: requested in full, then twice by id."""
    rng, rank = draws(0), hvd.rank()
    for dtype, unit in UNITS.items():
        kind = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        for number, weights in enumerate(some_weights(rng)):
            for elements in sizes:
                arrays = [rng.uniform(-4, 4, elements).astype(kind) for _ in range(hvd.size())]
                for array, weight in zip(arrays, weights, strict=True):
                    if weight == 0:
                        array[:] = math.nan
                wanted = weighted_mean(arrays, weights)
                for _ in range(3):  # in full, then twice by its id
                    result = hvd.allreduce(
                        arrays[rank], name=f"{dtype}.{elements}", weight=weights[rank]
                    )
                    assert result.dtype == kind
                    error = np.abs(np.asarray(result, np.float64) - wanted).max()
                    assert error <= 8 * unit, (dtype, number, elements, error)
