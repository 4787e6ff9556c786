"""Weighted means over ranks, of many arrays in one request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hororing.numpy as hvd
from hororing.extension import ProcessSet, global_process_set

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
    arrays : sequence of Array
        Of the same shapes on all ranks.
    weight : float, optional
        Of this rank; not negative. What a rank of weight 0 has does not matter, NaN included.
    name : str
        Of the request.

    Raises
    ------
    ValueError : on every rank, for a negative or infinite weight of one, and when all are 0.
    MismatchError : when ranks have different numbers of elements.
    """
    # An invalid weight is sent as NaN, so that no rank waits for the one that has it.
    try:
        usable = 0 <= float(weight) < float("inf")
    except (TypeError, ValueError):
        usable = False
    parts = [np.asarray(array, np.float64).ravel() for array in arrays]
    mine = np.concatenate([*parts, [1.0]])
    mine = mine * (float(weight) if usable else np.nan) if weight != 0 else np.zeros_like(mine)
    total = hvd.allreduce(mine, name=name, op=hvd.Sum, process_set=process_set)
    if not usable:
        raise ValueError(f"{name}: weight={weight!r} must be a finite number of at least 0")
    if np.isnan(total[-1]):
        raise ValueError(f"{name}: another rank's weight is negative or infinite; see its error")
    if total[-1] == 0:
        raise ValueError(f"{name}: the weights of all ranks are 0; some rank must count")
    means = np.split(total[:-1] / total[-1], np.cumsum([part.size for part in parts])[:-1])
    return [mean.reshape(np.shape(array)) for mean, array in zip(means, arrays, strict=True)]
