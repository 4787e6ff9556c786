"""Which gradients are not finite, found in the train step, which may be a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

from hororing._requests.arguments import Max
from hororing.guard.sums import Note
from hororing.keras.backends import backend


class Flags:
    """The gradients that were not finite in the latest steps, before they were reduced.

    They are in two variables: for each variable of the optimizer the number of such elements, the
    largest of all ranks, and that of this rank.
    """

    def __init__(self, *, skips: bool) -> None:
        self.skips = skips
        self._names: list[str] = []
        self._sizes: list[int] = []
        self._found: Any = None  # variables, made in the first step
        self._own: Any = None

    def _make(self, variables: Sequence[Any]) -> None:
        self._names = [str(each.path) for each in variables]
        self._sizes = [int(np.prod(each.shape)) for each in variables]
        zeros = np.zeros(len(self._names), np.int32)
        self._found = keras.Variable(zeros, trainable=False, dtype="int32", name="not_finite")
        self._own = keras.Variable(zeros, trainable=False, dtype="int32", name="not_finite_here")

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
            fine = ops.cast(ops.isfinite(dense), "int32")
            bad[at] = ops.sum(1 - fine)
        worst = ops.stack([ops.cast(each, "int32") for each in bad])
        self._own.assign(ops.maximum(self._own, worst))
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
        return flags

    def take(self) -> list[Note] | None:
        """Return those of this rank, and forget them. None: all of all ranks were finite."""
        if self._found is None or not ops.convert_to_numpy(self._found).any():
            return None
        own = ops.convert_to_numpy(self._own)
        for each in (self._found, self._own):
            each.assign(np.zeros_like(own))
        return [
            Note(self._names[at], "not finite", int(own[at]), self._sizes[at], None)
            for at in np.flatnonzero(own)
        ]


def both(one: Any, other: Any) -> Any:
    """Return whether both conditions hold; None stands for one that always does."""
    if one is None or other is None:
        return other if one is None else one
    return ops.logical_and(one, other)


def is_maximum(variable: Any) -> bool:
    """Whether its gradient replaces it, as for the scales of float8."""
    return bool(getattr(variable, "overwrite_with_gradient", False))
