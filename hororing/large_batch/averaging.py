"""Weighted means over ranks, of many arrays in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hororing.numpy as hvd
from hororing.process_sets import ProcessSet, global_process_set

Array = NDArray[Any]


def weighted_mean(
    arrays: Sequence[Array],
    weight: float = 1.0,
    *,
    name: str,
    process_set: ProcessSet = global_process_set,
) -> list[Array]:
    """Return the means over ranks of `arrays`, in float64 and the same bits on all ranks.

    Parameters
    ----------
    arrays : of the same shapes on all ranks.
    weight : of this rank; not negative. What a rank of weight 0 has does not matter, NaN included.
    name : of the request.

    Raises
    ------
    ValueError : for a negative or infinite weight, and on every rank when all weights are 0.
    MismatchError : when ranks have different numbers of elements.
    """
    if not 0 <= weight < float("inf"):
        raise ValueError(f"{name}: weight={weight!r} must be a finite number of at least 0")
    parts = [np.asarray(array, np.float64).ravel() * weight for array in arrays]
    mine = np.concatenate([*parts, [weight]])
    if weight == 0:
        mine[:] = 0
    total = hvd.allreduce(mine, name=name, op=hvd.Sum, process_set=process_set)
    if total[-1] == 0:
        raise ValueError(f"{name}: the weights of all ranks are 0; some rank must count")
    means = np.split(total[:-1] / total[-1], np.cumsum([part.size for part in parts])[:-1])
    return [mean.reshape(np.shape(array)) for mean, array in zip(means, arrays, strict=True)]
