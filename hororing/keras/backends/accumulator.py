"""Adds up gradients in Keras variables: for frameworks in which a train step may assign some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops

from hororing.optimizer_settings import Settings


class VariableAccumulator:
    """`Accumulator` for TensorFlow and torch. Its variables are not the optimizer's.

    So they are not saved, and a file saved in the middle of a step loads without hororing.
    """

    def __init__(
        self,
        variables: Sequence[Any],
        maxima: Sequence[bool],
        settings: Settings,
        dense: Callable[[Any], Any],
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
        # Variables that have had gradients. Ranks must agree on these, also in a graph.
        self._live: set[int] = set()

    def add(
        self, gradients: Sequence[Any], places: Sequence[int]
    ) -> tuple[Any, Callable[[], list[Any]]]:
        """Add gradients to the sums."""
        for gradient, place in zip(gradients, places, strict=True):
            if gradient is None:
                continue
            self._live.add(place)
            total = self._sums[place]
            new = ops.cast(self._dense(gradient), total.dtype)
            combine = ops.maximum if self._maxima[place] else ops.add
            total.assign(combine(total, new))
        self._count.assign_add(1)

        def take() -> list[Any]:
            totals = [self._total(place) if place in self._live else None for place in places]
            for place in self._live:
                self._sums[place].assign(ops.zeros_like(self._sums[place]))
            self._count.assign(0)
            return totals

        return ops.equal(self._count, self._passes), take

    def _total(self, place: int) -> Any:
        if self._average and not self._maxima[place]:
            return ops.divide(self._sums[place], self._passes)
        return ops.copy(self._sums[place])
