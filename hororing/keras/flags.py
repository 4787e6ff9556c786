"""Which gradients are not finite, found in the train step, which may be a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hororing._requests.arguments import Max
from hororing.keras.backends import backend


class Flags:
    """The gradients that were not finite in the latest steps, before they were reduced.

    They are in a variable: for each variable of the optimizer the largest rank, counted from 1,
    whose gradient was not finite. It is the same on all ranks.
    """

    def __init__(self, rank: int, *, skips: bool) -> None:
        self.rank, self.skips = rank, skips
        self._names: list[str] = []
        self._found: Any = None  # variables, made in the first step
        self._own: Any = None

    def _make(self, variables: Sequence[Any]) -> None:
        self._names = [str(each.path) for each in variables]
        zeros = np.zeros(len(self._names), np.int32)
        self._found = keras.Variable(zeros, trainable=False, dtype="int32", name="not_finite")
        self._own = keras.Variable(self.rank + 1, trainable=False, dtype="int32", name="own_rank")

    def renew(self, rank: int) -> None:
        """Note the rank of this process, which changes in elastic jobs."""
        self.rank = rank
        if self._own is not None:
            self._own.assign(rank + 1)

    def look(self, optimizer: Any, grads: Sequence[Any], variables: Sequence[Any]) -> Any:
        """Look at gradients, in the train step. Return whether to take the step.

        None: it is taken in any case.
        """
        settings, known = optimizer._settings, optimizer._trainable_variables
        if self._found is None:
            backend().outside_graphs(lambda: self._make(known))
        bad: list[Any] = [ops.zeros((), "int32")] * len(self._names)
        for grad, variable in zip(grads, variables, strict=True):
            if grad is None or is_maximum(variable):
                continue
            at = optimizer._get_variable_index(variable)
            in_slices = hasattr(grad, "indices") and hasattr(grad, "dense_shape")
            dense = ops.convert_to_tensor(grad.values if in_slices else grad)
            fine = ops.all(ops.isfinite(dense))
            bad[at] = ops.where(fine, ops.zeros((), "int32"), self._own.value)
        worst = ops.stack(bad)
        if settings.reduces:
            name = f"{settings.name}/not_finite"
            worst = backend().reduce([worst], [name], [], settings.for_maxima(Max))[0]
        self._found.assign(ops.maximum(self._found, worst))
        return ops.equal(ops.max(worst), 0) if self.skips else None

    def attach(self, state: Any) -> Flags:
        """Return the flags of an optimizer's state, from its first step on: these, or those it has.

        RuntimeError if its train step was made without such ones.
        """
        if state.flags is None or state.flags.skips != self.skips:
            if state.was_called:
                raise RuntimeError(
                    "GuardCallback: the train step was made without it; call model.compile again"
                )
            state.flags = self
        flags: Flags = state.flags
        flags.renew(self.rank)
        return flags

    def take(self) -> list[tuple[str, int]]:
        """Return names and ranks, and forget them."""
        if self._found is None:
            return []
        found = ops.convert_to_numpy(self._found)
        if not found.any():
            return []
        self._found.assign(np.zeros_like(found))
        return [(self._names[at], int(found[at]) - 1) for at in np.flatnonzero(found)]


def both(one: Any, other: Any) -> Any:
    """Return whether both conditions hold; None stands for one that always does."""
    if one is None or other is None:
        return other if one is None else one
    return ops.logical_and(one, other)


def is_maximum(variable: Any) -> bool:
    """Whether its gradient replaces it, as for the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
