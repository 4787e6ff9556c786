"""What an optimizer checks in its first reduction: its names, and that ranks have equal parameters.

No hook has sent a gradient before that.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch

from hororing._adapters.optimizer_options import Reduction
from hororing._adapters.replica_check import ReplicaCheck
from hororing.errors import DuplicateNameError
from hororing.torch._optimizer.digests import digests
from hororing.torch._optimizer.step import collect

_REMEDY = (
    "Call hvd.broadcast_parameters(model.state_dict(), root_rank=0) before the first step, and "
    "after hvd.join(). If ranks create layers in another order, pass "
    "named_parameters=model.named_parameters(). HORORING_CHECK_PARAMETERS=0 turns this check off"
)


class Reducing(Protocol):
    """What is needed of an optimizer's reducer."""

    options: Reduction
    members: int
    reductions: int
    check: FirstReduction

    @property
    def reduced(self) -> dict[str, torch.Tensor]: ...

    def follow(self) -> object: ...

    def abandon(self) -> None: ...


class Watcher(Protocol):
    """What a guard does in each reduction, on all ranks. All may raise."""

    # Looks at a gradient, by its name, where the engine does not.
    look: Callable[[str, torch.Tensor], None] | None

    def send(self, reductions: int) -> None: ...  # after so many; does not block
    def send_flags(self) -> None: ...  # of a rank that reduces with no other
    def receive(self) -> None: ...
    def take_skip(self) -> bool: ...  # whether the step shall change nothing


_living: WeakSet[Reducing] = WeakSet()


class FirstReduction(ReplicaCheck):
    """The checks of one optimizer, of which `ReplicaCheck` repeats that of the parameters."""

    def __init__(self, reducer: Reducing, optimizer: torch.optim.Optimizer) -> None:
        super().__init__("DistributedOptimizer", reducer.options.process_set, _REMEDY)
        self.kind = type(optimizer)  # which it shares with its copies only
        self._is_first = True
        # The reducers that were there before, with the number of their reductions.
        self._before = WeakKeyDictionary({each: each.reductions for each in _living})
        self._rival: Callable[[], Reducing | None] = lambda: None  # a newer one in use
        _living.add(reducer)

    @property
    def is_due(self) -> bool:
        """See `ReplicaCheck`; also if a newer optimizer with the same names is used."""
        return super().is_due or self._rival() is not None

    def send(self, reducer: Reducing, failures: list[Exception]) -> None:
        """Check the names, and send digests of the parameters. REQUIRES: `is_due`."""
        reducer.follow()
        self._refuse_rivals(reducer)
        if super().is_due:
            named = reducer.reduced
            name = f"optimizer.{min(named, default='')}.parameters"
            with collect(failures):
                self.start(name, lambda: digests(named.items()))

    def _refuse_rivals(self, reducer: Reducing) -> None:
        """Refuse another optimizer that has a name of this one, if both are in use.

        One that the script has only kept may come into use again later, and is refused then.
        """
        names = {}
        if self._is_first:
            names = {each: name for each in list(_living) if (name := _clash(reducer, each))}
        elif (rival := self._rival()) is not None and (name := _clash(reducer, rival)):
            names = {rival: name}
        for other, name in names.items():
            if not self._is_first or other.reductions != self._before.get(other, 0):
                reducer.abandon()
                raise DuplicateNameError(
                    "DistributedOptimizer: two optimizers in use have different parameters of the "
                    f"name '{name}', so ranks could add gradients of one to those of the other. "
                    "Pass named_parameters with a different prefix to each of them, or delete the "
                    "one that is no longer needed"
                )
        for other in names:
            other.check._rival = weakref.ref(reducer)
        self._is_first, self._rival = False, lambda: None

    def receive(self, failures: list[Exception], abandon: Callable[[], None]) -> None:
        """Wait for the others' digests. Call `abandon`, and raise, if ranks have other names.

        Other ranks then lack some gradients, for which this rank must not wait.
        """
        if not self.is_started:
            return
        try:
            self.finish()
        except Exception as error:
            if not self.same_names:
                abandon()
                raise
            failures.append(error)


def _clash(reducer: Reducing, other: Reducing) -> str:
    """Return a name that the two have for different parameters, or "". Copies may have some."""
    if (
        other is reducer
        or other.members != reducer.members
        or other.check.kind is reducer.check.kind
    ):
        return ""
    mine, others = reducer.reduced, other.reduced
    return next((name for name in others if mine.get(name, others[name]) is not others[name]), "")
