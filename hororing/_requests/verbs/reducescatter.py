"""Reductions over all ranks, after which every rank gets a part of the rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hororing._requests import arguments, handles
from hororing._requests.adapter import T
from hororing._requests.compression import Compressor, NoneCompressor, compressed
from hororing._requests.process_sets import (
    ProcessSet,
    check_member,
    global_process_set,
    rank_and_size,
)
from hororing._requests.verbs.views import Requests, first


class Reducescatter(Requests[T]):
    """`reducescatter` in its forms."""

    def reducescatter(
        self,
        tensor: T,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int = arguments.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Combine `tensor` over all ranks and return this rank's rows of the result.

        The first dimension is split over the ranks in order; if it does not divide evenly, the
        first ranks get one row more. `op` is Average or Sum; the rest is as for `allreduce`.

        >>> part = hvd.reducescatter(scores, name="scores", op=hvd.Sum)
        """
        return self._scatter(
            "reducescatter", [tensor], compression, name, op, process_set,
            prescale_factor, postscale_factor,
        )[0]  # fmt: skip

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = arguments.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `reducescatter`; `synchronize(handle)` returns its result.

        >>> handle = hvd.reducescatter_async(scores, name="scores")
        >>> part = hvd.synchronize(handle)
        """
        return self.scatter_async(
            "reducescatter", [tensor], name, op, process_set,
            prescale_factor, postscale_factor, first,
        )  # fmt: skip

    def grouped_reducescatter(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int = arguments.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """Like `reducescatter`, for several tensors under one name: all or none of them.

        >>> parts = hvd.grouped_reducescatter([scores, weights], name="parts", op=hvd.Sum)
        """
        return self._scatter(
            "grouped_reducescatter", tensors, compression, name, op, process_set,
            prescale_factor, postscale_factor,
        )  # fmt: skip

    def grouped_reducescatter_async(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        op: int = arguments.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `grouped_reducescatter`: one handle for the group.

        >>> handle = hvd.grouped_reducescatter_async([scores, weights], name="parts")
        >>> parts = hvd.synchronize(handle)
        """
        return self.scatter_async(
            "grouped_reducescatter", tensors, name, op, process_set,
            prescale_factor, postscale_factor,
        )  # fmt: skip

    def _scatter(
        self, verb: str, tensors: Iterable[T], compression: type[Compressor], *options: Any
    ) -> list[T]:
        """Carry out a blocking verb. The options are those of `scatter_async`."""

        def reduce(packed: list[T]) -> Any:
            return handles.wait(self.scatter_async(verb, packed, *options, blocking=True))

        return compressed(compression, tensors, reduce)

    def scatter_async(
        self,
        verb: str,
        tensors: Iterable[T],
        name: str | None,
        op: int,
        process_set: ProcessSet,
        prescale: float,
        postscale: float,
        pack: Callable[[list[T]], Any] = list,
        *,
        blocking: bool = False,
    ) -> int:
        """Start the verbs above; the last two parameters are as for `reduce_async`."""
        members = check_member(process_set, verb)
        prescale, postscale = arguments.check_factors(prescale, postscale, verb)
        op = arguments.check_scatter_op(op, verb)
        adapter = self.adapter
        inputs = [adapter.dense(tensor) for tensor in self._checked(tensors, verb)]
        shapes = [adapter.describe(tensor)[2] for tensor in inputs]
        if not all(shapes):
            raise ValueError(
                f"{verb}: a tensor without dimensions has no rows to scatter; use allreduce"
            )
        rank, size = rank_and_size(process_set)
        outputs = [
            adapter.empty_rows(tensor, rows_of(shape[0], size, rank))
            for tensor, shape in zip(inputs, shapes, strict=True)
        ]
        return self._submit(
            handles.REDUCESCATTER,
            verb,
            name,
            [self._view(*pair) for pair in zip(inputs, outputs, strict=True)],
            keep=(inputs, outputs),
            finish=lambda _: pack(outputs),
            process_set=members,
            op=op,
            prescale=prescale,
            postscale=postscale,
            blocking=blocking,
        )


def rows_of(rows: int, size: int, rank: int) -> int:
    """How many of `rows` rows rank `rank` gets when `size` ranks share them."""
    return rows // size + (rank < rows % size)
