"""Which samples of a data set are left in an epoch, and which of them are for which rank."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence


def samples_left(count: int, processed: int, seed: int | None) -> list[int]:
    """Return the samples of an epoch that are not processed yet, in the order of this epoch.

    The order does not depend on ranks: all of them have processed the first `processed` samples.

    Parameters
    ----------
    count : samples of the data set.
    seed : of the order, different for each epoch; None: ascending.
    """
    order = list(range(count))
    if seed is not None:
        random.Random(seed).shuffle(order)
    return order[processed:]


def share_of(samples: Sequence[int], rank: int, size: int) -> list[int]:
    """Return the samples for `rank`: the n-th of all ranks together are `size` in a row.

    All ranks get equally many. Where that does not come out even, the first samples are dealt
    again, fewer than there are ranks.
    """
    padded = -(-len(samples) // size) * size
    return list(itertools.islice(itertools.cycle(samples), rank, padded, size))


__all__ = ["samples_left", "share_of"]
