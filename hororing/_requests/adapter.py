"""The interface through which the verbs use one framework's arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from hororing._requests import handles
from hororing._tensors import PlainTensors

T = TypeVar("T")


class Adapter(Protocol[T]):
    """The interface of a framework for `Verbs`. Nothing here blocks."""

    plain_tensors: PlainTensors  # tensors that can be read and written in place

    def check(self, tensor: object, verb: str) -> T:
        """Return `tensor`, or raise TypeError or ValueError if no verb can take it."""

    def check_writable(self, tensor: T, verb: str) -> None:
        """Raise ValueError if results cannot be written into `tensor`."""

    def dense(self, tensor: T) -> T:
        """Return `tensor` if its elements are contiguous and in order, else such a copy."""

    def plain_like(self, tensor: T) -> T | None:
        """Return new memory of the same shape and type; None if it cannot be a plain tensor."""

    def device(self, tensor: T) -> int:
        """Return the number of the CUDA device whose memory it is, or handles.HOST."""

    def stream(self, device: int) -> int:
        """Return the CUDA stream that this thread computes in on a device."""

    def record(self, owners: object) -> None:
        """Note that this thread's stream uses memory that may be allocated to others.

        `owners` are tensors, in lists and tuples. Their memory is not reused before the stream is
        done with it.
        """

    def empty_like(self, tensor: T) -> T:
        """Return new contiguous memory of the same shape and type."""

    def describe(self, tensor: T) -> tuple[int, int, tuple[int, ...]]:
        """Return address, data type (a value of handles.DTYPES) and shape of a dense tensor."""

    def copy(self, target: T, source: T) -> None:
        """Copy elements."""

    def mark_written(self, tensors: Sequence[T]) -> None:
        """Inform the framework that the core writes into tensors."""

    def gathered(self, result: handles.Gathered, like: T) -> T:
        """Wrap a result in the core's memory without a copy: rows like those of `like`."""

    def empty_rows(self, tensor: T, rows: int) -> T:
        """Return new contiguous memory of the same type and shape, but for the first dimension."""

    def splits(self, splits: object) -> list[int]:
        """Return `alltoall`'s splits; ValueError unless one-dimensional int32 or a list."""

    def int32s(self, numbers: list[int]) -> T:
        """Return a new one-dimensional int32 array."""
