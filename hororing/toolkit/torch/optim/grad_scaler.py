"""GradScaler whose decision to skip a step is the same on all ranks."""

from __future__ import annotations

from typing import Any

import torch

from hororing.extension import ProcessSet, check_member, default_name, global_process_set
from hororing.numpy import Max, size
from hororing.torch.ops import allreduce


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler`, but an infinity on one rank makes all ranks skip the step.

    Infinities spread through an allreduce, so torch's own scaler makes the same decision on all
    ranks if gradients are averaged over all of them. If they are averaged in groups, or only
    periodically (hierarchical and local SGD), or with op=Adasum, one rank may step and another may
    not, and their scales diverge. This scaler reduces its findings, 4 bytes for each optimizer and
    step, over `process_set`.

    Use it like torch's. All ranks of the set must create it, and call `unscale_`, `step` and
    `update` for the same optimizers in the same order. Scale and growth stay equal if they start
    equal.

    Parameters
    ----------
    device : str, optional
        Of the scale: "cpu" or "cuda".
    init_scale, growth_factor, backoff_factor, growth_interval, enabled : optional
        As for torch's.
    process_set : ProcessSet, optional
        The ranks that must make the same decision: those whose weights are ever averaged.

    Examples
    --------
    >>> scaler = GradScaler()
    >>> optimizer.zero_grad()
    >>> scaler.scale(model(torch.ones(4, 3)).square().mean()).backward()
    >>> scaler.step(optimizer)
    >>> scaler.update()
    """

    def __init__(
        self,
        device: str = "cpu",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        process_set: ProcessSet = global_process_set,
    ) -> None:
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        size()  # NotInitializedError before init()
        self._members = process_set
        self._name = str(default_name("grad_scaler", check_member(process_set, "GradScaler")))

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any
    ) -> dict[torch.device, torch.Tensor]:
        """Agree on the infinities that torch has found, before and within `step`."""
        found = super()._unscale_grads_(optimizer, *args, **kwargs)
        if len(self._members.ranks) == 1:
            return dict(found)
        here = torch.zeros((), dtype=torch.float32, device="cpu")
        for each in found.values():
            here = torch.maximum(here, each.detach().cpu())
        everywhere = allreduce(here, name=self._name, op=Max, process_set=self._members)
        # A rank whose parameters have no gradient found nothing, and must skip with the others.
        devices = found or {optimizer.param_groups[0]["params"][0].device: here}
        return {device: everywhere.to(device) for device in devices}
