"""How many gradients are sent at once, and groups of them, which are submitted as one."""

from __future__ import annotations

import threading
from typing import Final

import torch

from hororing import collectives
from hororing.reduction import Reduction
from hororing.torch.ops import synchronize
from hororing.torch.verbs import verbs

# Gradients are sent in batches of so many bytes, each at least so heavy. The first batch of a
# backward pass is one gradient, so that the engine has something to do; each is twice as large as
# the one before until they are full.
BATCH_BYTES: Final = 256 << 10
MIN_WEIGHT: Final = 1 << 10


class Group:
    """So many gradients that are reduced together, when the last of them is there."""

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
        """Take the gradient of one member, dense on a device, where `stream` computes it.

        Send all when it is the last.
        """
        with self._lock:
            self._waiting[position] = tensor, stream
            if len(self._waiting) == self._count:
                self._submit(options, weight)

    def flush(self, options: Reduction, weight: float | None = None) -> None:
        """Send what is there: the other members are frozen."""
        with self._lock:
            if self._waiting:
                self._submit(options, weight)

    def _submit(self, options: Reduction, weight: float | None = None) -> None:
        order = sorted(self._waiting)  # ranks must agree on it, and arrival differs
        tensors, streams = zip(*(self._waiting[position] for position in order), strict=True)
        self._waiting = {}
        self._results = dict(zip(order, tensors, strict=True))
        self.handle = verbs.reduce_async(
            "grouped_allreduce", tensors, True, self._name, options.op, *options.factors,
            process_set=options.process_set, streams=streams, weight=weight,
        )  # fmt: skip

    def finish(self, position: int) -> torch.Tensor:
        """Wait for the group, if nobody has yet; its error is raised once."""
        if self.handle:
            try:
                synchronize(self.handle)
            except Exception:
                self.handle = 0
                raise
            self.handle = 0
        return self._results.pop(position)

    def abandon(self) -> None:
        """Forget what is there and what is in flight."""
        if self.handle:
            collectives.abandon(self.handle, None)
        self.handle = 0
        self._waiting, self._results = {}, {}
