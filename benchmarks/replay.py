"""Replays the gradients of a training step under a fusion policy.

Backward produces gradients at known times; one channel carries one batch after the other; a batch
costs its negotiation and its allreduce. The policies decide which gradients share a batch:

    per tensor   none: each gradient is a batch
    one bucket   all gradients, once the last one is ready
    DDP          1 MiB first, then 25 MiB, in the order of backward (DistributedDataParallel)
    ready        the engine's rule: all that are ready when the channel becomes free, divided by
                 the core's fusion planner (csrc/engine/fusion_planner.h)

The fusion planner is the real one, through the test module; times are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

from shapes import Layer

MIB = 1 << 20
FUSION_BYTES = 64 * MIB
FLOAT32 = 7  # DataType in csrc/base/types.h
Cost = Callable[[float], float]  # bytes of a batch -> seconds
Negotiation = Callable[[int], float]  # tensors of a batch -> seconds


class Step(NamedTuple):
    """Gradients in the order of backward, and their times from its begin."""

    ready_s: list[float]
    nbytes: list[int]
    forward_s: float
    backward_s: float


def step_of(layers: Sequence[Layer], step_s: float, element_bytes: int) -> Step:
    """Return a step of `step_s`, divided among the layers in proportion to their multiply-adds.

    Forward takes a third of it: backward computes the gradients of inputs and of weights.
    """
    work = sum(layer.multiply_adds for layer in layers)
    backward = step_s * 2 / 3
    now, ready, nbytes = 0.0, [], []
    for layer in reversed(layers):
        now += backward * layer.multiply_adds / work
        for shape in reversed(layer.shapes):
            ready.append(now)
            nbytes.append(math.prod(shape) * element_bytes)
    return Step(ready, nbytes, step_s / 3, backward)


def buckets_of_ddp(nbytes: Sequence[int]) -> list[int]:
    """Return the ends of buckets, which close once they hold 1 MiB (the first) or 25 MiB."""
    ends, held = [], 0
    for index, size in enumerate(nbytes):
        held += size
        if held >= (25 * MIB if ends else MIB):
            ends.append(index + 1)
            held = 0
    return ends if held == 0 else [*ends, len(nbytes)]


def ends_of(policy: str, step: Step) -> list[int]:
    """Return the ends of the buckets of a policy that fixes them before the step."""
    count = len(step.nbytes)
    if policy == "per tensor":
        return list(range(1, count + 1))
    if policy == "one bucket":
        return [count]
    assert policy == "DDP", policy
    return buckets_of_ddp(step.nbytes)


def end_of_buckets(step: Step, ends: Sequence[int], cost: Cost, negotiation: Negotiation) -> float:
    """Return when the last bucket is reduced, from the begin of backward."""
    free, first = 0.0, 0
    for end in ends:
        begin = max(free, step.ready_s[end - 1])
        free = begin + negotiation(end - first) + cost(sum(step.nbytes[first:end]))
        first = end
    return free


def end_of_ready(core: ModuleType, step: Step, cost: Cost, negotiation: Negotiation) -> float:
    """Return the same as end_of_buckets for the policy "ready"."""
    free, first, count = 0.0, 0, len(step.nbytes)
    while first < count:
        free = max(free, step.ready_s[first])
        end = first + 1
        while end < count and step.ready_s[end] <= free:
            end += 1
        free += negotiation(end - first)
        burst = step.nbytes[first:end]
        for batch in core.plan_fusion([(FLOAT32, size) for size in burst], FUSION_BYTES):
            free += cost(sum(burst[index] for index in batch))
        first = end
    return free


POLICIES = ["per tensor", "one bucket", "DDP", "ready"]


def efficiency(
    policy: str, core: ModuleType, step: Step, cost: Cost, negotiation: Negotiation
) -> float:
    """Return the time of a step without communication over that with it."""
    if policy == "ready":
        end = end_of_ready(core, step, cost, negotiation)
    else:
        end = end_of_buckets(step, ends_of(policy, step), cost, negotiation)
    alone = step.forward_s + step.backward_s
    return alone / (step.forward_s + max(step.backward_s, end))
