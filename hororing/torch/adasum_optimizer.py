"""The optimizer of op=Adasum: each rank steps by itself, and what is combined are the changes.

    old = parameters;  local step;  delta = parameters - old;  parameters = old + Adasum(deltas)

All of it happens in `step()`. Horovod steps each parameter in its backward hook instead, which
hides the reduction behind backward, but then gradients can be neither clipped nor unscaled, and
what an optimizer counts or computes over all its parameters goes wrong.

Source: S. Maleki et al., "Scaling distributed training with adaptive summation", 2020,
arXiv:2006.02924.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

import torch

from hororing import timeline
from hororing.torch.gradient import Shared, Slot, one_pass_too_many
from hororing.torch.gradient_optimizer import Distributed
from hororing.torch.reducer import Reducer, collect


class _DeltaSlot(Slot):
    """The change of one parameter. The hook only counts passes, of this parameter."""

    __slots__ = ("live",)

    def __init__(self, name: str, param: torch.Tensor, shared: Shared) -> None:
        super().__init__(name, param, shared)
        # Has ever needed a gradient. Later a step may change it also while it is frozen: an old
        # gradient, weight decay, momentum.
        self.live = False

    def on_gradient(self, param: torch.Tensor) -> None:
        """Take note of a backward pass."""
        passes = self.shared.passes
        if self.seen >= passes:
            raise one_pass_too_many(self.name, passes, "belong to a step that was not taken")
        self.seen += 1
        self.sent = self.seen == passes
        self.shared.begun = True

    def rest(self) -> None:
        """Be ready for the next step."""
        super().rest()
        self.seen = 0


_Before = deque[tuple[torch.Tensor, _DeltaSlot, torch.Tensor]]


class _DeltaReducer(Reducer):
    slot_type = _DeltaSlot

    def arrange(self) -> None:
        """Count the passes of all parameters: changes are this optimizer's own."""
        self._followed = []
        for param, slot in self._slots.values():
            if slot.hook is None and param.requires_grad:
                self._hook(param, slot)

    def copies(self) -> _Before:
        """Return the parameters as they are, each with its slot."""
        self._shared.tracing = timeline.enabled()
        before: _Before = deque()
        for param, slot in self.follow():
            assert isinstance(slot, _DeltaSlot)
            slot.live |= param.requires_grad
            if slot.live:
                before.append((param, slot, param.detach().clone()))
        return before

    @torch.no_grad()
    def reduce(self, before: _Before) -> None:
        """Combine what has changed since `copies`. After an error parameters are as then."""
        changed: list[tuple[torch.Tensor, _DeltaSlot]] = []
        failures: list[Exception] = []
        while before:  # the copies go one by one
            param, slot, old = before.popleft()
            delta = param - old
            param.copy_(old)
            with collect(failures):
                slot.note_stream()
                slot.send(delta)
                changed.append((param, slot))
        for group in self._groups:
            with collect(failures):
                group.flush(self._shared.options)
        deltas = []
        for param, slot in changed:
            with collect(failures):
                deltas.append((param, slot.wait()))
                slot.rest()
        self._shared.flying.clear()
        if failures:
            raise failures[0]
        for param, delta in deltas:
            param.add_(delta)


class DeltaDistributed(Distributed):
    """What optimizers with op=Adasum add to their class, where there are several ranks."""

    _reducer_type = _DeltaReducer
    can_agree_on_steps = False  # a rank's own step comes before the reduction

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Take the wrapped optimizer's step on this rank, and combine the changes of all ranks.

        The loss of `closure` is that of this rank.
        """
        reducer = self._reducer
        assert isinstance(reducer, _DeltaReducer)
        self._opt_called = True  # learning rate schedulers look at it

        def counted() -> Any:
            self._start_over()
            assert closure is not None
            return closure()

        before = reducer.copies()
        # Without the hooks that torch has put around it: they are around this one.
        local: Any = super(Distributed, type(self)).step
        local = local.__wrapped__ if getattr(local, "hooked", False) else local
        result = local(self, *([] if closure is None else [counted]), **kwargs)
        try:
            reducer.reduce(before)
        finally:
            self._start_over()
        return result

    def synchronize(self) -> None:
        """Do nothing: gradients stay those of this rank, and `step()` waits for all there is."""

    def _reduce(self) -> None:
        """Do nothing: `step()` reduces the changes."""

    def _check_nothing_in_flight(self, what: str) -> None:
        """Do nothing: that is so but in `step()`."""

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
