"""The cost of stragglers, by arithmetic: ranks that work alone, and then wait for others.

After step k (from 1) the ranks of each group of the largest level whose period divides k wait for
the slowest of them. Groups are consecutive ranks. With `gradient_group` the ranks of such a group
wait for one another in every step as well: gradients are averaged within a host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise

import numpy as np
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def ring_seconds(
    group: int, nbytes: float, bytes_per_s: float, latency_s: float = 0.0, ranks_per_host: int = 1
) -> float:
    """Ring-allreduce between the hosts of a group, each with one wire; METHODS E2."""
    hosts = -(-group // ranks_per_host)
    return 2 * (hosts - 1) * (latency_s + nbytes / (hosts * bytes_per_s))


def check_levels(levels: Mapping[int, int], ranks: int) -> list[tuple[int, int]]:
    """(period, group size), ascending; ValueError where they do not nest or are not for `ranks`."""
    ordered = sorted(levels.items())
    if not ordered:
        raise ValueError("levels: give at least one {period: group size}")
    for period, group in ordered:
        if period < 1 or group < 1 or ranks % group:
            raise ValueError(f"level {period}: {group} does not divide {ranks} ranks into groups")
    for (inner, small), (outer, large) in pairwise(ordered):
        if outer % inner or large % small:
            raise ValueError(
                f"levels {inner}: {small} and {outer}: {large} do not nest; a period and a group "
                "size must be multiples of those of the level before"
            )
    return ordered


def replay(
    durations: ArrayLike,
    levels: Mapping[int, int],
    *,
    gradient_group: int = 1,
    cost: Callable[[int], float] = lambda group: 0.0,
) -> float:
    """Return the time until the last rank has finished the last step, in seconds.

    Parameters
    ----------
    durations : ArrayLike
        (steps, ranks), seconds that each step takes each rank by itself.
    levels : dict of int to int
        {period in steps: ranks in a group}; {1: size} is synchronous training, {8: size} local
        SGD with period 8, {2: 8, 8: size} hierarchical SGD.
    gradient_group : int, optional
        Number of ranks that average their gradients in every step; 1: none.
    cost : callable, optional
        Seconds for averaging in a group, as a function of its number of ranks.

    Raises
    ------
    ValueError : groups do not divide the ranks, or do not nest; durations of another shape.

    Examples
    --------
    >>> durations = [[1.0, 1.0], [1.0, 3.0], [3.0, 1.0]]  # a step of each rank takes longer
    >>> replay(durations, {1: 2}), replay(durations, {3: 2})  # synchronous, and local SGD
    (7.0, 5.0)
    """
    seconds = np.asarray(durations, np.float64)
    if seconds.ndim != 2:
        raise ValueError(f"durations are of shape (steps, ranks), not {seconds.shape}")
    steps, ranks = seconds.shape
    ordered = check_levels(levels, ranks)
    if gradient_group < 1 or ranks % gradient_group:
        raise ValueError(f"gradient_group: {gradient_group} does not divide {ranks} ranks")
    clock = np.zeros(ranks)
    for step in range(steps):
        clock = clock + seconds[step]
        group = max((g for period, g in ordered if (step + 1) % period == 0), default=1)
        for wait, extra in ((gradient_group, 0.0), (group, cost(group) if group > 1 else 0.0)):
            if wait > 1:
                clock = np.repeat(clock.reshape(-1, wait).max(axis=1), wait) + extra
    return float(clock.max()) if steps else 0.0
