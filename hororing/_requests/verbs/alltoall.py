"""Rows from every rank to every rank."""

from __future__ import annotations

from typing import Any

from hororing._requests import handles
from hororing._requests.adapter import T
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing._requests.verbs.views import Requests


class Alltoall(Requests[T]):
    """`alltoall` in its forms."""

    def alltoall(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T | tuple[T, T]:
        """Send rows of `tensor` to every rank, and return the rows that all ranks sent here.

        The rows come in the order of the ranks that sent them. With `splits`, the result is a pair:
        the rows, and how many came from each rank, as int32.

        Parameters
        ----------
        tensor : tensor
            Rows for rank 0, then those for rank 1, ...; ranks may differ in the first dimension
            only.
        splits : sequence of int, optional
            How many rows each rank of the set gets: a list, or a one-dimensional tensor of
            int32. Rows beyond their sum are not sent. Without `splits`, every rank gets the
            same number.

        Examples
        --------
        >>> received = hvd.alltoall(scores, name="scores")
        """
        handle = self.exchange_async(tensor, splits, name, process_set, blocking=True)
        received, received_splits = handles.wait(handle)
        return received if splits is None else (received, received_splits)

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `alltoall`; `synchronize(handle)` returns rows and received splits.

        >>> handle = hvd.alltoall_async(scores, name="scores")
        >>> rows, received_splits = hvd.synchronize(handle)
        """
        return self.exchange_async(tensor, splits, name, process_set)

    def exchange_async(
        self,
        tensor: T,
        splits: Any,
        name: str | None,
        process_set: ProcessSet,
        *,
        blocking: bool = False,
    ) -> int:
        """Start the verbs above; `blocking` is as for `reduce_async`."""
        members = check_member(process_set, "alltoall")
        adapter = self.adapter
        rows = None if splits is None else adapter.splits(splits)
        (checked,) = self._checked([tensor], "alltoall")
        source = adapter.dense(checked)

        def finish(handle: int) -> tuple[T, T]:
            received = self._gathered(handle, 0, source)
            return received, adapter.int32s(handles.take_numbers(handle, 1))

        return self._submit(
            handles.ALLTOALL,
            "alltoall",
            name,
            [self._view(source)],
            keep=source,
            finish=finish,
            process_set=members,
            integers=rows,
            blocking=blocking,
        )
