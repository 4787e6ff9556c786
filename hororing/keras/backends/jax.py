"""Keras on JAX: the verbs of hororing.jax, inside the train step that Keras compiles.

Sums over several batches are kept in host memory, by callbacks that JAX keeps in order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import io_callback

from hororing._adapters.optimizer_options import Settings
from hororing.jax import errors
from hororing.jax.gradients import in_groups, reduce_parts

F = TypeVar("F", bound=Callable[..., Any])
_failures: list[Exception] = []  # of the last callback
Array = np.ndarray[Any, np.dtype[Any]]


def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    settings: Settings,
) -> list[Any]:
    """See `Backend`. Gradients without a group are reduced in groups of about 8 MiB."""
    _check_alone()
    grouped = {at for group in groups for at in group}
    others = [at for at in range(len(gradients)) if at not in grouped]
    leaves = [jax.numpy.asarray(gradient) for gradient in gradients]
    parts = [*groups, *in_groups(leaves, others)]
    return reduce_parts(leaves, names, parts, settings.name, settings, settings.weight)


class HostAccumulator:
    """`Accumulator` in host memory, because a traced train step cannot assign variables."""

    def __init__(self, maxima: Sequence[bool], settings: Settings) -> None:
        self._maxima = maxima
        self._passes = settings.passes
        self._average = settings.average_passes
        self.reset()

    def reset(self) -> None:
        """See `Accumulator`."""
        self._sums: dict[int, Array] = {}  # by place
        self._count = 0

    def add(
        self, gradients: Sequence[Any], places: Sequence[int], weight: None = None
    ) -> tuple[Any, Callable[[], tuple[list[Any], None]]]:
        """See `Accumulator`. On JAX no gradient has a weight."""
        live = [at for at, gradient in enumerate(gradients) if gradient is not None]
        tensors = [gradients[at] for at in live]

        def on_host(*arrays: Array) -> list[Any]:
            return self._add(arrays, [places[at] for at in live])

        flag = jax.ShapeDtypeStruct((), np.bool_)
        due, *totals = _call(on_host, [flag, *map(_like, tensors)], tensors)

        def take() -> tuple[list[Any], None]:
            results = list(gradients)
            for at, total in zip(live, totals, strict=True):
                results[at] = total
            return results, None

        return due, take

    def _add(self, arrays: Sequence[Array], places: Sequence[int]) -> list[Any]:
        for array, place in zip(arrays, places, strict=True):
            if place not in self._sums:
                self._sums[place] = np.array(array)
            elif self._maxima[place]:
                np.maximum(self._sums[place], array, out=self._sums[place])
            else:
                self._sums[place] += array
        self._count += 1
        if self._count < self._passes:
            return [np.asarray(False), *arrays]
        totals = [
            (self._sums[place] / self._passes).astype(array.dtype)
            if self._average and not self._maxima[place]
            else self._sums[place]
            for array, place in zip(arrays, places, strict=True)
        ]
        self.reset()
        return [np.asarray(True), *totals]


def accumulator(
    variables: Sequence[Any], maxima: Sequence[bool], settings: Settings
) -> HostAccumulator:
    """See `Backend`."""
    return HostAccumulator(maxima, settings)


def choose(due: Any, update: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """See `Backend`."""
    if isinstance(due, jax.core.Tracer):
        return jax.lax.cond(due, update, otherwise)
    return update() if due else otherwise()


def stepper() -> None:
    """See `Backend`. The train step owns the memory of the weights: a failure loses it."""


def outside_graphs(function: Callable[[], None]) -> None:
    """See `Backend`."""
    function()


def not_rewritten(function: F) -> F:
    """Return it: JAX does not rewrite Python."""
    return function


def convert_error(error: Exception) -> Exception | None:
    """See `Backend`."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return error
    return errors.convert_error(error) or (_failures.pop() if _failures else None)


def prepare(model: Any) -> None:
    """Do nothing: JAX compiles requests."""


def _like(tensor: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(tensor.shape, tensor.dtype)


def _call(function: Callable[..., list[Any]], results: list[Any], tensors: list[Any]) -> list[Any]:
    """Call `function` with arrays: now, or whenever the traced function runs."""
    if any(isinstance(tensor, jax.core.Tracer) for tensor in tensors):

        def with_arrays(*values: Any) -> list[Any]:
            _failures.clear()
            try:
                return function(*(np.asarray(value) for value in values))
            except Exception as error:  # JAX raises its own exception, with the text
                _failures.append(error)
                raise

        return list(io_callback(with_arrays, results, *tensors, ordered=True))
    return [jax.numpy.asarray(each) for each in function(*map(np.asarray, tensors))]


def _check_alone() -> None:
    """Raise ValueError if JAX joins several processes in one computation."""
    if jax.process_count() > 1:
        raise ValueError(
            f"DistributedOptimizer: JAX spans {jax.process_count()} processes, and would call "
            "hororing in one of them only; leave out keras.distribution.initialize and "
            "jax.distributed.initialize, so that each rank computes by itself, or train without "
            "DistributedOptimizer"
        )
