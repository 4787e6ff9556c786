"""The checked options of hierarchical SGD, which all ranks agree on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import hororing.numpy as hvd
from hororing.extension import host_names
from hororing.toolkit.large_batch.agreement import agreed
from hororing.toolkit.large_batch.hierarchy import (
    Groups,
    Hierarchy,
    checked_count,
    make_groups,
    make_hierarchy,
)
from hororing.toolkit.large_batch.outer import Outer

WHAT = "HierarchicalSGD"
MOMENTA = ("keep", "average", "reset")


class Request(NamedTuple):
    """The arguments of HierarchicalSGD, as the user passes them."""

    period_group_size_dict: Mapping[int, Any]
    warmup_steps: int = 0
    gradient_groups: int | str | Sequence[Sequence[int]] | None = "host"
    momentum: str = "keep"
    outer: Outer | None = None
    weight: float | None = None
    delay_steps: int = 0
    overlap_backward: bool = False


class Plan(NamedTuple):
    """The plan that follows from the options, the same on all ranks."""

    hierarchy: Hierarchy
    gradient_groups: Groups
    momentum: str
    outer: Outer | None
    weights: tuple[float, ...] | None  # of each rank; None: equal
    delay_steps: int
    overlap_backward: bool


def make_plan(request: Request, check: Callable[[], dict[str, Any]] = dict) -> Plan:
    """Check `request` and compare it with that of the other ranks. Collective.

    `check` may raise as well; its result is compared, too.

    Raises
    ------
    TypeError, ValueError : on every rank, if one of them is wrong, or if they differ.
    """
    hvd.size()  # raises before `init`
    plans: list[Plan] = []

    def describe() -> dict[str, Any]:
        plans.append(_checked(request))
        return {**plans[0]._asdict(), "weight": request.weight is not None, **check()}

    by_rank = agreed(WHAT, describe, weight=request.weight)
    plan = plans[0]
    if request.weight is None:
        return plan
    return plan._replace(weights=tuple(float(each["weight"]) for each in by_rank))


def _checked(request: Request) -> Plan:
    hosts = host_names()
    hierarchy = make_hierarchy(request.period_group_size_dict, request.warmup_steps, hosts)
    if request.gradient_groups is None:
        gradient_groups = make_groups("gradient_groups", 1, hosts)
    else:
        gradient_groups = make_groups("gradient_groups", request.gradient_groups, hosts)
    if request.momentum not in MOMENTA:
        raise ValueError(f"momentum={request.momentum!r} must be one of {', '.join(MOMENTA)}")
    if request.outer is not None and not callable(getattr(request.outer, "update", None)):
        raise TypeError(
            f"outer must be SlowMo or OuterSGD of hororing.toolkit.large_batch.outer, not "
            f"{type(request.outer).__name__}"
        )
    weight = request.weight
    if weight is not None and not 0 < weight < float("inf"):
        raise ValueError(f"weight={weight} must be a positive number")
    delay_steps = checked_count("delay_steps", request.delay_steps, least=0)
    shortest = hierarchy.levels[0].period
    if delay_steps > shortest:
        raise ValueError(
            f"delay_steps={delay_steps} is more than the shortest period, {shortest}: an average "
            "must arrive before the next begins"
        )
    if request.momentum == "average":
        for option in ("delay_steps", "overlap_backward"):
            if getattr(request, option):
                raise ValueError(
                    f"{option} cannot be used with momentum='average'; use 'keep' or 'reset'"
                )
    if request.overlap_backward:
        if delay_steps:
            raise ValueError("overlap_backward and delay_steps exclude each other; use one of them")
        if any(len(group) > 1 for group in gradient_groups):
            raise ValueError(
                "overlap_backward=True updates weights as soon as this rank's gradient is ready, "
                "and cannot wait for those of others: pass gradient_groups=None, or use delay_steps"
            )
    return Plan(
        hierarchy, gradient_groups, request.momentum, request.outer, None, delay_steps,
        bool(request.overlap_backward),
    )  # fmt: skip
