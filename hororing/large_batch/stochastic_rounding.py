"""Stochastic rounding of float32 to float16 and bfloat16, with random numbers that ranks share.

A number between two neighbours becomes the upper one with probability
(x - lower) / (upper - lower), so the mean of many roundings is x, and updates that are smaller than
half a unit in the last place add up instead of being lost. (M. Croci et al., "Stochastic rounding:
implementation, error analysis and applications", R. Soc. Open Sci. 2022, doi:10.1098/rsos.211631.)

The random number of an element is a function of (seed, stream, tensor, step, index) and of nothing
else: ranks that hold the same values stay equal, and a resumed run goes on as it would have.
csrc/base/stochastic_rounding.h has the generator and what is exact.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import numpy as np

from hororing import runtime
from hororing._core import ffi, lib
from hororing.collectives import DTYPES
from hororing.failures import fail
from hororing.objects import broadcast_object
from hororing.process_sets import ProcessSet, global_process_set

IDENTICAL_STREAM: Final = 0  # of what must be equal on all ranks; rank r's own is r + 1
_TARGETS: Final = ("float16", "bfloat16")


def shared_seed(seed: int | None = None, *, process_set: ProcessSet = global_process_set) -> int:
    """Return the seed of the first rank of `process_set` on all; a random one where that is None.

    Collective among several ranks, after `init()`. Before it, a seed that is passed is returned.
    """
    if seed is None:
        if not runtime.is_initialized():
            raise ValueError("ranks share a random seed: call init() before, or pass a seed")
        seed = secrets.randbits(63)
    seed = checked_seed(seed)
    if runtime.is_initialized() and len(process_set.ranks) > 1:
        seed = int(broadcast_object(seed, process_set.ranks[0], process_set=process_set))
    return seed


def rank_stream() -> int:
    """Return the number of the stream that is this rank's alone."""
    return (runtime.rank() if runtime.is_initialized() else 0) + 1


def checked_seed(seed: object) -> int:
    """Return `seed`; ValueError unless it is an integer of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} must be an integer from 0 to 2**64 - 1")
    return int(seed)


def round_memory(
    target: str,
    result: int,
    source: int,
    count: int,
    *,
    seed: int,
    tensor: int = 0,
    step: int = 0,
    stream: int = IDENTICAL_STREAM,
    first: int = 0,
) -> None:
    """Round `count` float32 numbers at address `source` into 16-bit ones at `result`.

    For adapters: the memory is contiguous, and the ranges do not overlap. The GIL is released.
    """
    if target not in _TARGETS:
        raise ValueError(f"stochastic rounding is to {' or '.join(_TARGETS)}, not to {target}")
    how = ffi.new("hr_rounding *")
    how.dtype, how.tensor, how.stream = DTYPES[target], tensor, stream
    how.seed, how.step, how.first = seed, step, first
    code = int(lib.hr_round_stochastically(how, result, source, count))
    if code != lib.HR_OK:
        fail(code)


def round_stochastically(
    array: Any,
    dtype: Any = "bfloat16",
    *,
    seed: int,
    tensor: int = 0,
    step: int = 0,
    stream: int = IDENTICAL_STREAM,
    first: int = 0,
) -> np.ndarray[Any, Any]:
    """Return a float32 array, rounded at random to 16 bits.

    Parameters
    ----------
    array : float32, any shape.
    dtype : "float16" or "bfloat16" (which needs the package ml_dtypes), or a dtype of these.
    seed : of the run, from 0 to 2**64 - 1; see `shared_seed`.
    tensor, step : which tensor this is, and the how-manieth time: other random numbers each.
    stream : 0 where all ranks need the same result, `rank_stream()` where each has its own.
    first : index of the array's first element, where it is a part of a larger one.

    Examples
    --------
    >>> round_stochastically(np.full(4, 1.0005, np.float32), "float16", seed=5)
    array([1.   , 1.001, 1.001, 1.   ], dtype=float16)
    """
    source = np.asarray(array)
    if source.dtype != np.float32:
        raise TypeError(f"stochastic rounding takes float32 arrays, not {source.dtype}")
    source = np.ascontiguousarray(source)
    name = dtype if isinstance(dtype, str) else np.dtype(dtype).name
    result = np.empty(source.shape, _numpy_type(name))
    round_memory(
        name, result.ctypes.data, source.ctypes.data, source.size,
        seed=checked_seed(seed), tensor=tensor, step=step, stream=stream, first=first,
    )  # fmt: skip
    return result


def _numpy_type(name: str) -> Any:
    if name != "bfloat16":
        return np.dtype(name if name in _TARGETS else np.float16)  # round_memory refuses others
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            "NumPy has no bfloat16 of its own: pip install ml-dtypes, or round to float16"
        ) from None
    return ml_dtypes.bfloat16
