"""The remaining samples of a data set in an epoch, and their distribution over ranks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence


def samples_left(count: int, processed: int, seed: int | None) -> list[int]:
    """Return the unprocessed samples of an epoch, in the order of this epoch.

    The order does not depend on ranks: all of them have processed the first `processed` samples.

    Parameters
    ----------
    count : int
        Number of samples in the data set.
    seed : int or None
        Of the order, different for each epoch; None: ascending order.
    """
    order = list(range(count))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order[processed:]


def share_of(samples: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the samples for `rank`: the n-th samples of all ranks are adjacent.

    All ranks get the same number. If the samples do not divide evenly, the first ones are used
    again, fewer than there are ranks.
    """
    padded = -(-len(samples) // size) * size
    return list(itertools.islice(itertools.cycle(samples), rank, padded, size))
