"""Looks at gradients that the engine does not look at, before they are reduced.

Those of optimizers that are not ours, compressed, grouped, sparse ones, and those on devices. All
others are looked at where they are summed (hororing/guard/sums.py).
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from hororing.guard.sums import Note
from hororing.torch._optimizer.following import unfrozen
from hororing.torch._tensor.uncompiled import uncompiled

_LOOKED_AT: Final = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip


class Finite:
    """Calls `note` for each gradient that is not finite.

    Its sum is finite if all elements are, except when it overflows. On a device nobody waits for it
    before `settle`. `shown` makes a parameter's name of that of a gradient.
    """

    def __init__(self, note: Callable[[Note], None], shown: Callable[[str], str]) -> None:
        self._note, self._shown = note, shown
        self._hooked: dict[torch.Tensor, Any] = {}
        self._last = ""  # whose gradient was finite
        self._on_device: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def follow(self, names: Mapping[torch.Tensor, str]) -> None:
        """Look at the gradients of these parameters, by their names, in hooks."""
        for param in [each for each in self._hooked if each not in names]:
            self._hooked.pop(param).remove()
        for param, name in names.items():
            known = param in self._hooked or param.dtype not in _LOOKED_AT
            if not known and not param.is_inference():
                with unfrozen(param):
                    hook = partial(self.look, name)
                    self._hooked[param] = param.register_hook(hook)  # type: ignore[no-untyped-call]

    @uncompiled
    def look(self, name: str, grad: torch.Tensor) -> None:
        """Look at a gradient."""
        grad = getattr(grad, "_local_tensor", grad)  # of a DTensor: the shard of this rank
        if grad.layout is torch.sparse_coo:
            grad = grad._values()
        if grad.layout is not torch.strided or grad.dtype not in _LOOKED_AT:
            return
        grad = grad.detach()
        total = grad.sum(dtype=torch.float32 if grad.dtype.itemsize == 2 else None)
        if not grad.is_cpu:
            self._on_device.append((name, total, grad))
        elif cmath.isfinite(total.item()):
            self._last = name
        else:
            self._count(name, grad)

    def settle(self) -> None:
        """Wait for the device, and note its gradients. REQUIRES: the backward pass has ended."""
        seen, self._on_device = self._on_device, []
        if not seen:
            self._last = ""  # the next backward pass begins anew
            return
        finite = torch.isfinite(
            torch.stack([total.abs().to(torch.float64) for _, total, _ in seen])
        )
        for (name, _, grad), fine in zip(seen, finite.tolist(), strict=True):
            if fine:
                self._last = name
            else:
                self._count(name, grad)
        self._last = ""

    def _count(self, name: str, grad: torch.Tensor) -> None:
        """Note a gradient that is not finite; a sum may be so although all its elements are."""
        bad = int((~torch.isfinite(grad)).sum())
        if not bad:
            self._last = name
            return
        value = "NaN" if bool(torch.isnan(grad).any()) else "infinite"
        above = self._last and self._shown(self._last)
        self._note(Note(self._shown(name), value, bad, grad.numel(), above))
