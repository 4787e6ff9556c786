"""Counters of the engine."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from hororing._engine import state
from hororing._engine.core import ffi, lib


def statistics() -> dict[str, int]:
    """Return the counters of this process's engine since `init`, by name.

    Never blocks. The counters are read one after another while the engine runs; docs/scheduling.md
    explains them. ``"groups"`` holds the groups of ``DistributedOptimizer(groups="auto")``, by
    optimizer, ``"compression"`` the choices of ``Compression.auto``, and ``"guard"`` the counts of
    guards: steps, comparisons, and findings by kind.

    Examples
    --------
    >>> before = hvd.statistics()["bytes"]
    >>> optimizer.step()
    >>> reduced = hvd.statistics()["bytes"] - before
    """
    state.topology()
    state.refuse_forked()
    counters = ffi.new("hr_stats *")
    lib.hr_stats_now(counters)
    found: dict[str, Any] = {name: getattr(counters, name) for name in dir(counters)}
    shown = {
        kind: {name: dict(values) for name, values in each.values()}
        for kind, each in _shown.items()
    }
    return found | shown


# What live optimizers show, by kind, each with the optimizer's name.
_shown: dict[str, weakref.WeakKeyDictionary[object, tuple[str, Mapping[str, float]]]] = {
    "groups": weakref.WeakKeyDictionary(),
    "compression": weakref.WeakKeyDictionary(),
    "guard": weakref.WeakKeyDictionary(),
}


def show(kind: str, owner: object, optimizer: str, values: Mapping[str, float]) -> None:
    """Include "groups" or "compression" of an optimizer, or a "guard", while `owner` lives."""
    _shown[kind][owner] = optimizer, values


__all__ = ["statistics"]
