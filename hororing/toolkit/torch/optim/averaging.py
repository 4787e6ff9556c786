"""How an optimizer of hierarchical SGD averages weights and momenta, at once or delayed.

All that a checkpoint needs is in `optimizer.state[KEY]`, which state_dict() holds and
broadcast_optimizer_state sends:

    step      steps that are done: the one counter
    averaged  the step after which all ranks had the same weights
    last      step and period of the latest average
    previous, outer        weights and momentum of the outer optimizer, by position
    pending   changes by a delayed average, and the step after which they are due
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hororing.extension import ProcessSet
from hororing.numpy import rank
from hororing.toolkit.large_batch.hierarchy import shares
from hororing.toolkit.large_batch.plan import Plan, Request
from hororing.toolkit.torch.optim import momenta
from hororing.toolkit.torch.optim.averages import Average
from hororing.torch.extension import Distributed, parameters

KEY = "hierarchical_sgd"


class _Flight(NamedTuple):
    """A delayed average."""

    average: Average
    snapshot: list[torch.Tensor]  # weights when it began
    buffers: list[torch.Tensor]
    is_top: bool
    due: int  # step
    lrs: list[float]  # by position, when it began


class Averaging(Distributed):
    """Averages of weights, buffers and momenta over the ranks of a level."""

    _why_no_weights = "this optimizer averages parameters, not gradients"
    _request: Request  # this and what follows: of the class, which serves one optimizer
    _plan: Plan
    _momentum_keys: frozenset[str]
    _buffers: list[torch.Tensor]
    _variances: tuple[bool, ...]  # which of the buffers are that, and never negative
    _level_sets: list[ProcessSet]
    _flight: _Flight | None

    @property
    def _clock(self) -> dict[str, Any]:
        state: Any = self.state  # keys that are no tensors are left alone by torch
        clock: dict[str, Any] = state[KEY]
        return clock

    @property
    def steps_done(self) -> int:
        """Steps that are done, warm-up included."""
        return int(self._clock["step"])

    @property
    def last_average(self) -> tuple[int, int] | None:
        """Step and period of the latest average that began; None before the first."""
        return self._clock.get("last")

    # -- averages ---------------------------------------------------------------------------------

    def _weights(self) -> list[torch.Tensor]:
        """Return the tensor to average for each parameter: its master copy, if it has one."""
        return [self._master(param) for param in parameters(self)]

    def _master(self, param: torch.Tensor) -> torch.Tensor:
        for key, value in self.state.get(param, {}).items():
            if momenta.is_master(key) and isinstance(value, torch.Tensor):
                return value
        return param

    def _adopt_masters(self) -> None:
        for param in parameters(self):
            master = self._master(param)
            if master is not param:
                param.copy_(master)

    def _name(self, level: int) -> str:
        return f"{self._settings.prefix}.average.{level}"

    def _start(
        self, level: int, tensors: Sequence[torch.Tensor], in_place: bool, part: str = ""
    ) -> Average:
        plan, members = self._plan, self._level_sets[level]
        share = None
        if plan.weights is not None:
            share = shares(plan.weights, members.ranks)[rank()]
        return Average(f"{self._name(level)}{part}", tensors, members, share, in_place)

    @torch.no_grad()
    def _average(self, level: int, steps: int) -> None:
        plan = self._plan
        is_top = level == len(plan.hierarchy.levels) - 1
        if plan.delay_steps:
            self._take_off(level, is_top, steps)
            return
        if not plan.overlap_backward:  # then they are averaged already
            self._start(level, self._averaged(level), in_place=True).finish()
        if is_top and plan.outer is not None:
            lrs = self._learning_rates()
            for at, weight in enumerate(self._weights()):
                weight.copy_(self._outer_update(at, weight, lrs[at]))
        self._adopt_masters()
        if plan.momentum == "reset":
            momenta.reset(self, parameters(self), self._momentum_keys)
        if is_top:
            self._clock["averaged"] = steps

    def _averaged(self, level: int) -> list[torch.Tensor]:
        tensors = [*self._weights(), *self._buffers]
        if self._plan.momentum == "average":
            params = parameters(self)
            mine = dict(momenta.held(self, params, self._momentum_keys))
            members = self._level_sets[level]
            tensors += momenta.to_average(mine, params, members, self._name(level))
        return tensors

    @torch.no_grad()
    def final_average(self) -> None:
        """Give all ranks the same weights and buffers now: before evaluation and checkpoints.

        Collective: all ranks call it, after the same step; a rank that calls it alone waits until
        `HORORING_STALL_SHUTDOWN_S`, if that is set. What is averaged is as at a sync point of the
        last level, without an outer step; a delayed average is merged before. Training may go on
        after it. Does nothing where all ranks agree already.

        Raises
        ------
        AssertionError : between backward() and step().
        """
        self._check_nothing_in_flight("final_average() after backward()")
        plan, steps = self._plan, self.steps_done
        top = len(self._level_sets) - 1
        self._merge(None)
        if self._clock.get("averaged") == steps:
            return
        if plan.hierarchy.is_local(steps - 1) and steps > 0:
            tensors = self._averaged(top)
        else:  # after a synchronous step weights are equal, and their mean might be rounded
            tensors = self._buffers
        if tensors:
            self._start(top, tensors, in_place=True, part=".final").finish()
        self._adopt_masters()
        if plan.momentum == "reset":
            momenta.reset(self, parameters(self), self._momentum_keys)
        self._clock["averaged"] = steps

    # -- the outer optimizer ----------------------------------------------------------------------

    def _begin_outer(self, clock: dict[str, Any]) -> None:
        previous = clock.setdefault("previous", [])
        momentum = clock.setdefault("outer", [])
        for weight in self._weights()[len(previous) :]:  # all, or those of a new group
            previous.append(_wide(weight.detach()).clone())
            momentum.append(torch.zeros_like(previous[-1]))

    def _learning_rates(self) -> list[float]:
        return [float(group["lr"]) for group in self.param_groups for _ in group["params"]]

    def _outer_update(self, at: int, mean: torch.Tensor, lr: float) -> torch.Tensor:
        """Return the weights after an outer step, wide; keep the state for the next one."""
        clock = self._clock
        assert self._plan.outer is not None
        new, momentum = self._plan.outer.update(
            clock["previous"][at], _wide(mean), clock["outer"][at], lr
        )
        clock["previous"][at], clock["outer"][at] = new.clone(), momentum
        result: torch.Tensor = new
        return result

    # -- delayed averages -------------------------------------------------------------------------

    def _take_off(self, level: int, is_top: bool, steps: int) -> None:
        snapshot = [weight.detach().clone() for weight in self._weights()]
        buffers = [buffer.detach().clone() for buffer in self._buffers]
        average = self._start(level, [*snapshot, *buffers], in_place=False)
        lrs = self._learning_rates() if self._plan.outer is not None else []
        due = steps + self._plan.delay_steps
        self._flight = _Flight(average, snapshot, buffers, is_top, due, lrs)

    @torch.no_grad()
    def _land(self) -> None:
        """Wait for the average in flight, and record its changes."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        means = flight.average.finish()
        changes = []
        for at, (old, mean) in enumerate(zip(flight.snapshot, means, strict=False)):
            if flight.is_top and self._plan.outer is not None:
                new = self._outer_update(at, mean, flight.lrs[at])
                changes.append((new - old).to(old.dtype))
            else:
                changes.append(mean - old)
        buffer_means = means[len(flight.snapshot) :]
        buffers = [
            (mean, mean - old) for mean, old in zip(buffer_means, flight.buffers, strict=True)
        ]
        self._clock["pending"] = {"due": flight.due, "changes": changes, "buffers": buffers}

    @torch.no_grad()
    def _merge(self, steps: int | None) -> None:
        """Add what a delayed average changes, if it is due after `steps`, or at once for None."""
        if self._flight is not None and (steps is None or self._flight.due <= steps):
            self._land()
        pending = self._clock.get("pending")
        if pending is None or (steps is not None and pending["due"] > steps):
            return
        del self._clock["pending"]
        for weight, change in zip(self._weights(), pending["changes"], strict=False):
            weight.add_(change)
        corrected = zip(self._buffers, self._variances, pending["buffers"], strict=True)
        for buffer, is_variance, (mean, change) in corrected:
            new = buffer + change
            buffer.copy_(torch.where(new < 0, mean, new) if is_variance else new)
        self._adopt_masters()
        if self._plan.momentum == "reset":
            momenta.reset(self, parameters(self), self._momentum_keys)


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of at least 32 bits per number."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
