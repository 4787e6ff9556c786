"""An average of tensors over a process set, in flight."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import hororing.numpy as hvd
from hororing.extension import ProcessSet, abandon
from hororing.torch.ops import grouped_allreduce_async_, synchronize


class Average:
    """The mean of `tensors` over the ranks of `members`: started when it is made.

    Tensors keep dtype and memory; 16-bit ones are summed in float32 and rounded once. A rank that
    has called `join` does not count: each rank's weight is sent beside the tensors, and the result
    is divided by their total, which is 1 if no rank is missing.

    Parameters
    ----------
    name : str
        Of the request, the same on all ranks; one in flight at a time.
    tensors : sequence of torch.Tensor
        At least one; the same shapes and dtypes on every rank, on one device.
    share : float or None
        This rank's weight, of a total of 1; None: equal weights.
    in_place : bool
        Put the mean into `tensors`, which must not be used before `finish`; otherwise it is
        that of their current values, in new tensors.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[torch.Tensor],
        members: ProcessSet,
        share: float | None,
        in_place: bool,
    ) -> None:
        self._targets = [tensor.detach() for tensor in tensors] if in_place else None
        with torch.no_grad():
            if share is not None:
                self._values = [tensor.detach() * share for tensor in tensors]
            else:
                self._values = self._targets or [tensor.detach().clone() for tensor in tensors]
        device = tensors[0].device
        self._presence = torch.tensor(
            [1.0 if share is None else share], dtype=torch.float64, device=device
        )
        self._handle = 0
        if len(members.ranks) == 1:
            return
        self._handle = grouped_allreduce_async_(
            [*self._values, self._presence], name=name,
            op=hvd.Average if share is None else hvd.Sum, process_set=members,
        )  # fmt: skip

    @torch.no_grad()
    def finish(self) -> list[torch.Tensor]:
        """Wait for the mean and return it."""
        if self._handle:
            synchronize(self._handle)
        total = self._presence.item()
        if abs(total - 1.0) > 1e-6:
            for value in self._values:
                value.div_(total)
        if self._targets is None:
            return self._values
        for target, value in zip(self._targets, self._values, strict=True):
            if target is not value:
                target.copy_(value)
        return self._targets

    def abandon(self) -> None:
        """Forget the result."""
        if self._handle:
            abandon(self._handle, self._values)


def averageable(tensor: torch.Tensor) -> bool:
    """Whether a mean makes sense: not for counters and masks."""
    return tensor.is_floating_point() or tensor.is_complex()
