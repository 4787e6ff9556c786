"""Stochastic rounding to float16 and bfloat16: the seeds and random numbers that ranks share.

A float32 number between two neighbours of 16 bits becomes the upper one with probability
(x - lower) / (upper - lower), so the mean of many roundings is x, and updates that are smaller than
half a unit in the last place add up instead of being lost. (M. Croci et al., "Stochastic rounding:
implementation, error analysis and applications", R. Soc. Open Sci. 2022, doi:10.1098/rsos.211631.)

The random number of an element is a function of (seed, tensor, stream, step, index) and of nothing
else: ranks that hold the same values stay equal on any devices, and a resumed run continues
exactly. `hororing.toolkit.torch.optim.rounding` and `hororing.toolkit.keras.optim.rounding` compute
it with the framework's integer operations modulo 2**32, and get the same numbers::

    a, b = keys(seed, tensor, stream)
    x = j + a + step * STEPS[0]                 element 2 j has the low half of the last x,
    x = (x ^ x >> 16) * MULTIPLIERS[0]          element 2 j + 1 its high half
    x = x + b + step * STEPS[1]
    x = (x ^ x >> 15) * MULTIPLIERS[1]
    x = x ^ x >> 16

Without b and steps this is the hash "lowbias32" (C. Wellons, "Prospecting for hash functions",
2018, nullprogram.com/blog/2018/07/31, public domain), whose output bits each depend on all input
bits. STEPS are the increments of Random123 (J. Salmon et al., SC 2011,
doi:10.1145/2063384.2063405): odd, so all 2**32 steps differ.

Numerics, where r are 16 random bits and x is finite:

1. bfloat16: r is added to the bits of x, and the low 16 are cut off. Exact: E[result] = x.
2. Normal float16: the same with the upper 13 bits of r, as 13 are cut off. Exact.
3. Subnormal float16: the same in units of 2**-40; what is below is cut off first, 2**-16 of a unit.
4. Numbers of the target type are kept, as are infinities, signs of zero and NaN (which
   becomes quiet). Beyond the largest finite number, up is infinity, as in rounding to nearest.
"""

from __future__ import annotations

import hashlib
import secrets
from typing import Any, Final

import numpy as np

import hororing.numpy as hvd
from hororing.extension import ProcessSet, global_process_set

IDENTICAL_STREAM: Final = 0  # of what must be equal on all ranks; rank r's own is r + 1
SHORT: Final = ("float16", "bfloat16")
MULTIPLIERS: Final = (0x7FEB352D, 0x846CA68B)
STEPS: Final = (0x9E3779B9, 0xBB67AE85)


class StochasticRounding:
    """How 16-bit weights are updated without float32 master weights: see `LARS(rounding=...)`.

    Parameters
    ----------
    seed : int, optional
        From 0 to 2**64 - 1; rank 0's counts. None: a random one. All ranks of the set must make
        this object, after `init()`.
    process_set : ProcessSet, optional
        The ranks that hold the same weights.
    """

    def __init__(
        self, seed: int | None = None, *, process_set: ProcessSet = global_process_set
    ) -> None:
        self.seed = shared_seed(seed, process_set=process_set)

    @classmethod
    def loaded(cls, seed: int) -> StochasticRounding:
        """Return the saved object with this seed, without communication."""
        made = cls.__new__(cls)
        made.seed = checked_seed(seed)
        return made

    def __repr__(self) -> str:
        return f"StochasticRounding(seed={self.seed})"


def checked_rounding(rounding: object) -> Any:
    """Return `rounding`; TypeError unless it is None or a StochasticRounding."""
    if rounding is not None and not isinstance(rounding, StochasticRounding):
        raise TypeError(
            f"rounding={rounding!r} must be None (float32 master weights) or "
            "StochasticRounding(seed)"
        )
    return rounding


def shared_seed(seed: int | None = None, *, process_set: ProcessSet = global_process_set) -> int:
    """Return the seed of the first rank of `process_set` on all; a random one where that is None.

    Collective among several ranks, after `init()`. Before it, a seed that is passed is returned.
    """
    if seed is None:
        if not hvd.is_initialized():
            raise ValueError("ranks share a random seed: call init() before, or pass a seed")
        seed = secrets.randbits(63)
    seed = checked_seed(seed)
    if hvd.is_initialized() and len(process_set.ranks) > 1:
        seed = int(hvd.broadcast_object(seed, process_set.ranks[0], process_set=process_set))
    return seed


def rank_stream() -> int:
    """Return the number of this rank's own stream."""
    return (hvd.rank() if hvd.is_initialized() else 0) + 1


def checked_seed(seed: object) -> int:
    """Return `seed`; ValueError unless it is an integer of 64 bits."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 2**64:
        raise ValueError(f"seed={seed!r} must be an integer from 0 to 2**64 - 1")
    return int(seed)


def keys(seed: int, tensor: int, stream: int) -> tuple[int, int]:
    """Return two words of 32 bits for the random numbers of a tensor."""
    digest = hashlib.blake2b(f"{seed} {tensor} {stream}".encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")
