"""Weights that are updated and averaged bucket by bucket while backward still runs.

In the step whose end is a sync point: gradient final -> update -> average of the bucket begins. A
bucket is some parameters, the same on all ranks, in reverse order of registration, in which
gradients come. Some parameters wait for `step()`: those named as late, those with more gradients
than backward passes (reentrant checkpoints), and those without a gradient. Earlier steps show which
these are, so the first step of a run has no early updates.

An operation that saved a weight and runs its backward after the weight's gradient is final would
use another weight: autograd raises an error then ("modified by an inplace operation").
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from hororing.toolkit.torch.optim.averages import Average
from hororing.torch.extension import parameters

BUCKET_BYTES: Final = 4 << 20


class Averaging(Protocol):
    """What is needed of the optimizer whose weights are updated early, beside its parameters."""

    backward_passes_per_step: int

    def _update_early(self, params: Sequence[torch.Tensor], part: str) -> Average: ...

    def _average_part(self, params: Sequence[torch.Tensor], part: str) -> Average: ...


class EarlyUpdates:
    """Early updates of one optimizer. `late`: parameters that are not updated inside backward."""

    def __init__(self, optimizer: Averaging, late: Sequence[torch.Tensor]) -> None:
        self._optimizer = weakref.ref[Any](optimizer)  # hooks of its parameters lead here
        self._named_late = frozenset(map(id, late))  # the same on all ranks
        self._late = set(self._named_late)
        self._buckets: list[list[torch.Tensor]] = []
        self._bucket_of: dict[int, int] = {}
        self._armed = False
        self._observed = False  # a step has shown which gradients come repeatedly
        self._lock = threading.Lock()  # autograd may run hooks on several threads
        self._restart()

    def _restart(self) -> None:
        self._seen: Counter[int] = Counter()
        self._missing = [len(bucket) for bucket in self._buckets]
        self._updated: dict[int, Average] = {}  # by bucket

    @property
    def begun(self) -> bool:
        """Whether weights have been updated in a step that is not over."""
        return bool(self._updated)

    def arm(self, armed: bool) -> None:
        """Begin a step; `armed`: it ends with an average."""
        optimizer = self._optimizer()
        assert optimizer is not None
        passes = optimizer.backward_passes_per_step
        self._late |= {key for key, times in self._seen.items() if times > passes}
        self._observed |= bool(self._seen)
        self._fill_buckets(parameters(optimizer))
        self._armed = armed and self._observed
        self._restart()

    def forget(self) -> None:
        """Begin the step anew."""
        self._restart()

    def _fill_buckets(self, params: list[torch.Tensor]) -> None:
        new = [param for param in reversed(params) if id(param) not in self._bucket_of]
        for late in (False, True):
            size_bytes = BUCKET_BYTES  # none of them is in the last bucket so far
            for param in new:
                if (id(param) in self._named_late) is not late:
                    continue
                if size_bytes >= BUCKET_BYTES:
                    size_bytes = 0
                    self._buckets.append([])
                size_bytes += param.nbytes
                self._buckets[-1].append(param)
                self._bucket_of[id(param)] = len(self._buckets) - 1
                if param.requires_grad:
                    register: Any = param.register_post_accumulate_grad_hook
                    register(self._on_gradient)

    def _on_gradient(self, param: torch.Tensor) -> None:
        optimizer = self._optimizer()
        if optimizer is None:
            return
        with self._lock:
            key = id(param)
            self._seen[key] += 1
            if not self._armed:
                return
            at = self._bucket_of[key]
            passes = optimizer.backward_passes_per_step
            if at in self._updated:
                raise AssertionError(
                    f"HierarchicalSGD: parameter {parameters_index(optimizer, param)} got a "
                    "gradient after it was updated inside backward (overlap_backward=True): it is "
                    "shared or computed again. Pass it in late_parameters"
                )
            if self._seen[key] != passes:
                return
            self._missing[at] -= 1
            bucket = self._buckets[at]
            if self._missing[at] == 0 and self._late.isdisjoint(map(id, bucket)):
                self._updated[at] = optimizer._update_early(bucket, f".{at}")

    def not_updated(self) -> list[torch.Tensor]:
        """Return the parameters that remain for the wrapped optimizer's step."""
        buckets = enumerate(self._buckets)
        return [param for at, bucket in buckets if at not in self._updated for param in bucket]

    def finish(self) -> None:
        """Begin the averages that are left, and wait for all."""
        optimizer = self._optimizer()
        assert optimizer is not None
        for at, bucket in enumerate(self._buckets):
            if at not in self._updated:
                self._updated[at] = optimizer._average_part(bucket, f".{at}")
        for average in self._updated.values():
            average.finish()
        self._observed |= bool(self._seen)
        self._restart()


def parameters_index(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> int:
    """The position of `param` among all of the optimizer's."""
    return next(at for at, each in enumerate(parameters(optimizer)) if each is param)
