"""The rows of all ranks, on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from hororing._requests import handles
from hororing._requests.adapter import T
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing._requests.verbs.views import Requests, first


class Allgather(Requests[T]):
    """`allgather` in its forms."""

    def allgather(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Concatenate the tensors of all ranks along the first dimension, in rank order.

        First dimensions may differ between ranks and may be 0; the others must be equal. A
        tensor without dimensions is a ValueError.

        >>> of_all = hvd.allgather(scores, name="scores")
        """
        result: T = handles.wait(
            self.gather_async(
                "allgather", [tensor], name, first, process_set=process_set, blocking=True
            )
        )
        return result

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an `allgather`; `synchronize(handle)` returns its result.

        >>> handle = hvd.allgather_async(scores, name="scores")
        >>> of_all = hvd.synchronize(handle)
        """
        return self.gather_async("allgather", [tensor], name, first, process_set=process_set)

    def grouped_allgather(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[T, ...]:
        """Like `allgather`, for several tensors under one name: all or none of them.

        >>> scores, weights = hvd.grouped_allgather([scores, weights], name="of all")
        """
        result: tuple[T, ...] = handles.wait(
            self.gather_async(
                "grouped_allgather", tensors, name, process_set=process_set, blocking=True
            )
        )
        return result

    def grouped_allgather_async(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allgather`: one handle for the group.

        >>> handle = hvd.grouped_allgather_async([scores, weights], name="of all")
        >>> scores, weights = hvd.synchronize(handle)
        """
        return self.gather_async("grouped_allgather", tensors, name, process_set=process_set)

    def gather_async(
        self,
        verb: str,
        tensors: Iterable[T],
        name: str | None,
        pack: Callable[[list[T]], Any] = tuple,
        *,
        process_set: ProcessSet = global_process_set,
        blocking: bool = False,
    ) -> int:
        """Start the verbs above; the last three parameters are as for `reduce_async`."""
        members = check_member(process_set, verb)
        adapter = self.adapter
        inputs = [adapter.dense(tensor) for tensor in self._checked(tensors, verb)]

        def finish(handle: int) -> Any:
            return pack([self._gathered(handle, index, like) for index, like in enumerate(inputs)])

        return self._submit(
            handles.ALLGATHER,
            verb,
            name,
            [self._view(tensor) for tensor in inputs],
            keep=inputs,
            finish=finish,
            process_set=members,
            blocking=blocking,
        )
