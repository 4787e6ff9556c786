"""Replays recorded steps on other ranks: the engine's rule of what is reduced together.

All that is agreed upon when the engine becomes free is divided into batches of at most
HORORING_FUSION_BYTES (csrc/engine/fusion_planner.h), and one batch follows the other. A tensor is
agreed upon when the slowest rank has submitted it. Simulated ranks take recorded steps of the
recorded ranks by turns, each another one, so that more ranks meet more late ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hororing.toolkit.predict.network import Network, agreement, exchange
from hororing.toolkit.predict.profile import Array, Profile

FUSION_BYTES = 64 << 20
# How long the first tensor waits for others after a pause: an eighth of CYCLE_TIME_MS.
_HOLD_S = 0.125e-3

Cost = Callable[[float], float]


@dataclass(frozen=True)
class Variant:
    """What differs from the recorded training.

    Attributes
    ----------
    compute : float
        Factor of the time of computing.
    nbytes : float
        Factor of the bytes that are sent; 0.25: int8 instead of float32.
    period : int
        Averages of weights after so many steps, instead of gradients in each.
    grouped : bool
        Gradients form the groups that finish first (docs/scheduling.md).
    even : bool
        Every rank takes the median time.
    """

    compute: float = 1.0
    nbytes: float = 1.0
    period: int = 1
    grouped: bool = False
    even: bool = False


def plan(nbytes: Sequence[float], limit: float = FUSION_BYTES) -> list[list[int]]:
    """Indices of the batches: as FusionPlanner does it for tensors of one kind."""
    batches: list[list[int]] = []
    held = 0.0
    for index, size in enumerate(nbytes):
        padded = -(-size // 64) * 64
        if batches and held + padded <= limit:
            batches[-1].append(index)
            held += padded
        else:
            batches.append([index])
            held = padded
    return batches


def end_of_batches(ready: Array, nbytes: Array, cost: Cost, agree: Callable[[int], float]) -> float:
    """When all tensors are reduced that become ready at `ready` seconds, which ascend."""
    free, first, count = 0.0, 0, len(ready)
    while first < count:
        hold = _HOLD_S if first == 0 and count > 1 else 0.0
        free = max(free, min(float(ready[first]) + hold, float(ready[-1])))
        end = int(np.searchsorted(ready, free, side="right"))
        free += agree(end - first)
        sizes = nbytes[first:end]
        free += sum(cost(float(sizes[batch].sum())) for batch in plan(sizes.tolist()))
        first = end
    return free


def groups(ready: Array, nbytes: Array, cost: Cost) -> list[int]:
    """Ends of the groups with which the reductions finish first.

    f[i] = min over j < i of max(f[j], ready[i-1]) + cost(bytes of j .. i-1); docs/scheduling.md.
    """
    sums = np.concatenate([[0.0], np.cumsum(nbytes)])
    best, before = [0.0], [0]
    for i in range(1, len(ready) + 1):
        times = [
            max(best[j], float(ready[i - 1])) + cost(float(sums[i] - sums[j])) for j in range(i)
        ]
        before.append(int(np.argmin(times)))
        best.append(min(times))
    ends, at = [], len(ready)
    while at:
        ends.append(at)
        at = before[at]
    return ends[::-1]


def step_times(
    profile: Profile,
    network: Network,
    ranks: int,
    variant: Variant | None = None,
    *,
    steps: int = 100,
    seed: int = 0,
    cost: Cost | None = None,
) -> Array:
    """Seconds of simulated steps, (steps,); with the same seed, variants draw the same steps.

    Parameters
    ----------
    cost : callable, optional
        Seconds for an allreduce of so many bytes; default: that of the network.
    """
    variant = variant or Variant()
    random = np.random.default_rng(seed)
    recorded = profile.phases[0].ready_s.shape[0]
    size = len(profile.hosts)
    of_rank = np.arange(ranks) % size
    total = cost or (lambda nbytes: exchange(network, ranks, nbytes))

    def scaled(nbytes: float) -> float:
        return total(nbytes * variant.nbytes)

    def agree(tensors: int) -> float:
        return agreement(network, ranks, tensors)

    took = np.zeros(steps)
    late = np.zeros(ranks)  # with `period`: what each rank has computed since the last average
    middle = [np.median(phase.ready_s, axis=(0, 1)) for phase in profile.phases]
    for step in range(steps):
        drawn = random.integers(recorded, size=ranks)
        for number, phase in enumerate(profile.phases):
            ready = phase.ready_s[drawn, of_rank]
            if variant.even:
                ready = np.broadcast_to(middle[number], ready.shape)
            ready = ready * variant.compute
            if variant.period > 1:
                late += ready.max(axis=1)
                continue
            slowest = ready.max(axis=0)
            order = np.argsort(slowest, kind="stable")
            times, nbytes = slowest[order], phase.nbytes[order]
            if variant.grouped:
                took[step] += _end_of_groups(times, nbytes, scaled, agree)
            else:
                took[step] += end_of_batches(times, nbytes, scaled, agree)
        if variant.period > 1 and (step + 1) % variant.period == 0:
            whole = sum(float(phase.nbytes.sum()) for phase in profile.phases)
            span = float(late.max()) + agree(1) + scaled(whole)
            took[step + 1 - variant.period : step + 1] = span / variant.period
            late[:] = 0
    return took[: steps - steps % variant.period]


def _end_of_groups(ready: Array, nbytes: Array, cost: Cost, agree: Callable[[int], float]) -> float:
    free, first = 0.0, 0
    for end in groups(ready, nbytes, lambda size: agree(1) + cost(size)):
        free = max(free, float(ready[end - 1])) + agree(1) + cost(float(nbytes[first:end].sum()))
        first = end
    return free


def without_latency(network: Network) -> Network:
    """The network without delays and work per message."""
    return network._replace(inner_alpha_s=0.0, outer_alpha_s=0.0, message_overhead_s=0.0)


def without_bytes(network: Network) -> Network:
    """The network with unlimited bandwidth."""
    return network._replace(inner_bandwidth=np.inf, outer_bandwidth=np.inf)
