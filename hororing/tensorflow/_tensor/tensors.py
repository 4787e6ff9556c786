"""Converts the arguments of verbs to tensors that the core can take."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import tensorflow as tf

from hororing._requests import arguments, handles

# Complex numbers travel as pairs of these.
PARTS: Final = {tf.complex64: tf.float32, tf.complex128: tf.float64}


def as_parts(tensor: tf.Tensor) -> tf.Tensor:
    """Make pairs of complex numbers."""
    return tf.bitcast(tensor, PARTS[tensor.dtype]) if tensor.dtype in PARTS else tensor


def from_parts(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Make complex numbers of pairs, if they were."""
    return tf.bitcast(tensor, dtype) if dtype in PARTS else tensor


def checked_tensor(tensor: Any, verb: str) -> tf.Tensor:
    """Return the argument as a tensor that the core can take."""
    if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
        remedy = (
            "use tf.sparse.to_dense" if isinstance(tensor, tf.SparseTensor)
            else "use tensor.to_tensor()" if isinstance(tensor, tf.RaggedTensor)
            else "use allreduce, or tf.convert_to_tensor"
        )  # fmt: skip
        text = f"{verb}: {type(tensor).__name__} is not supported; {remedy}"
        if isinstance(tensor, tf.IndexedSlices):
            raise NotImplementedError(text)
        raise ValueError(text)
    if isinstance(tensor, (str, bytes)) or tensor is None:
        raise TypeError(f"{verb} takes tensors, not {type(tensor).__name__}")
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype not in PARTS and tensor.dtype.name not in handles.DTYPES:
        raise ValueError(
            f"{verb}: tensors of type {tensor.dtype.name} are not supported; cast it, or use one "
            f"of {', '.join([*handles.DTYPES, *(dtype.name for dtype in PARTS)])}"
        )
    return tensor


def checked_weight(weight: Any, verb: str) -> tf.Tensor | None:
    """Return a weight as float64, of shape [1]. Which ones are possible, the core checks."""
    if weight is None:
        return None
    if not isinstance(weight, (tf.Tensor, tf.Variable)):
        weight = tf.constant(arguments.check_weight(weight, verb), tf.float64)
    return tf.reshape(tf.cast(weight, tf.float64), [1])


def members(tensors: Iterable[Any]) -> list[Any]:
    """The tensors of a group; one tensor is the group of its rows."""
    # A tensor of a graph cannot be iterated over.
    return tf.unstack(tensors) if isinstance(tensors, (tf.Tensor, tf.Variable)) else list(tensors)


def checked_list(tensors: Iterable[Any], verb: str) -> list[tf.Tensor]:
    """Return the members of a group as tensors that the core can take, at least one."""
    checked = [checked_tensor(tensor, verb) for tensor in members(tensors)]
    if not checked:
        raise ValueError(f"{verb}: there are no tensors; pass at least one")
    return checked


def refuse_lone_parts(tensors: Sequence[tf.Tensor], verb: str) -> None:
    """Raise ValueError for complex numbers without dimensions."""
    # A number alone is a row of two parts to the core, which must not be split.
    if any(tensor.dtype in PARTS and tensor.shape.rank == 0 for tensor in tensors):
        raise ValueError(f"{verb}: a tensor without dimensions has no rows; use tf.reshape(x, [1])")


def check_devices(*devices: str) -> None:
    """Raise TypeError unless all are str."""
    for device in devices:
        if not isinstance(device, str):
            raise TypeError(f"a device must be a str, not {type(device).__name__} ({device!r})")
