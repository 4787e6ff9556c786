"""The optimizer of op=Adasum: each rank takes its own step, and the changes are combined.

    old = parameters;  local step;  delta = parameters - old;  parameters = old + Adasum(deltas)

All of it happens in `step()`. Horovod steps each parameter in its backward hook instead, which
hides the reduction behind backward. But then gradients can be neither clipped nor unscaled, and
optimizers that count steps or compute norms over all parameters go wrong.

Source: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020,
arXiv:2006.02924.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from threading import get_ident
from typing import Any, NoReturn

import torch

from hororing._engine import timeline
from hororing._requests.persistent import ASK, SENT
from hororing.torch._optimizer.distributed import Distributed
from hororing.torch._optimizer.following import Following
from hororing.torch._optimizer.gradient import Gradient
from hororing.torch._optimizer.step import collect, unexpected_pass


class _Delta(Gradient):
    """The change of one parameter. Its hook only counts backward passes."""

    __slots__ = ("live", "passed")

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        # Has ever needed a gradient. Later a step may change it also while it is frozen: an old
        # gradient, weight decay, momentum.
        self.live = False
        self.passed = 0  # the number of the latest pass that had it

    def on_gradient(self, param: torch.Tensor) -> None:
        """Note a backward pass, once, however many reentrant checkpoints use the parameter."""
        step = self.step
        if step.thread != get_ident():
            step.note_task(self.name)
        if self.passed == step.begun:
            return
        self.passed = step.begun
        if self.seen >= step.passes:
            raise unexpected_pass(self.name, step.passes, "belong to a step that was not taken")
        self.seen += 1
        self.state = SENT if self.seen == step.passes else ASK

    def reset(self) -> None:
        """Prepare for the next step."""
        super().reset()
        self.seen = 0


_Before = deque[tuple[torch.Tensor, _Delta, torch.Tensor]]


class Deltas(Following):
    """The changes of the parameters of one optimizer."""

    gradient_type = _Delta

    synchronized = True  # gradients stay those of this rank, and `step()` waits for the changes

    def synchronize(self) -> None:
        """Do nothing."""

    def copies(self) -> _Before:
        """Return copies of the parameters, each with the object for its change."""
        self.step.tracing = timeline.enabled()
        before: _Before = deque()
        entries = self.follow()
        self.send_checks()
        self.receive_checks()
        self.receive_watch()
        if self.step.failures:
            raise self.step.failures.pop()
        for param, delta in entries:
            assert isinstance(delta, _Delta)
            delta.live |= param.requires_grad
            if delta.live:
                before.append((param, delta, param.detach().clone()))
        return before

    @torch.no_grad()
    def reduce(self, before: _Before) -> None:
        """Combine the changes since `copies`. After an error, parameters are as they were then."""
        changed: list[tuple[torch.Tensor, _Delta]] = []
        failures: list[Exception] = []
        while before:  # frees the copies one by one
            param, delta, old = before.popleft()
            change = param - old
            param.copy_(old)
            with collect(failures):
                delta.note_stream()
                delta.send(change)
                changed.append((param, delta))
        for group in self.grouping.groups:
            with collect(failures):
                group.flush()
        reduced = []
        for param, delta in changed:
            with collect(failures):
                reduced.append((param, delta.wait()))
                delta.reset()
        self.step.pending.clear()
        self.reductions += 1
        if failures:
            raise failures[0]
        for param, change in reduced:
            param.add_(change)


class DeltaDistributed(Distributed):
    """The mixin of optimizers with op=Adasum, if there are several ranks."""

    _reducer_type = Deltas

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the wrapped optimizer's step on this rank, and combine the changes of all ranks.

        The loss of `closure` is that of this rank.
        """
        deltas = self._reducer
        assert isinstance(deltas, Deltas)
        self._opt_called = True  # learning rate schedulers check it

        def counted() -> Any:
            self._start_over()
            assert closure is not None
            return closure()

        before = deltas.copies()
        # Without torch's hooks, which run around this method.
        local: Any = super(Distributed, type(self)).step
        local = local.__wrapped__ if getattr(local, "hooked", False) else local
        result = local(self, *([] if closure is None else [counted]), **kwargs)
        try:
            deltas.reduce(before)
        finally:
            self._start_over()
        return result

    def _reduce(self) -> None:
        """Do nothing: `step()` reduces the changes."""

    def skip_synchronize(self) -> NoReturn:
        """Raise AssertionError: there is no step without a reduction."""
        raise AssertionError(
            "optimizer.skip_synchronize() cannot be used with op=Adasum, which reduces the changes "
            "of parameters in step(), not the gradients before it. Clip or unscale gradients "
            "before optimizer.step(), and leave out synchronize() and skip_synchronize()"
        )

    def _start_over(self) -> None:
        super()._start_over()
        if self._reducer is not None:
            self._reducer.abandon()

    def _agree_on_infinities(self, found: Iterable[torch.Tensor]) -> None:
        """Let all ranks skip a step if one of them must."""
        found = list(found)
        if self._on_any_rank("found_inf", any(map(bool, found))):
            for flag in found:
                flag.fill_(1.0)


DeltaDistributed.step = torch.optim.Optimizer.profile_hook_step(DeltaDistributed.step)  # type: ignore[method-assign]
DeltaDistributed.step.hooked = True  # type: ignore[attr-defined]
