"""Looks at gradients when autograd has computed them, before they are accumulated and reduced."""

from __future__ import annotations

import cmath
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import torch

from hororing.guard.watch import Note
from hororing.torch._optimizer.following import unfrozen
from hororing.torch._tensor.uncompiled import uncompiled

# The type in which each type is added up.
_SUMS: Final = {
    torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.float32: torch.float32,
    torch.float64: torch.float64, torch.complex64: torch.complex64,
    torch.complex128: torch.complex128,
}  # fmt: skip


class Finite:
    """Calls `note` for each gradient that is not finite.

    A sum is finite if all its elements are, except when it overflows; so one sum, at the speed of
    memory, is all that a finite gradient costs. On a device nobody waits for it before `settle`.
    """

    def __init__(self, note: Callable[[Note], None]) -> None:
        self._note = note
        self._hooked: dict[torch.Tensor, Any] = {}
        self._last = ""  # whose gradient was finite
        self._on_device: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def follow(self, names: Mapping[torch.Tensor, str]) -> None:
        """Look at the gradients of these parameters, by their names."""
        for param in [each for each in self._hooked if each not in names]:
            self._hooked.pop(param).remove()
        for param, name in names.items():
            if param not in self._hooked and param.dtype in _SUMS and not param.is_inference():
                with unfrozen(param):
                    hook = partial(self._look, name)
                    self._hooked[param] = param.register_hook(hook)  # type: ignore[no-untyped-call]

    @uncompiled
    def _look(self, name: str, grad: torch.Tensor) -> None:
        if grad.layout is torch.sparse_coo:
            grad = grad._values()
        if grad.layout is not torch.strided or grad.dtype not in _SUMS:
            return
        grad = grad.detach()
        total = grad.sum(dtype=_SUMS[grad.dtype])
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
        """Note a gradient whose sum is not finite, unless all its elements are."""
        bad = int((~torch.isfinite(grad)).sum())
        if not bad:
            self._last = name
            return
        value = "NaN" if bool(torch.isnan(grad).any()) else "infinite"
        self._note(Note(name, value, bad, grad.numel(), self._last))
