"""Adds up gradients in Keras variables.

With weights, the sums are weighted means of the passes so far, as in
hororing/torch/_optimizer/weights.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from hororing._adapters.optimizer_options import Settings


class VariableAccumulator:
    """See `Accumulator`. Its variables are not saved.

    So a file that is saved in the middle of a step loads without hororing.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        maxima: Sequence[bool],
        settings: Settings,
        dense: Callable[[Any], Any],
        weight_type: str = "float64",
    ) -> None:
        self._maxima = maxima
        self._passes = settings.passes
        self._average = settings.average_passes
        self._dense = dense
        self._sums = [
            keras.Variable(
                initializer="zeros",
                shape=variable.shape,
                dtype=keras.backend.standardize_dtype(variable.dtype),
                trainable=False,
                name="gradient_sum",
            )
            for variable in variables
        ]
        self._count = keras.Variable(
            initializer="zeros", shape=(), dtype="int32", trainable=False, name="gradient_count"
        )
        self._weight = keras.Variable(
            initializer="zeros", shape=(), dtype=weight_type, trainable=False, name="sum_of_weights"
        )
        self.variables = [*self._sums, self._count, self._weight]
        # Variables that have had gradients. Ranks must agree on these, also in a graph.
        self._live: set[int] = set()

    def add(
        self, gradients: Sequence[Any], places: Sequence[int], weight: Any = None
    ) -> tuple[Any, Callable[[], tuple[list[Any], Any]]]:
        """Add gradients to the sums."""
        shares = None if weight is None else self._shares(weight)
        for gradient, place in zip(gradients, places, strict=True):
            if gradient is None:
                continue
            self._live.add(place)
            total = self._sums[place]
            new = ops.cast(self._dense(gradient), total.dtype)
            if self._maxima[place]:
                total.assign(ops.maximum(total, new))
            elif shares is None:
                total.assign(ops.add(total, new))
            else:
                total.assign(ops.add(_times(total, shares[0]), _times(new, shares[1])))
        self._count.assign_add(1)

        def take() -> tuple[list[Any], Any]:
            average = self._average and weight is None
            totals = [
                self._total(place, average) if place in self._live else None for place in places
            ]
            summed = None if weight is None else ops.copy(self._weight)
            self.reset()
            return totals, summed

        return ops.equal(self._count, self._passes), take

    def reset(self) -> None:
        """Forget all gradients."""
        self._weight.assign(0)
        for place in self._live:
            total = self._sums[place]
            total.assign(ops.zeros(total.shape, total.dtype))
        self._count.assign(0)

    def _total(self, place: int, average: bool) -> Any:
        if average and not self._maxima[place]:
            return ops.divide(self._sums[place], self._passes)
        return ops.copy(self._sums[place])

    def _shares(self, weight: Any) -> tuple[Any, Any]:
        """Return the factors of the sums and of this pass; 0 while all weights are 0."""
        before = ops.copy(self._weight)
        total = ops.add(before, weight)
        self._weight.assign(total)
        divisor = ops.where(total > 0, total, 1)
        return ops.divide(before, divisor), ops.divide(weight, divisor)


def _times(tensor: Any, factor: Any) -> Any:
    """Multiply; 0 times anything is 0."""
    product = ops.multiply(tensor, ops.cast(factor, tensor.dtype))
    return ops.where(factor > 0, product, ops.zeros_like(product))
