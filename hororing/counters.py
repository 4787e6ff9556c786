"""Counters of the engine."""

from __future__ import annotations

import weakref
from typing import Any

from hororing import job
from hororing._core import ffi, lib


def statistics() -> dict[str, int]:
    """Return the counters of this process's engine since `init`, by name.

    Never blocks. The counters are read one after another while the engine runs; docs/scheduling.md
    explains them. ``"groups"`` holds the groups of ``DistributedOptimizer(groups="auto")``, by
    optimizer, and ``"compression"`` the choices of ``Compression.auto``.

    Examples
    --------
    >>> before = hvd.statistics()["bytes"]
    >>> optimizer.step()
    >>> reduced = hvd.statistics()["bytes"] - before
    """
    job.topology()
    job.refuse_forked()
    counters = ffi.new("hr_stats *")
    lib.hr_stats_now(counters)
    found: dict[str, Any] = {name: getattr(counters, name) for name in dir(counters)}
    found["groups"] = dict(_groups.values())
    found["compression"] = dict(_compression.values())
    return found


# The group counters of live optimizers, each with the optimizer's name.
_groups: weakref.WeakKeyDictionary[object, tuple[str, dict[str, float]]]
_groups = weakref.WeakKeyDictionary()
_compression: weakref.WeakKeyDictionary[object, tuple[str, dict[str, float]]]
_compression = weakref.WeakKeyDictionary()


def show_groups(owner: object, optimizer: str, groups: dict[str, float]) -> None:
    """Include an optimizer's groups in `statistics` as long as `owner` lives."""
    _groups[owner] = optimizer, groups


def show_compression(owner: object, optimizer: str, chosen: dict[str, float]) -> None:
    """Include the compression of gradients in `statistics` as long as `owner` lives."""
    _compression[owner] = optimizer, chosen


__all__ = ["statistics"]
