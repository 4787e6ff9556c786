"""Sums and other reductions over all ranks, of one tensor or a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hororing._engine.core import fail
from hororing._requests import arguments, handles
from hororing._requests.adapter import T
from hororing._requests.compression import Compressor, NoneCompressor, check_compression, compressed
from hororing._requests.names import default_name, note_submitted, uncount
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing._requests.verbs.views import Requests, first


class Allreduce(Requests[T]):
    """`allreduce` in its forms."""

    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> T:
        """Combine `tensor` over all ranks and return the result, the same bits on every rank.

        Parameters
        ----------
        tensor : tensor
            Any shape, the same shape and data type on every rank.
        average : bool, optional
            Deprecated; True is op=Average, False op=Sum.
        name : str, optional
            Unique among tensors in flight; made from the order of calls when omitted.
        compression : Compressor, optional
            How the tensor is sent, e.g. ``Compression.fp16``.
        op : ReduceOp, optional
            Average (the default), Sum, Min, Max, Product, or Adasum (floating point, among all
            ranks, whose number is a power of two). An average of integers is truncated toward
            zero; bool has no average.
        prescale_factor, postscale_factor : float, optional
            Applied to every rank's tensor, and to the result.
        process_set : ProcessSet, optional
            The ranks that take part; all of the job when omitted.
        weight : float, optional
            With op=Average, of floats: the weight of this rank's tensor, such as its number of
            samples. The result is the sum of the ranks' tensors times their weights, divided by
            the sum of the weights. Tensors of weight 0 are ignored; if all weights are 0 the
            result is 0. Either all ranks pass a weight, or none does. A weight that is negative
            or not finite is a ValueError on every rank.

        Examples
        --------
        >>> mean = hvd.allreduce(loss, name="loss")
        >>> total = hvd.allreduce(correct, name="correct", op=hvd.Sum)
        """
        context = None
        if compression is not NoneCompressor:
            check_compression(compression)
            tensor, context = compression.compress(tensor)
        answer = self.start_one(
            tensor, False, average, name, op, prescale_factor, postscale_factor, process_set, True,
            weight,
        )  # fmt: skip
        result: T = handles.result_of(answer)
        return result if compression is NoneCompressor else compression.decompress(result, context)

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> T:
        """Like `allreduce`, but in place; returns `tensor`.

        >>> hvd.allreduce_(weights, name="weights")
        """
        answer = self.start_one(
            tensor, True, average, name, op, prescale_factor, postscale_factor, process_set, True,
            weight,
        )  # fmt: skip
        result: T = answer if answer is tensor else handles.result_of(answer)
        return result

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> int:
        """Start an `allreduce`; `synchronize(handle)` returns its result.

        `tensor` must not be written to before that.

        >>> handle = hvd.allreduce_async(loss, name="loss")
        >>> mean = hvd.synchronize(handle)
        """
        handle: int = self.start_one(
            tensor, False, average, name, op, prescale_factor, postscale_factor, process_set,
            weight=weight,
        )  # fmt: skip
        return handle

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> int:
        """Start an `allreduce_`; `tensor` must not be touched before `synchronize(handle)`.

        >>> handle = hvd.allreduce_async_(weights, name="weights")
        >>> weights = hvd.synchronize(handle)
        """
        handle: int = self.start_one(
            tensor, True, average, name, op, prescale_factor, postscale_factor, process_set,
            weight=weight,
        )  # fmt: skip
        return handle

    def start_one(
        self,
        tensor: T,
        in_place: bool,
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        blocking: bool = False,
        weight: float | None = None,
    ) -> Any:
        """Like `reduce_async` with one tensor; fast if it is a plain one.

        With `blocking`, pass the result to `collectives.result_of`.
        """
        if average is not None:
            op = arguments.choose_op(op, average)
        adapter = self.adapter
        output = tensor if in_place else adapter.plain_like(tensor)
        if output is not None and weight is None:
            members = check_member(process_set, "allreduce")
            keep = tensor if in_place else handles.Separate(tensor, output)
            given = default_name("allreduce", members) if name is None else name
            try:  # like `naming`, which would take half as long as all of this
                answer = adapter.plain_tensors.allreduce(
                    tensor, output, keep, given, members, op, prescale, postscale, blocking
                )
                if type(answer) is int and answer < 0:
                    fail(answer)
                if answer is not None:
                    if name is None:
                        note_submitted(given)
                    if in_place:
                        adapter.mark_written((tensor,))
                    return answer
            finally:
                if name is None:
                    uncount(given)
        return self.reduce_async(
            "allreduce", [tensor], in_place, name, arguments.choose_op(op, None), prescale,
            postscale, first, process_set=process_set, blocking=blocking,
            weight=weight,
        )  # fmt: skip

    def _start_group(
        self,
        tensors: Iterable[T],
        average: bool | None,
        name: str | None,
        op: int | None,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        blocking: bool = False,
        weight: float | None = None,
    ) -> Any:
        """Like `start_one` with several tensors in place."""
        if average is not None:
            op = arguments.choose_op(op, average)
        tensors = tuple(tensors)
        members = check_member(process_set, "grouped_allreduce")
        given = default_name("grouped_allreduce", members) if name is None else name
        try:  # as in `start_one`
            answer = None
            if weight is None:
                answer = self.adapter.plain_tensors.grouped_allreduce(
                    tensors, given, members, op, prescale, postscale, blocking
                )
            if type(answer) is int and answer < 0:
                fail(answer)
            if answer is not None:
                if name is None:
                    note_submitted(given)
                self.adapter.mark_written(tensors)
                return answer
        finally:
            if name is None:
                uncount(given)
        return self.reduce_async(
            "grouped_allreduce", tensors, True, name, arguments.choose_op(op, None), prescale,
            postscale, tuple, process_set=process_set, blocking=blocking,
            weight=weight,
        )  # fmt: skip

    def grouped_allreduce(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> list[T]:
        """Like `allreduce`, for several tensors under one name: all or none of them.

        Data types and shapes may differ within the group. Returns a list.

        >>> loss, scores = hvd.grouped_allreduce([loss, scores], name="metrics")
        """
        chosen = arguments.choose_op(op, average)

        def reduce(packed: list[T]) -> Any:
            handle = self.reduce_async(
                "grouped_allreduce", packed, False, name, chosen, prescale_factor,
                postscale_factor, process_set=process_set, blocking=True, weight=weight,
            )  # fmt: skip
            return handles.wait(handle)

        return compressed(compression, tensors, reduce)

    def grouped_allreduce_(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> tuple[T, ...]:
        """Like `grouped_allreduce`, but in place; returns a tuple of the tensors.

        >>> loss, scores = hvd.grouped_allreduce_([loss, scores], name="metrics")
        """
        answer = self._start_group(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set, True,
            weight,
        )  # fmt: skip
        result: tuple[T, ...] = handles.result_of(answer)
        return result

    def grouped_allreduce_async(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> int:
        """Start a `grouped_allreduce`: one handle for the group, one list from `synchronize`.

        >>> handle = hvd.grouped_allreduce_async([loss, scores], name="metrics")
        >>> loss, scores = hvd.synchronize(handle)
        """
        chosen = arguments.choose_op(op, average)
        return self.reduce_async(
            "grouped_allreduce", tensors, False, name, chosen, prescale_factor, postscale_factor,
            process_set=process_set, weight=weight,
        )  # fmt: skip

    def grouped_allreduce_async_(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
        weight: float | None = None,
    ) -> int:
        """Start a `grouped_allreduce_`: one handle for the group, one tuple from `synchronize`.

        >>> handle = hvd.grouped_allreduce_async_([loss, scores], name="metrics")
        >>> loss, scores = hvd.synchronize(handle)
        """
        handle: int = self._start_group(
            tensors, average, name, op, prescale_factor, postscale_factor, process_set,
            weight=weight,
        )  # fmt: skip
        return handle

    def reduce_async(
        self,
        verb: str,
        tensors: Iterable[T],
        in_place: bool,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        pack: Callable[[list[T]], Any] = list,
        *,
        process_set: ProcessSet = global_process_set,
        blocking: bool = False,
        streams: Sequence[int] | None = None,
        weight: float | None = None,
    ) -> int:
        """Start the verbs above; `pack` shapes the result.

        `blocking` and `streams` as for `collectives.submit`.
        """
        adapter = self.adapter
        members = check_member(process_set, verb)
        if op == arguments.Adasum:
            arguments.check_adasum(members, verb)
        prescale, postscale = arguments.check_factors(prescale, postscale, verb)
        weight = arguments.check_weight(weight, verb)
        targets = self._checked(tensors, verb, writable=in_place)
        sources = [adapter.dense(tensor) for tensor in targets]
        # A tensor that had to be copied is reduced in its copy, which no caller has.
        outputs = [
            source if in_place or source is not target else adapter.empty_like(source)
            for source, target in zip(sources, targets, strict=True)
        ]
        return self._submit(
            handles.ALLREDUCE,
            verb,
            name,
            [self._view(*pair) for pair in zip(sources, outputs, strict=True)],
            keep=(sources, outputs),
            finish=lambda _: pack(self._written(targets, outputs) if in_place else outputs),
            process_set=members,
            op=op,
            prescale=prescale,
            postscale=postscale,
            blocking=blocking,
            streams=streams,
            weight=weight,
        )
