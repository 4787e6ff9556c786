"""Collectives on values outside of training: NumPy arrays, numbers, variables and objects.

hororing.tensorflow.keras has the same, for any Keras.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NoReturn

import keras
import numpy as np
from keras import ops

import hororing.numpy as hvd
from hororing._requests import arguments
from hororing._requests import handles as request_handles
from hororing._requests.arguments import Average
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.handles import DTYPES
from hororing._requests.names import default_name, without_numbers
from hororing._requests.objects import allgather_object, broadcast_object
from hororing._requests.verbs import barrier, join


def _array(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return np.asarray(value)
    if ops.is_tensor(value) or isinstance(value, keras.Variable):
        return np.asarray(ops.convert_to_numpy(value))
    return np.asarray(value)


def _value(array: Any) -> Any:
    """Return arrays as they are, and those without dimensions as NumPy's numbers."""
    return np.asarray(array)[()]


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: int | None = None,
    compression: type[Compressor] = NoneCompressor,
    weight: float | None = None,
) -> Any:
    """Combine `value` over all ranks and return the result.

    `value` is a number, an array or a tensor; the result is NumPy's. `average` is deprecated; the
    rest is as for hororing.numpy.allreduce. An average of integers is truncated: pass floats.

    >>> loss = hvd.allreduce(0.5, name="loss")
    """
    op = arguments.choose_op(op, average)
    return _value(
        hvd.allreduce(
            _array(value), name=name, compression=compression, op=op,
            prescale_factor=prescale_factor, postscale_factor=postscale_factor, weight=weight,
        )
    )  # fmt: skip


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    >>> of_all = hvd.allgather(y, name="labels")
    """
    return _value(hvd.allgather(_array(value), name=name))


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Return, on every rank, the value that rank `root_rank` passes. Shapes and types are equal.

    >>> first = hvd.broadcast(weights, root_rank=0)
    """
    return _value(hvd.broadcast(_array(value), root_rank, name=name))


def reducescatter(value: Any, name: str | None = None, op: int = Average) -> Any:
    """Combine `value` over all ranks and return this rank's rows of the result.

    >>> part = hvd.reducescatter(weights, op=hvd.Sum)
    """
    return _value(hvd.reducescatter(_array(value), name=name, op=op))


def broadcast_variables(variables: Iterable[Any], root_rank: int) -> None:
    """Overwrite the Keras variables of all ranks with those of rank `root_rank`.

    The same variables on every rank, in the same order, such as ``model.weights`` or
    ``optimizer.variables``; build both before.

    >>> hvd.broadcast_variables(model.weights, root_rank=0)
    """
    root_rank = arguments.check_root(root_rank, "broadcast_variables")
    variables = arguments.check_variables(variables, "broadcast_variables")
    prefix = default_name("broadcast_variables")
    handles, arrays = [], []
    for number, variable in enumerate(variables):
        array = np.array(ops.convert_to_numpy(variable))
        # Random states are unsigned, and weights may have 8 bits: these are sent as bytes.
        known = array.dtype.name in DTYPES
        sent = array if known else np.frombuffer(bytearray(array.tobytes()), np.uint8)
        name = f"{prefix}.{number}.{without_numbers(str(variable.path))}"
        handles.append(hvd.broadcast_async_(sent, root_rank, name=name))
        arrays.append((sent, array.dtype, array.shape))
    request_handles.wait_all(handles)
    for variable, (sent, dtype, shape) in zip(variables, arrays, strict=True):
        variable.assign(sent.view(dtype).reshape(shape))


def broadcast_global_variables(root_rank: int) -> NoReturn:
    """Raise RuntimeError: Keras 3 has no global variables, it runs eagerly outside of `fit`."""
    raise RuntimeError(
        f"broadcast_global_variables({root_rank}): there are no global variables in eager mode; "
        "use broadcast_variables(model.weights, root_rank), or "
        "callbacks.BroadcastGlobalVariablesCallback(root_rank) with model.fit"
    )


__all__ = [
    "allgather",
    "allgather_object",
    "allreduce",
    "barrier",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "join",
    "reducescatter",
]
