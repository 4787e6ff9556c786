"""What the package changes in `torch.amp.GradScaler`, once per process.

It checks gradients before it calls `step()`. Its `unscale_` and `step` are wrapped here, to wait
for the gradients of distributed optimizers first. All ranks therefore find the same infinities and
skip the same steps.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch

from hororing.torch._optimizer.distributed import Distributed

_latest: list[weakref.ref[Any]] = []  # the scaler that has scaled the latest loss


def scale_in_use() -> float | None:
    """Return the scale of the latest loss, if a GradScaler has scaled it. Waits for its device."""
    found = _latest[0]() if _latest else None
    if found is None or not found.is_enabled() or found._scale is None:
        return None
    return float(found._scale.item())


def teach() -> None:
    """Wrap the methods of GradScaler that read gradients."""
    scaler = torch.amp.GradScaler
    unscale, step, look = scaler.unscale_, scaler.step, scaler._unscale_grads_
    scale = scaler.scale

    @functools.wraps(scale)
    def noted_scale(self: Any, outputs: Any) -> Any:
        _latest[:] = [weakref.ref(self)]
        return scale(self, outputs)

    def reduce_first(self: Any, optimizer: Any) -> None:
        if isinstance(optimizer, Distributed) and self.is_enabled():
            optimizer._reduce_for_scaler()
            if self._scale is not None:
                optimizer._note_scale(self._scale)

    @functools.wraps(unscale)
    def unscale_(self: Any, optimizer: Any) -> None:
        reduce_first(self, optimizer)
        unscale(self, optimizer)

    @functools.wraps(look)
    def unscale_grads(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        found = look(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, Distributed):
            optimizer._agree_on_infinities(found.values())
        return found

    @functools.wraps(step)
    def scaled_step(self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        reduce_first(self, optimizer)
        steps = optimizer._steps if isinstance(optimizer, Distributed) else None
        owed = steps.steps_to_replay if steps is not None else 0
        result = step(self, optimizer, *args, **kwargs)
        if isinstance(optimizer, Distributed) and self.is_enabled():
            optimizer._start_over()  # also when the step was skipped
            if steps is not None and owed and steps.steps_to_replay == owed:
                steps.take(lambda: None)  # it was taken before, and is replayed in this way
        return result

    scaler.scale = noted_scale  # type: ignore[method-assign]
    scaler.unscale_ = unscale_  # type: ignore[method-assign]
    scaler.step = scaled_step  # type: ignore[method-assign]
    scaler._unscale_grads_ = unscale_grads  # type: ignore[method-assign]
