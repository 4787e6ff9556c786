"""Learning rate schedules of hororing.toolkit.large_batch for torch's optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler


class ScheduleLR(LRScheduler):
    """Sets learning rates to ``schedule(step)``, where step counts calls of ``scheduler.step()``.

    Call it once per update of the weights, after ``optimizer.step()``. torch's SGD and LARS with
    ``momentum_form="unscaled"`` keep the rate out of their momentum, so there is nothing to correct
    when it changes.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Any torch optimizer, distributed or not. Its own ``lr`` is replaced.
    schedule : callable
        A function of the step, such as `WarmupPolynomial`. Not saved with the scheduler.
    factors : sequence of float, optional
        The factor of each parameter group's rate; None: 1.
    last_epoch : int, optional
        The last step, if training is resumed without a state_dict.

    Examples
    --------
    >>> schedule = WarmupPolynomial(peak=7.4, total_steps=27_000, warmup_steps=1_570)
    >>> scheduler = ScheduleLR(optimizer, schedule)
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[int], float],
        factors: Sequence[float] | None = None,
        last_epoch: int = -1,
    ) -> None:
        if not callable(schedule):
            raise TypeError(f"schedule={schedule!r} must be a function of the step")
        groups = len(optimizer.param_groups)
        if factors is not None and len(factors) != groups:
            raise ValueError(
                f"factors={list(factors)}: the optimizer has {groups} parameter groups"
            )
        self.schedule = schedule
        self.factors = [1.0] * groups if factors is None else [float(each) for each in factors]
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[Any]:
        """Return the rate of each group; groups that were added later have the factor 1."""
        rate = self.schedule(self.last_epoch)
        added = len(self.optimizer.param_groups) - len(self.factors)
        return [rate * factor for factor in [*self.factors, *[1.0] * added]]

    def state_dict(self) -> dict[str, Any]:
        """Return the saved state: everything but the schedule."""
        return {key: value for key, value in super().state_dict().items() if key != "schedule"}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`, and set the rates of its step.

        torch's schedulers leave the rates to the optimizer's state, which may be loaded before a
        scheduler is made, and that sets the first rate.
        """
        super().load_state_dict(state_dict)
        self._last_lr = self.get_lr()
        for group, rate in zip(self.optimizer.param_groups, self._last_lr, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
