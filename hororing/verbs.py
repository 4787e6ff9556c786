"""The public verbs, written once for every array type.

`Verbs` knows how verbs behave; an `Adapter` knows one framework's arrays. A framework module
makes one `Verbs` and publishes its methods.

Later issues append `process_set` to the signatures; its place stays free at their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any, Generic, Protocol, TypeVar

from hororing import collectives
from hororing.collectives import View
from hororing.compression import Compressor, NoneCompressor, check_compression

T = TypeVar("T")


class Adapter(Protocol[T]):
    """What `Verbs` asks of a framework. Nothing here blocks."""

    def check(self, tensor: object, verb: str) -> T:
        """Return `tensor`, or raise TypeError or ValueError if no verb can take it."""

    def check_writable(self, tensor: T, verb: str) -> None:
        """Raise ValueError if results cannot be written into `tensor`."""

    def dense(self, tensor: T) -> T:
        """Return `tensor` if its elements lie contiguously in order, else a copy that does."""

    def empty_like(self, tensor: T) -> T:
        """Return new contiguous memory of the same shape and type."""

    def describe(self, tensor: T) -> tuple[int, int, tuple[int, ...]]:
        """Address, data type (a value of collectives.DTYPES) and shape of a dense tensor."""

    def copy(self, target: T, source: T) -> None:
        """Copy elements."""

    def mark_written(self, tensors: Sequence[T]) -> None:
        """Tell the framework that the core wrote into `tensors`."""

    def gathered(self, result: collectives.Gathered, like: T) -> T:
        """Wrap the result of an allgather of `like` without a copy."""


class Verbs(Generic[T]):
    """The verbs over one array type.

    Every verb is collective: all ranks must call it with the same `name` (or make their unnamed
    calls in the same order). Blocking ones block with the GIL released. Errors, for all:
    ValueError and TypeError for arguments that are wrong on this rank alone; MismatchError, on
    every rank, when ranks disagree (the job goes on afterwards); NotInitializedError before
    `init`; ShutDownError, PeerLostError, StalledError and TransportError when the job ends.
    """

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter

    # -- allreduce ----------------------------------------------------------------------------

    def allreduce(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Combine `tensor` over all ranks and return the result, the same bits on every rank.

        Parameters
        ----------
        tensor : any shape, the same shape and data type on every rank.
        average : deprecated; True is op=Average, False op=Sum.
        name : unique among tensors in flight; made from the order of calls when omitted.
        compression : how the tensor travels, e.g. ``Compression.fp16``.
        op : Average (the default), Sum, Min, Max or Product. An average of integers is
            truncated toward zero; bool has no average.
        prescale_factor, postscale_factor : applied to every rank's tensor, and to the result.
        """
        check_compression(compression)
        compressed, context = compression.compress(tensor)
        chosen = collectives.choose_op(op, average)
        handle = self.reduce_async(
            "allreduce", [compressed], False, name, chosen, prescale_factor, postscale_factor,
            wait_follows=True,
        )  # fmt: skip
        result: T = compression.decompress(collectives.wait(handle)[0], context)
        return result

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> T:
        """Do as `allreduce`, into `tensor` itself, and return it."""
        chosen = collectives.choose_op(op, average)
        handle = self.reduce_async(
            "allreduce", [tensor], True, name, chosen, prescale_factor, postscale_factor, _first,
            wait_follows=True,
        )  # fmt: skip
        result: T = collectives.wait(handle)
        return result

    def allreduce_async(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start an `allreduce`; `synchronize(handle)` returns its result.

        `tensor` must not be written to before that.
        """
        chosen = collectives.choose_op(op, average)
        return self.reduce_async(
            "allreduce", [tensor], False, name, chosen, prescale_factor, postscale_factor, _first
        )

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start an `allreduce_`; `tensor` must not be touched before `synchronize(handle)`."""
        chosen = collectives.choose_op(op, average)
        return self.reduce_async(
            "allreduce", [tensor], True, name, chosen, prescale_factor, postscale_factor, _first
        )

    def grouped_allreduce(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        compression: type[Compressor] = NoneCompressor,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> list[T]:
        """Do as `allreduce` for several tensors under one name, all or none of them.

        Data types and shapes may differ within the group. Returns a list.
        """
        check_compression(compression)
        packed = [compression.compress(tensor) for tensor in tensors]
        chosen = collectives.choose_op(op, average)
        handle = self.reduce_async(
            "grouped_allreduce", [tensor for tensor, _ in packed], False, name, chosen,
            prescale_factor, postscale_factor, wait_follows=True,
        )  # fmt: skip
        results = collectives.wait(handle)
        return [
            compression.decompress(result, context)
            for result, (_, context) in zip(results, packed, strict=True)
        ]

    def grouped_allreduce_(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> tuple[T, ...]:
        """Do as `grouped_allreduce`, into the tensors themselves; returns a tuple of them."""
        chosen = collectives.choose_op(op, average)
        handle = self.reduce_async(
            "grouped_allreduce", tensors, True, name, chosen, prescale_factor, postscale_factor,
            tuple, wait_follows=True,
        )  # fmt: skip
        result: tuple[T, ...] = collectives.wait(handle)
        return result

    def grouped_allreduce_async(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `grouped_allreduce`: one handle for the group, one list from `synchronize`."""
        chosen = collectives.choose_op(op, average)
        return self.reduce_async(
            "grouped_allreduce", tensors, False, name, chosen, prescale_factor, postscale_factor
        )

    def grouped_allreduce_async_(
        self,
        tensors: Iterable[T],
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `grouped_allreduce_`: one handle for the group, one tuple from `synchronize`."""
        chosen = collectives.choose_op(op, average)
        return self.reduce_async(
            "grouped_allreduce", tensors, True, name, chosen, prescale_factor, postscale_factor,
            tuple,
        )  # fmt: skip

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
        wait_follows: bool = False,
    ) -> int:
        """Start what the verbs above describe; `pack` shapes the result.

        `wait_follows` as for `collectives.submit`.
        """
        adapter = self.adapter
        prescale, postscale = collectives.check_factors(prescale, postscale, verb)
        targets = self._checked(tensors, verb, writable=in_place)
        sources = [adapter.dense(tensor) for tensor in targets]
        # A tensor that had to be copied is reduced inside its copy: nobody else sees that.
        outputs = [
            source if in_place or source is not target else adapter.empty_like(source)
            for source, target in zip(sources, targets, strict=True)
        ]
        return collectives.submit(
            collectives.ALLREDUCE,
            collectives.default_name(verb) if name is None else name,
            [self._view(*pair) for pair in zip(sources, outputs, strict=True)],
            keep=(sources, outputs),
            finish=lambda _: pack(self._written(targets, outputs) if in_place else outputs),
            op=op,
            prescale=prescale,
            postscale=postscale,
            wait_follows=wait_follows,
        )

    # -- broadcast ----------------------------------------------------------------------------

    def broadcast(self, tensor: T, root_rank: int, name: str | None = None) -> T:
        """Return, on every rank, the tensor that rank `root_rank` passes.

        `tensor` has the same shape and data type on every rank.
        """
        result: T = collectives.wait(
            self._broadcast(tensor, root_rank, name, in_place=False, wait_follows=True)
        )
        return result

    def broadcast_(self, tensor: T, root_rank: int, name: str | None = None) -> T:
        """Do as `broadcast`, into `tensor` itself, and return it."""
        result: T = collectives.wait(
            self._broadcast(tensor, root_rank, name, in_place=True, wait_follows=True)
        )
        return result

    def broadcast_async(self, tensor: T, root_rank: int, name: str | None = None) -> int:
        """Start a `broadcast`; `synchronize(handle)` returns its result."""
        return self._broadcast(tensor, root_rank, name, in_place=False)

    def broadcast_async_(self, tensor: T, root_rank: int, name: str | None = None) -> int:
        """Start a `broadcast_`; `tensor` must not be touched before `synchronize(handle)`."""
        return self._broadcast(tensor, root_rank, name, in_place=True)

    def _broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None,
        *,
        in_place: bool,
        wait_follows: bool = False,
    ) -> int:
        root_rank = collectives.check_root(root_rank, "broadcast")
        targets = self._checked([tensor], "broadcast", writable=in_place)
        sources = [self.adapter.dense(target) for target in targets]
        outputs = (
            sources
            if in_place or sources[0] is not targets[0]
            else [self.adapter.empty_like(source) for source in sources]
        )
        return collectives.submit(
            collectives.BROADCAST,
            collectives.default_name("broadcast") if name is None else name,
            [self._view(*pair) for pair in zip(sources, outputs, strict=True)],
            keep=(sources, outputs),
            finish=lambda _: (self._written(targets, outputs) if in_place else outputs)[0],
            root=root_rank,
            wait_follows=wait_follows,
        )

    # -- allgather ----------------------------------------------------------------------------

    def allgather(self, tensor: T, name: str | None = None) -> T:
        """Concatenate the tensors of all ranks along the first dimension, in rank order.

        First dimensions may differ between ranks and may be 0; the others must be equal. A
        tensor without dimensions is a ValueError.
        """
        result: T = collectives.wait(
            self.gather_async("allgather", [tensor], name, _first, wait_follows=True)
        )
        return result

    def allgather_async(self, tensor: T, name: str | None = None) -> int:
        """Start an `allgather`; `synchronize(handle)` returns its result."""
        return self.gather_async("allgather", [tensor], name, _first)

    def grouped_allgather(self, tensors: Iterable[T], name: str | None = None) -> tuple[T, ...]:
        """Do as `allgather` for several tensors under one name, all or none of them."""
        result: tuple[T, ...] = collectives.wait(
            self.gather_async("grouped_allgather", tensors, name, wait_follows=True)
        )
        return result

    def grouped_allgather_async(self, tensors: Iterable[T], name: str | None = None) -> int:
        """Start a `grouped_allgather`: one handle for the group."""
        return self.gather_async("grouped_allgather", tensors, name)

    def gather_async(
        self,
        verb: str,
        tensors: Iterable[T],
        name: str | None,
        pack: Callable[[list[T]], Any] = tuple,
        *,
        wait_follows: bool = False,
    ) -> int:
        """Start what the verbs above describe; the last two as for `reduce_async`."""
        adapter = self.adapter
        inputs = [adapter.dense(tensor) for tensor in self._checked(tensors, verb)]

        def finish(handle: int) -> Any:
            return pack(
                [
                    adapter.gathered(collectives.take(handle, index), like)
                    for index, like in enumerate(inputs)
                ]
            )

        return collectives.submit(
            collectives.ALLGATHER,
            collectives.default_name(verb) if name is None else name,
            [self._view(tensor) for tensor in inputs],
            keep=inputs,
            finish=finish,
            wait_follows=wait_follows,
        )

    # -- shared -------------------------------------------------------------------------------

    def _checked(self, tensors: Iterable[T], verb: str, *, writable: bool = False) -> list[T]:
        checked = [self.adapter.check(tensor, verb) for tensor in tensors]
        if not checked:
            raise ValueError(f"{verb}: there are no tensors; pass at least one")
        if writable:
            for tensor in checked:
                self.adapter.check_writable(tensor, verb)
        return checked

    def _view(self, source: T, output: T | None = None) -> View:
        address, dtype, shape = self.adapter.describe(source)
        return View(
            address, 0 if output is None else self.adapter.describe(output)[0], dtype, shape
        )

    def _written(self, targets: list[T], outputs: list[T]) -> list[T]:
        """Bring results home into tensors that had to be copied."""
        for target, output in zip(targets, outputs, strict=True):
            if output is not target:
                self.adapter.copy(target, output)
        self.adapter.mark_written(targets)
        return targets


_first = itemgetter(0)


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. ValueError for an unknown handle."""
    return collectives.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result, or raise its error.

    A handle is good for one `synchronize`. ValueError for an unknown or used one.
    """
    return collectives.wait(handle)


def barrier() -> None:
    """Block until every rank has called `barrier`."""
    collectives.barrier()
