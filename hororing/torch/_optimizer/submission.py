"""Batches of gradients that are sent at once, and groups of them, which are one request."""

from __future__ import annotations

import threading
from typing import Final

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._requests import handles
from hororing.torch._tensor.verbs import verbs
from hororing.torch.ops import synchronize

# Gradients are sent in batches of this many bytes; each gradient counts at least MIN_SHARE. The
# first batch of a backward pass is one gradient, to start the engine early; each further one is
# twice as large, up to the limit.
BATCH_BYTES: Final = 256 << 10
MIN_SHARE: Final = 1 << 10


class Group:
    """`count` gradients that are reduced together, as soon as the last of them is ready."""

    def __init__(self, name: str, count: int) -> None:
        self._name = name
        self._count = count
        self._waiting: dict[int, tuple[torch.Tensor, int]] = {}  # by position, with its stream
        self.handle = 0
        self._results: dict[int, torch.Tensor] = {}
        # Autograd may run hooks on several threads.
        self._lock = threading.Lock()

    def add(
        self, position: int, tensor: torch.Tensor, stream: int, options: Reduction,
        weight: float | None = None,
    ) -> None:  # fmt: skip
        """Add the gradient of one member; on a device it is dense, and `stream` computes it.

        Sends all of them if it is the last.
        """
        with self._lock:
            self._waiting[position] = tensor, stream
            if len(self._waiting) == self._count:
                self._submit(options, weight)

    def flush(self, options: Reduction, weight: float | None = None) -> None:
        """Send the gradients that are ready: the other members are frozen."""
        with self._lock:
            if self._waiting:
                self._submit(options, weight)

    def _submit(self, options: Reduction, weight: float | None = None) -> None:
        order = sorted(self._waiting)  # arrival may differ between ranks
        tensors, streams = zip(*(self._waiting[position] for position in order), strict=True)
        self._waiting = {}
        self._results = dict(zip(order, tensors, strict=True))
        self.handle = verbs.reduce_async(
            "grouped_allreduce", tensors, True, self._name, options.op, *options.factors,
            process_set=options.process_set, streams=streams, weight=weight,
        )  # fmt: skip

    def finish(self, position: int) -> torch.Tensor:
        """Wait for the group if that was not done yet; its error is raised once."""
        if self.handle:
            try:
                synchronize(self.handle)
            except Exception:
                self.handle = 0
                raise
            self.handle = 0
        return self._results.pop(position)

    def abandon(self) -> None:
        """Forget everything waiting and in flight."""
        if self.handle:
            handles.abandon(self.handle, None)
        self.handle = 0
        self._waiting, self._results = {}, {}
