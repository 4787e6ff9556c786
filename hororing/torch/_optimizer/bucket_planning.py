"""Plans which gradients share a message, from the times when they are ready and message costs.

Gradient i of a step is ready at r[i] and has m[i] bytes; gradients are in order of r. A bucket
holds neighbours of that order. Buckets are sent one after the other: each starts when its last
gradient is ready and the bucket before it is reduced, and takes alpha + beta * bytes. With
c[i] = m[0] + ... + m[i-1], the first i gradients are reduced at the earliest at

    f[0] = 0
    f[i] = min over j < i of  max(f[j], r[i-1]) + alpha + beta * (c[i] - c[j])

This is exact: finishing the first j gradients later never makes more of them finish earlier, so the
best plan of i gradients begins with a best plan of some j. It takes O(n^2), about 10 ms for 1,000
gradients.

Sources. Buckets in the measured order of readiness: S. Li et al., "PyTorch Distributed: Experiences
on accelerating data parallel training", VLDB 2020, arXiv:2006.15704 (sizes are fixed there). The
model: S. Shi, X. Chu, B. Li, "MG-WFBP: Efficient data communication for distributed synchronous SGD
algorithms", INFOCOM 2019, doi:10.1109/INFOCOM.2019.8737367 (merges greedily). Segmentation by
dynamic programming: R. Bellman, "On the approximation of curves by line segments using dynamic
programming", CACM 4(6), 1961, doi:10.1145/366573.366611.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]

# Buckets must finish a step's reductions earlier by this part of the time without buckets.
MIN_GAIN: Final = 0.01


class Cost(NamedTuple):
    """The cost of a message."""

    alpha_s: float
    beta_s_per_byte: float


class Proposal(NamedTuple):
    """Buckets of gradients, and when the last gradient is reduced without and with them."""

    buckets: Numbers  # the number of each gradient's bucket; -1: by itself
    before_s: float
    after_s: float


def fit_cost(small: tuple[float, float], large: tuple[float, float]) -> Cost:
    """Return the line through two measurements (bytes, seconds), neither part of it negative."""
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    beta = max(0.0, (large_s - small_s) / (large_bytes - small_bytes))
    return Cost(max(0.0, small_s - beta * small_bytes), beta)


def plan_buckets(ready_s: Numbers, sizes: Numbers, cost: Cost) -> list[int]:
    """Return the end of each bucket, as an index, of the plan that finishes first.

    `ready_s` ascends. Of equally good plans it is one of few buckets.
    """
    count = len(ready_s)
    sent_s = cost.beta_s_per_byte * np.concatenate([[0.0], np.cumsum(sizes, dtype=np.float64)])
    finished_s = np.zeros(count + 1)  # f
    begins = np.zeros(count + 1, dtype=np.int64)  # the best j of f[i]
    for i in range(1, count + 1):
        ends_s = np.maximum(finished_s[:i], ready_s[i - 1]) + (sent_s[i] - sent_s[:i])
        begins[i] = np.argmin(ends_s)
        finished_s[i] = ends_s[begins[i]] + cost.alpha_s
    ends = []
    while count > 0:
        ends.append(count)
        count = int(begins[count])
    return ends[::-1]


def finish_planned(ready_s: Numbers, sizes: Numbers, ends: list[int], cost: Cost) -> float:
    """Return when the last of these buckets is reduced."""
    begin, finished_s = 0, 0.0
    for end in ends:
        start_s = max(finished_s, float(ready_s[end - 1]))
        finished_s = start_s + cost.alpha_s + cost.beta_s_per_byte * float(np.sum(sizes[begin:end]))
        begin = end
    return finished_s


def finish_unplanned(ready_s: Numbers, sizes: Numbers, cost: Cost) -> float:
    """Like `finish_planned`, but each message sends all that is ready when the last one ends."""
    begin, finished_s = 0, 0.0
    while begin < len(ready_s):
        start_s = max(finished_s, float(ready_s[begin]))
        end = int(np.searchsorted(ready_s, start_s, side="right"))
        finished_s = start_s + cost.alpha_s + cost.beta_s_per_byte * float(np.sum(sizes[begin:end]))
        begin = end
    return finished_s


def propose(ready_s: Numbers, sizes: Numbers, cost: Cost) -> Proposal:
    """Return the best buckets of gradients in any order, or none if they gain too little.

    A gradient that is ready at infinity is in no bucket.
    """
    order = np.argsort(ready_s, kind="stable")[: int(np.sum(np.isfinite(ready_s)))]
    buckets = np.full(len(ready_s), -1)
    ready_s, sizes = ready_s[order], sizes[order]
    ends = plan_buckets(ready_s, sizes, cost)
    before_s = finish_unplanned(ready_s, sizes, cost)
    after_s = finish_planned(ready_s, sizes, ends, cost)
    if before_s - after_s <= MIN_GAIN * before_s:
        return Proposal(buckets, before_s, before_s)
    for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
        buckets[order[begin:end]] = number
    return Proposal(buckets, before_s, after_s)
