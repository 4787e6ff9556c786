"""Stochastic rounding by value, in NumPy's float64 and 64-bit integers: an oracle for tests."""

from __future__ import annotations

import hashlib

import ml_dtypes
import numpy as np

TYPES = {"float16": np.dtype(np.float16), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
INFINITY = {"float16": 0x7C00, "bfloat16": 0x7F80}  # the pattern
LIMIT = {"float16": 2.0**16, "bfloat16": 2.0**128}  # the number after the largest one
# Normal, large, subnormal in float16, below its smallest number.
VALUES = (1.0007, -3.3e-3, 60001.0, 1.2345e-5, -2.1e-7, 1.0e-8)
TIMES = 2**17


def random_numbers(count, seed, tensor=0, step=0, stream=0):
    """Return 16 random bits per element, as in toolkit/large_batch/stochastic_rounding.py."""
    digest = hashlib.blake2b(f"{seed} {tensor} {stream}".encode(), digest_size=8).digest()
    a, b = np.frombuffer(digest, "<u4").astype(np.uint64)
    word, step = np.uint64(2**32 - 1), np.uint64(step % 2**32)
    half = (count + 1) // 2
    x = np.arange(half, dtype=np.uint64) + a + step * np.uint64(0x9E3779B9) & word
    x = (x ^ x >> 16) * np.uint64(0x7FEB352D) + b + step * np.uint64(0xBB67AE85) & word
    x = (x ^ x >> 15) * np.uint64(0x846CA68B) & word
    x = x ^ x >> 16
    return np.stack([x & 0xFFFF, x >> 16], axis=1).ravel()[:count].astype(np.int64)


def rounded(values, dtype, random):
    """Round `values` (float32) to one of two neighbours, by `random`; return bit patterns."""
    with np.errstate(invalid="ignore"):  # signaling NaNs
        size = np.abs(values.astype(np.float64)).ravel()
    neighbours = np.arange(INFINITY[dtype], dtype=np.uint16).view(TYPES[dtype])
    neighbours = np.append(neighbours.astype(np.float64), LIMIT[dtype])
    finite = np.where(size < LIMIT[dtype], size, 0)  # excludes NaN, too
    below = np.searchsorted(neighbours, finite, side="right") - 1
    place = (finite - neighbours[below]) / (neighbours[below + 1] - neighbours[below])
    bits = 16 if dtype == "bfloat16" else np.where(size < 2.0**-14, 16, 13)
    up = np.floor(np.ldexp(place, bits)) + (random >> (16 - bits)) >= np.ldexp(1.0, bits)
    patterns = np.where(size < LIMIT[dtype], below + up, INFINITY[dtype])
    patterns |= np.where(np.signbit(values.ravel()), 0x8000, 0)
    return patterns.astype(np.uint16).reshape(values.shape)


def assert_rounded(result, values, dtype, random):
    """Fail unless `result`, an array of `dtype`, has the bits of the oracle for `values`."""
    nan = np.isnan(values)
    assert np.isnan(result[nan].astype(np.float32)).all()
    expected = rounded(values, dtype, random)
    np.testing.assert_array_equal(result.view(np.uint16)[~nan], expected[~nan])


def assert_mean(result, value):
    """Fail unless the mean of roundings of `value` is within five standard deviations of it."""
    result = result.astype(np.float64)
    low, high = result.min(), result.max()
    exact = float(np.float32(value))
    assert low <= exact <= high
    assert low < high
    place = (exact - low) / (high - low)
    sigma = np.sqrt(place * (1 - place) / result.size)
    # Subnormal float16 loses less than 2**-16 of a unit by truncation.
    assert abs(result.mean() - exact) <= (high - low) * (5 * sigma + 2.0**-16)


def patterns(count, seed):
    """Return float32 numbers of every kind: random bits, and values near the limits of a type."""
    special = [
        0, 0x80000000, 1, 0x807FFFFF, 0x00800000, 0x33800000, 0x33000001, 0x38800000, 0x387FFFFF,
        0x387FE000, 0x38801000, 0x477FE000, 0x477FE001, 0x477FFFFF, 0x47800000, 0x7F7FFFFF,
        0x7F7F0000, 0x7F800000, 0xFF800000, 0x7F800001, 0xFFC12345, 0x7FFFFFFF, 0xFFFFFFFF,
        0x3F800000, 0xBF800001,
    ]  # fmt: skip
    random = np.random.default_rng(seed)
    bits = random.integers(0, 2**32, count, dtype=np.uint32)
    bits[1::4] = bits[1::4] & 0x87FFFFFF | 0x38000000  # float16's normal numbers
    bits[2::4] = bits[2::4] & 0x83FFFFFF | 0x34000000  # its subnormal ones
    bits[3::4] = random.choice(np.array(special, np.uint32), bits[3::4].size)
    return bits.view(np.float32)


def kept(dtype):
    """Return all numbers of `dtype` except NaN, as float32, and their patterns."""
    every = np.arange(2**16, dtype=np.uint16)
    values = every.view(TYPES[dtype]).astype(np.float32)
    return values[~np.isnan(values)], every[~np.isnan(values)]
