"""Keras on TensorFlow: eager, or in the function that Keras makes of a train step."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import tensorflow as tf
from keras import ops

from hororing._adapters.optimizer_options import Settings
from hororing._engine.state import rank
from hororing.keras.backends.accumulator import VariableAccumulator
from hororing.tensorflow._tensor import requests
from hororing.tensorflow.gradients import reduce_gradients
from hororing.tensorflow.steps import CountedSteps

F = TypeVar("F", bound=Callable[..., Any])


def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    settings: Settings,
) -> list[Any]:
    """See `Backend`."""
    options = dataclasses.replace(settings, groups=tuple(tuple(group) for group in groups))
    return reduce_gradients(
        gradients, names, options, keys=range(len(gradients)), weight=settings.weight
    )


def accumulator(
    variables: Sequence[Any], maxima: Sequence[bool], settings: Settings
) -> VariableAccumulator:
    """See `Backend`."""
    return VariableAccumulator(variables, maxima, settings, tf.convert_to_tensor)


def track(optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
    """See `Backend`."""
    return ()


def is_stateless(gradients: Sequence[Any]) -> bool:
    """See `Backend`."""
    return False


def weight_type() -> str:
    """See `Backend`."""
    return "float64"


def choose(due: Any, update: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """See `Backend`."""
    return ops.cond(due, update, otherwise)


def stepper() -> CountedSteps:
    """See `Backend`."""
    return CountedSteps()


def outside_graphs(function: Callable[[], None]) -> None:
    """See `Backend`."""
    with tf.init_scope():
        function()


def not_rewritten(function: F) -> F:
    """Save AutoGraph the search for Python conditionals on tensors: there are none."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


def convert_error(error: Exception) -> Exception | None:
    """See `Backend`."""
    return requests.convert_error(error)


def prepare(model: Any) -> None:
    """Turn off XLA if Keras may have chosen it."""
    if not model.jit_compile:
        return
    if all(device.device_type == "CPU" for device in tf.config.list_physical_devices()):
        raise ValueError(
            "XLA cannot compile communication between processes: call model.compile with "
            "jit_compile=False, or leave it out"
        )
    # jit_compile="auto" means True on a machine with a GPU, and looks the same.
    model.jit_compile = False
    if rank() == 0:
        warnings.warn(
            "XLA cannot compile communication between processes, so jit_compile is False for this "
            "model; pass jit_compile=False to model.compile to silence this",
            stacklevel=2,
        )
