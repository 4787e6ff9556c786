"""The verbs on NumPy arrays: ``import hororing.numpy as hvd``.

No framework needed beyond NumPy. Arrays must be in native byte order; bfloat16 arrays of the
package ml_dtypes are understood.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing._requests import arguments, handles
from hororing._requests.objects import allgather_object, broadcast_object
from hororing._requests.verbs import Verbs, barrier, join, poll, synchronize

Array = np.ndarray[Any, np.dtype[Any]]

# NumPy's own types; others are found by their names.
_NUMBERS = {np.dtype(name): number for name, number in handles.DTYPES.items() if hasattr(np, name)}


class NumpyAdapter:
    """`hororing._requests.adapter.Adapter` for `numpy.ndarray`."""

    def __init__(self) -> None:
        self.plain_tensors = handles.plain_tensors((np.ndarray,), "__array_struct__")

    def check(self, tensor: object, verb: str) -> Array:
        """Accept arrays and NumPy scalars."""
        if isinstance(tensor, np.generic):
            tensor = np.asarray(tensor)
            tensor.flags.writeable = False  # as the scalar is
        if not isinstance(tensor, np.ndarray):
            raise TypeError(
                f"{verb} of hororing.numpy takes NumPy arrays, not {type(tensor).__name__}; "
                "use numpy.asarray(...)"
            )
        if isinstance(tensor, np.ma.MaskedArray):
            raise ValueError(f"{verb}: masked arrays are not supported; use array.filled(...)")
        if tensor.dtype.name not in handles.DTYPES or not tensor.dtype.isnative:
            raise ValueError(
                f"{verb}: arrays of {tensor.dtype.newbyteorder('=')!s}"
                f"{'' if tensor.dtype.isnative else ' in non-native byte order'} are not supported"
                f"; use one of {', '.join(handles.DTYPES)}"
            )
        return tensor

    def check_writable(self, tensor: Array, verb: str) -> None:
        """Refuse read-only arrays."""
        if not tensor.flags.writeable:
            raise ValueError(f"{verb}: the array is read-only; use the verb without underscore")

    def dense(self, tensor: Array) -> Array:
        """Return C order, aligned."""
        if tensor.flags.c_contiguous and tensor.flags.aligned:
            return tensor
        return np.array(tensor, order="C", copy=True)

    def plain_like(self, tensor: Array) -> Array | None:
        """Return a plain array if `tensor` is one."""
        return np.empty_like(tensor) if type(tensor) is np.ndarray else None

    def empty_like(self, tensor: Array) -> Array:
        """Return a plain array."""
        return np.empty(tensor.shape, tensor.dtype)

    def describe(self, tensor: Array) -> tuple[int, int, tuple[int, ...]]:
        """Return address, data type and shape."""
        number = _NUMBERS.get(tensor.dtype)
        if number is None:
            number = handles.DTYPES[tensor.dtype.name]
        return tensor.ctypes.data, number, tensor.shape

    def copy(self, target: Array, source: Array) -> None:
        """Copy elements."""
        np.copyto(target, source)

    def device(self, tensor: Array) -> int:
        """Return the host."""
        return handles.HOST

    def stream(self, device: int) -> int:
        """Return the default: nothing is computed in it."""
        return 0

    def record(self, owners: object) -> None:
        """Do nothing: there are no streams."""

    def mark_written(self, tensors: Sequence[Array]) -> None:
        """Do nothing: NumPy does not track writes."""

    def gathered(self, result: handles.Gathered, like: Array) -> Array:
        """Wrap the core's memory."""
        if result.buffer is None:
            return self.empty_rows(like, result.rows)
        return np.frombuffer(result.buffer, like.dtype).reshape(result.rows, *like.shape[1:])

    def empty_rows(self, tensor: Array, rows: int) -> Array:
        """Return a plain array."""
        return np.empty((rows, *tensor.shape[1:]), tensor.dtype)

    def splits(self, splits: object) -> list[int]:
        """Accept sequences of integers and int32 arrays."""
        array = np.asarray(splits)
        if isinstance(splits, np.ndarray):
            return arguments.check_splits(array.tolist(), array.ndim, array.dtype.name)
        return arguments.check_splits(splits)

    def int32s(self, numbers: list[int]) -> Array:
        """Return a plain array."""
        return np.array(numbers, np.int32)


class _Verbs(Verbs[Array]):
    def __reduce__(self) -> str:
        """Pickle it, and so its methods, as the global that it is."""
        return "_verbs"


_verbs = _Verbs(NumpyAdapter())

allreduce = _verbs.allreduce
allreduce_ = _verbs.allreduce_
allreduce_async = _verbs.allreduce_async
allreduce_async_ = _verbs.allreduce_async_
grouped_allreduce = _verbs.grouped_allreduce
grouped_allreduce_ = _verbs.grouped_allreduce_
grouped_allreduce_async = _verbs.grouped_allreduce_async
grouped_allreduce_async_ = _verbs.grouped_allreduce_async_
broadcast = _verbs.broadcast
broadcast_ = _verbs.broadcast_
broadcast_async = _verbs.broadcast_async
broadcast_async_ = _verbs.broadcast_async_
allgather = _verbs.allgather
allgather_async = _verbs.allgather_async
grouped_allgather = _verbs.grouped_allgather
grouped_allgather_async = _verbs.grouped_allgather_async
alltoall = _verbs.alltoall
alltoall_async = _verbs.alltoall_async
reducescatter = _verbs.reducescatter
reducescatter_async = _verbs.reducescatter_async
grouped_reducescatter = _verbs.grouped_reducescatter
grouped_reducescatter_async = _verbs.grouped_reducescatter_async

__all__ = [
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "synchronize",
]
__all__ += exports.__all__
