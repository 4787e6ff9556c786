"""What the engine has done so far, in numbers."""

from __future__ import annotations

import weakref
from typing import Any

from hororing import job
from hororing._core import ffi, lib


def statistics() -> dict[str, Any]:
    """What the engine of this process has done since `init`, by name.

    Never blocks. The numbers are counters, read one after another while the engine goes on; what
    each counts is in docs/scheduling.md. ``"plan"`` holds the buckets in use on rank 0 as lists of
    tensor names (HORORING_FUSION=plan); it is empty on other ranks and where there is no plan.
    ``"groups"`` holds what ``DistributedOptimizer(groups="auto")`` has found, by optimizer.

    Examples
    --------
    >>> before = hvd.statistics()["bytes"]
    >>> optimizer.step()
    >>> reduced = hvd.statistics()["bytes"] - before
    """
    job.topology()
    counters = ffi.new("hr_stats *")
    lib.hr_stats_now(counters)
    found: dict[str, Any] = {name: getattr(counters, name) for name in dir(counters)}
    found["plan"] = _plan()
    found["groups"] = dict(_groups.values())
    return found


# Of the optimizers that are alive, each with its name.
_groups: weakref.WeakKeyDictionary[object, tuple[str, dict[str, float]]]
_groups = weakref.WeakKeyDictionary()


def show_groups(owner: object, optimizer: str, groups: dict[str, float]) -> None:
    """Let `statistics` tell of an optimizer's groups as long as `owner` lives."""
    _groups[owner] = optimizer, groups


def _plan() -> list[list[str]]:
    room = 0
    while True:  # it may change between two calls
        names = ffi.new("char[]", room)
        size = int(lib.hr_plan_now(names, room))
        if size <= room:
            break
        room = size
    text = ffi.buffer(names, size)[:].decode("utf-8", "replace")
    return [bucket.split("\0") for bucket in text.split("\0\0")[:-1]]


__all__ = ["statistics"]
