"""Recomputed checkpointed segments do not communicate again: `stored_statistics`."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

# Count, mean and sum of squared deviations of the whole batch.
Statistics = tuple[Any, torch.Tensor, torch.Tensor]


def stored_statistics() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Make a checkpointed segment reuse the statistics that its first pass computed::

        checkpoint(block, x, use_reentrant=False, context_fn=stored_statistics)

    SyncBatchNorm layers that share statistics with other ranks then send nothing when the segment
    is computed again, and do not update their running statistics a second time. Without it both
    happen, on all ranks alike.
    """
    stored: list[tuple[str, Statistics]] = []
    return _Pass(stored, replays=False), _Pass(stored, replays=True)


class _Passes(threading.local):
    """The segments that this thread is in, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[_Pass] = []


_passes = _Passes()


class _Pass(AbstractContextManager["_Pass"]):
    """The first pass through a segment, which stores statistics, or a later one."""

    def __init__(self, stored: list[tuple[str, Statistics]], *, replays: bool) -> None:
        self.stored = stored
        self.replays = replays
        self.at = 0

    def __enter__(self) -> _Pass:
        self.at = 0
        if not self.replays:
            self.stored.clear()
        _passes.stack.append(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        _passes.stack.pop()

    def take(self, layer: str) -> Statistics:
        """Return what the same call of the layer had in the first pass."""
        wanted = self.stored[self.at][0] if self.at < len(self.stored) else "no layer"
        if wanted != layer:
            raise RuntimeError(
                f"SyncBatchNorm '{layer}': a checkpointed segment is computed in another order "
                f"than before, where '{wanted}' was here; make it deterministic, or leave "
                "stored_statistics out"
            )
        self.at += 1
        return self.stored[self.at - 1][1]


def stored(layer: str) -> Statistics | None:
    """Return the statistics for a call of a layer that is computed again; None for a first one."""
    for number in reversed(range(len(_passes.stack))):
        if _passes.stack[number].replays:
            statistics = _passes.stack[number].take(layer)
            store(layer, statistics, number + 1)
            return statistics
    return None


def store(layer: str, statistics: Statistics, outermost: int = 0) -> None:
    """Note the statistics of a call for the segments that it is part of, from `outermost` on."""
    for each in _passes.stack[outermost:]:
        each.stored.append((layer, statistics))
