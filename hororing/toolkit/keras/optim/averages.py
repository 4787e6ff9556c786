"""Averages of Keras variables over a process set, on any backend: they pass through NumPy."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
from keras import ops

import hororing.numpy as hvd
from hororing.extension import ProcessSet

Array = np.ndarray[Any, np.dtype[Any]]


def array_of(variable: Any) -> Array:
    """Return a copy of the variable's value."""
    return np.array(ops.convert_to_numpy(variable))


def averageable(variables: Sequence[Any]) -> list[Any]:
    """Return the variables of floating point, each once: no seeds and counters."""
    unique = {id(variable): variable for variable in variables}
    return [v for v in unique.values() if keras.backend.is_float_dtype(v.dtype)]


class Average:
    """The mean of arrays over the ranks of `members`: started when it is made.

    `share` is this rank's weight, of a total of 1; None: equal weights. A rank that has called
    `join` does not count. See hororing.toolkit.torch.optim.averages, which does the same.
    """

    def __init__(
        self, name: str, arrays: Sequence[Array], members: ProcessSet, share: float | None
    ) -> None:
        self._values = [
            array.copy() if share is None else (array * share).astype(array.dtype)
            for array in arrays
        ]
        self._presence = np.array([1.0 if share is None else share])
        self._handle = 0
        if len(members.ranks) > 1:
            op = hvd.Average if share is None else hvd.Sum
            self._handle = hvd.grouped_allreduce_async_(
                [*self._values, self._presence], name=name, op=op, process_set=members
            )

    def finish(self) -> list[Array]:
        """Wait for the means and return them."""
        if self._handle:
            hvd.synchronize(self._handle)
        total = float(self._presence[0])
        if abs(total - 1.0) > 1e-6:
            self._values = [(value / total).astype(value.dtype) for value in self._values]
        return self._values


class Flight(NamedTuple):
    """A delayed average."""

    average: Average
    snapshot: list[Array]  # of the trained weights
    buffers: list[Array]  # of the others
    is_top: bool
    due: int  # step
    lr: float


class Averaging:
    """The optimizer's state that Keras neither saves nor tracks."""

    def __init__(self) -> None:
        self.flight: Flight | None = None
        self.state: dict[str, Any] = {}  # what `averaging_state` returns
        self.attended = False  # a callback or the script averages, or has announced it

    def check_attended(self) -> None:
        """Warn, once, about a step if nothing averages."""
        if not self.attended and hvd.size() > 1:
            self.attended = True
            warnings.warn(
                "HierarchicalSGD: training has started, but nothing averages the weights: pass "
                "HierarchicalSGDCallback() to model.fit; in a loop of your own call "
                "begin_averaging(model.weights) before the first step, average_if_due after each",
                stacklevel=2,
            )
