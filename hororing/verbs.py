"""The public verbs, written once for every array type.

`Verbs` knows how verbs behave; an `Adapter` (hororing/adapter.py) knows one framework's arrays. A
framework module makes one `Verbs` and publishes its methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import itemgetter
from typing import Any, Generic

from hororing import arguments, collectives
from hororing.adapter import Adapter, T
from hororing.collectives import View
from hororing.compression import Compressor, NoneCompressor, check_compression
from hororing.names import default_name
from hororing.process_sets import ProcessSet, check_member, global_process_set
from hororing.runtime import rank, size

_MOST_TEMPLATES = 1024


class Verbs(Generic[T]):
    """The verbs over one array type.

    Every verb is collective: all ranks must call it with the same `name` (or make their unnamed
    calls in the same order). Blocking ones block with the GIL released. Errors, for all:
    ValueError and TypeError for arguments that are wrong on this rank alone, a process set that
    it is not a member of among them; MismatchError, on
    every rank, when ranks disagree (the job goes on afterwards); NotInitializedError before
    `init`; ShutDownError, PeerLostError, StalledError and TransportError when the job ends.
    """

    def __init__(self, adapter: Adapter[T]) -> None:
        self.adapter = adapter
        self._templates: dict[Any, collectives.Template] = {}

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
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Combine `tensor` over all ranks and return the result, the same bits on every rank.

        Parameters
        ----------
        tensor : any shape, the same shape and data type on every rank.
        average : deprecated; True is op=Average, False op=Sum.
        name : unique among tensors in flight; made from the order of calls when omitted.
        compression : how the tensor travels, e.g. ``Compression.fp16``.
        op : Average (the default), Sum, Min, Max, Product, or Adasum (floating point, among all
            ranks, whose number is a power of two). An average of integers is truncated toward
            zero; bool has no average.
        prescale_factor, postscale_factor : applied to every rank's tensor, and to the result.
        process_set : the ranks that take part; all of the job when omitted.
        """
        check_compression(compression)
        compressed, context = compression.compress(tensor)
        chosen = arguments.choose_op(op, average)
        handle = self._start_one(
            compressed, False, name, chosen, prescale_factor, postscale_factor, process_set,
            wait_follows=True,
        )  # fmt: skip
        result: T = compression.decompress(collectives.wait(handle), context)
        return result

    def allreduce_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Do as `allreduce`, into `tensor` itself, and return it."""
        chosen = arguments.choose_op(op, average)
        handle = self._start_one(
            tensor, True, name, chosen, prescale_factor, postscale_factor, process_set,
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
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `allreduce`; `synchronize(handle)` returns its result.

        `tensor` must not be written to before that.
        """
        chosen = arguments.choose_op(op, average)
        return self._start_one(
            tensor, False, name, chosen, prescale_factor, postscale_factor, process_set
        )

    def allreduce_async_(
        self,
        tensor: T,
        average: bool | None = None,
        name: str | None = None,
        op: int | None = None,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `allreduce_`; `tensor` must not be touched before `synchronize(handle)`."""
        chosen = arguments.choose_op(op, average)
        return self._start_one(
            tensor, True, name, chosen, prescale_factor, postscale_factor, process_set
        )

    def _start_one(
        self,
        tensor: T,
        in_place: bool,
        name: str | None,
        op: int,
        prescale: float,
        postscale: float,
        process_set: ProcessSet,
        wait_follows: bool = False,
    ) -> int:
        """Do as `reduce_async` with one tensor, quickly where it is a plain one."""
        adapter = self.adapter
        plain = adapter.plain(tensor) if op != arguments.Adasum else None
        if plain is None:
            return self.reduce_async(
                "allreduce", [tensor], in_place, name, op, prescale, postscale, _first,
                process_set=process_set, wait_follows=wait_follows,
            )  # fmt: skip
        members = check_member(process_set, "allreduce")
        if type(prescale) is not float or type(postscale) is not float:
            prescale, postscale = arguments.check_factors(prescale, postscale, "allreduce")
        address, dtype, shape = plain
        key = (dtype, shape, members, op, prescale, postscale)
        template = self._templates.get(key)
        if template is None:
            if len(self._templates) >= _MOST_TEMPLATES:
                self._templates.clear()
            self._templates[key] = template = collectives.Template(
                collectives.ALLREDUCE, dtype, shape, members, op, prescale, postscale
            )
        pending: object = tensor
        written = address
        if not in_place:
            output = adapter.empty_like(tensor)
            pending = collectives.Pending((tensor, output), lambda _: output)
            written = adapter.describe(output)[0]
        if name is None:
            name = default_name("allreduce", members)
        handle = template.submit(name, address, written, pending, wait_follows)
        if in_place:
            adapter.mark_written((tensor,))
        return handle

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
    ) -> list[T]:
        """Do as `allreduce` for several tensors under one name, all or none of them.

        Data types and shapes may differ within the group. Returns a list.
        """
        check_compression(compression)
        packed = [compression.compress(tensor) for tensor in tensors]
        chosen = arguments.choose_op(op, average)
        handle = self.reduce_async(
            "grouped_allreduce", [tensor for tensor, _ in packed], False, name, chosen,
            prescale_factor, postscale_factor, process_set=process_set, wait_follows=True,
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
        process_set: ProcessSet = global_process_set,
    ) -> tuple[T, ...]:
        """Do as `grouped_allreduce`, into the tensors themselves; returns a tuple of them."""
        chosen = arguments.choose_op(op, average)
        handle = self.reduce_async(
            "grouped_allreduce", tensors, True, name, chosen, prescale_factor, postscale_factor,
            tuple, process_set=process_set, wait_follows=True,
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
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allreduce`: one handle for the group, one list from `synchronize`."""
        chosen = arguments.choose_op(op, average)
        return self.reduce_async(
            "grouped_allreduce", tensors, False, name, chosen, prescale_factor, postscale_factor,
            process_set=process_set,
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
    ) -> int:
        """Start a `grouped_allreduce_`: one handle for the group, one tuple from `synchronize`."""
        chosen = arguments.choose_op(op, average)
        return self.reduce_async(
            "grouped_allreduce", tensors, True, name, chosen, prescale_factor, postscale_factor,
            tuple, process_set=process_set,
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
        process_set: ProcessSet = global_process_set,
        wait_follows: bool = False,
    ) -> int:
        """Start what the verbs above describe; `pack` shapes the result.

        `wait_follows` as for `collectives.submit`.
        """
        adapter = self.adapter
        members = check_member(process_set, verb)
        if op == arguments.Adasum:
            arguments.check_adasum(members, verb)
        prescale, postscale = arguments.check_factors(prescale, postscale, verb)
        targets = self._checked(tensors, verb, writable=in_place)
        sources = [adapter.dense(tensor) for tensor in targets]
        # A tensor that had to be copied is reduced inside its copy: nobody else sees that.
        outputs = [
            source if in_place or source is not target else adapter.empty_like(source)
            for source, target in zip(sources, targets, strict=True)
        ]
        return self._submit(
            collectives.ALLREDUCE,
            default_name(verb, members) if name is None else name,
            [self._view(*pair) for pair in zip(sources, outputs, strict=True)],
            keep=(sources, outputs),
            finish=lambda _: pack(self._written(targets, outputs) if in_place else outputs),
            process_set=members,
            op=op,
            prescale=prescale,
            postscale=postscale,
            wait_follows=wait_follows,
        )

    # -- broadcast ----------------------------------------------------------------------------

    def broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Return, on every rank, the tensor that rank `root_rank` passes.

        `tensor` has the same shape and data type on every rank. `root_rank` counts among all ranks
        of the job, also within a process set.
        """
        result: T = collectives.wait(
            self._broadcast(tensor, root_rank, name, process_set, in_place=False, wait_follows=True)
        )
        return result

    def broadcast_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T:
        """Do as `broadcast`, into `tensor` itself, and return it."""
        result: T = collectives.wait(
            self._broadcast(tensor, root_rank, name, process_set, in_place=True, wait_follows=True)
        )
        return result

    def broadcast_async(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast`; `synchronize(handle)` returns its result."""
        return self._broadcast(tensor, root_rank, name, process_set, in_place=False)

    def broadcast_async_(
        self,
        tensor: T,
        root_rank: int,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `broadcast_`; `tensor` must not be touched before `synchronize(handle)`."""
        return self._broadcast(tensor, root_rank, name, process_set, in_place=True)

    def _broadcast(
        self,
        tensor: T,
        root_rank: int,
        name: str | None,
        process_set: ProcessSet,
        *,
        in_place: bool,
        wait_follows: bool = False,
    ) -> int:
        members = check_member(process_set, "broadcast")
        root_rank = arguments.check_root(root_rank, "broadcast")
        targets = self._checked([tensor], "broadcast", writable=in_place)
        sources = [self.adapter.dense(target) for target in targets]
        outputs = (
            sources
            if in_place or sources[0] is not targets[0]
            else [self.adapter.empty_like(source) for source in sources]
        )
        return self._submit(
            collectives.BROADCAST,
            default_name("broadcast", members) if name is None else name,
            [self._view(*pair) for pair in zip(sources, outputs, strict=True)],
            keep=(sources, outputs),
            finish=lambda _: (self._written(targets, outputs) if in_place else outputs)[0],
            process_set=members,
            root=root_rank,
            wait_follows=wait_follows,
        )

    # -- allgather ----------------------------------------------------------------------------

    def allgather(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> T:
        """Concatenate the tensors of all ranks along the first dimension, in rank order.

        First dimensions may differ between ranks and may be 0; the others must be equal. A
        tensor without dimensions is a ValueError.
        """
        result: T = collectives.wait(
            self.gather_async(
                "allgather", [tensor], name, _first, process_set=process_set, wait_follows=True
            )
        )
        return result

    def allgather_async(
        self, tensor: T, name: str | None = None, process_set: ProcessSet = global_process_set
    ) -> int:
        """Start an `allgather`; `synchronize(handle)` returns its result."""
        return self.gather_async("allgather", [tensor], name, _first, process_set=process_set)

    def grouped_allgather(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> tuple[T, ...]:
        """Do as `allgather` for several tensors under one name, all or none of them."""
        result: tuple[T, ...] = collectives.wait(
            self.gather_async(
                "grouped_allgather", tensors, name, process_set=process_set, wait_follows=True
            )
        )
        return result

    def grouped_allgather_async(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start a `grouped_allgather`: one handle for the group."""
        return self.gather_async("grouped_allgather", tensors, name, process_set=process_set)

    def gather_async(
        self,
        verb: str,
        tensors: Iterable[T],
        name: str | None,
        pack: Callable[[list[T]], Any] = tuple,
        *,
        process_set: ProcessSet = global_process_set,
        wait_follows: bool = False,
    ) -> int:
        """Start what the verbs above describe; the last three as for `reduce_async`."""
        members = check_member(process_set, verb)
        adapter = self.adapter
        inputs = [adapter.dense(tensor) for tensor in self._checked(tensors, verb)]

        def finish(handle: int) -> Any:
            return pack([self._gathered(handle, index, like) for index, like in enumerate(inputs)])

        return self._submit(
            collectives.ALLGATHER,
            default_name(verb, members) if name is None else name,
            [self._view(tensor) for tensor in inputs],
            keep=inputs,
            finish=finish,
            process_set=members,
            wait_follows=wait_follows,
        )

    # -- alltoall -----------------------------------------------------------------------------

    def alltoall(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> T | tuple[T, T]:
        """Send rows of `tensor` to every rank, and return the rows that all ranks sent here.

        Parameters
        ----------
        tensor : rows for rank 0, then those for rank 1, ...; ranks may differ in the first
            dimension only.
        splits : how many rows each rank of the set gets: a list, or a one-dimensional tensor of
            int32. Rows beyond their sum are not sent. Equally many when omitted.

        Returns the rows in the order of the ranks they come from; with `splits`, also how many
        came from each, as int32.
        """
        handle = self.exchange_async(tensor, splits, name, process_set, wait_follows=True)
        received, received_splits = collectives.wait(handle)
        return received if splits is None else (received, received_splits)

    def alltoall_async(
        self,
        tensor: T,
        splits: Any = None,
        name: str | None = None,
        process_set: ProcessSet = global_process_set,
    ) -> int:
        """Start an `alltoall`; `synchronize(handle)` returns rows and received splits."""
        return self.exchange_async(tensor, splits, name, process_set)

    def exchange_async(
        self,
        tensor: T,
        splits: Any,
        name: str | None,
        process_set: ProcessSet,
        *,
        wait_follows: bool = False,
    ) -> int:
        """Start what the verbs above describe; `wait_follows` as for `reduce_async`."""
        members = check_member(process_set, "alltoall")
        adapter = self.adapter
        rows = None if splits is None else adapter.splits(splits)
        (checked,) = self._checked([tensor], "alltoall")
        source = adapter.dense(checked)

        def finish(handle: int) -> tuple[T, T]:
            received = self._gathered(handle, 0, source)
            return received, adapter.int32s(collectives.take_numbers(handle, 1))

        return self._submit(
            collectives.ALLTOALL,
            default_name("alltoall", members) if name is None else name,
            [self._view(source)],
            keep=source,
            finish=finish,
            process_set=members,
            integers=rows,
            wait_follows=wait_follows,
        )

    # -- reducescatter ------------------------------------------------------------------------

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

        The first dimension is split over the ranks in order; where it does not divide evenly, the
        first ranks get one row more. `op` is Average or Sum; the rest as for `allreduce`.
        """
        check_compression(compression)
        compressed, context = compression.compress(tensor)
        handle = self.scatter_async(
            "reducescatter", [compressed], name, op, process_set,
            prescale_factor, postscale_factor, _first, wait_follows=True,
        )  # fmt: skip
        result: T = compression.decompress(collectives.wait(handle), context)
        return result

    def reducescatter_async(
        self,
        tensor: T,
        name: str | None = None,
        op: int = arguments.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `reducescatter`; `synchronize(handle)` returns its result."""
        return self.scatter_async(
            "reducescatter", [tensor], name, op, process_set,
            prescale_factor, postscale_factor, _first,
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
        """Do as `reducescatter` for several tensors under one name, all or none of them."""
        check_compression(compression)
        packed = [compression.compress(tensor) for tensor in tensors]
        handle = self.scatter_async(
            "grouped_reducescatter", [tensor for tensor, _ in packed], name, op, process_set,
            prescale_factor, postscale_factor, wait_follows=True,
        )  # fmt: skip
        results = collectives.wait(handle)
        return [
            compression.decompress(result, context)
            for result, (_, context) in zip(results, packed, strict=True)
        ]

    def grouped_reducescatter_async(
        self,
        tensors: Iterable[T],
        name: str | None = None,
        op: int = arguments.Average,
        process_set: ProcessSet = global_process_set,
        prescale_factor: float = 1.0,
        postscale_factor: float = 1.0,
    ) -> int:
        """Start a `grouped_reducescatter`: one handle for the group."""
        return self.scatter_async(
            "grouped_reducescatter", tensors, name, op, process_set,
            prescale_factor, postscale_factor,
        )  # fmt: skip

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
        wait_follows: bool = False,
    ) -> int:
        """Start what the verbs above describe; the last two as for `reduce_async`."""
        members = check_member(process_set, verb)
        prescale, postscale = arguments.check_factors(prescale, postscale, verb)
        arguments.check_scatter_op(op, verb)
        adapter = self.adapter
        inputs = [adapter.dense(tensor) for tensor in self._checked(tensors, verb)]
        shapes = [adapter.describe(tensor)[2] for tensor in inputs]
        if not all(shapes):
            raise ValueError(
                f"{verb}: a tensor without dimensions has no rows to scatter; use allreduce"
            )
        place, size = place_and_size(process_set)
        outputs = [
            adapter.empty_rows(tensor, rows_of(shape[0], size, place))
            for tensor, shape in zip(inputs, shapes, strict=True)
        ]
        return self._submit(
            collectives.REDUCESCATTER,
            default_name(verb, members) if name is None else name,
            [self._view(*pair) for pair in zip(inputs, outputs, strict=True)],
            keep=(inputs, outputs),
            finish=lambda _: pack(outputs),
            process_set=members,
            op=op,
            prescale=prescale,
            postscale=postscale,
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
            address,
            0 if output is None else self.adapter.describe(output)[0],
            dtype,
            shape,
            self.adapter.device(source),
        )

    def _submit(
        self,
        collective: int,
        name: str,
        views: list[View],
        *,
        finish: Callable[[int], Any],
        **rest: Any,
    ) -> int:
        """Do as `collectives.submit`.

        Of tensors on a device, what this thread computes from `finish` on comes after the results,
        and so does what comes later in the stream that they were submitted in: that is where their
        memory goes to when nobody needs it any more.
        """
        device = views[0].device
        if device == collectives.HOST:
            return collectives.submit(collective, name, views, finish=finish, **rest)
        stream = self.adapter.stream(device)

        def finish_on_device(handle: int) -> Any:
            for each in {stream, self.adapter.stream(device)}:
                collectives.wait_in_stream(handle, each)
            return finish(handle)

        return collectives.submit(
            collective, name, views, finish=finish_on_device, stream=stream, **rest
        )

    def _gathered(self, handle: int, index: int, like: T) -> T:
        """Take a result whose size only the core knew."""
        adapter = self.adapter
        device = adapter.device(like)
        if device == collectives.HOST:
            return adapter.gathered(collectives.take(handle, index), like)
        result = adapter.empty_rows(like, collectives.rows(handle, index))
        address, _, shape = adapter.describe(result)
        if 0 not in shape:
            collectives.move(handle, index, address, adapter.stream(device))
        return result

    def _written(self, targets: list[T], outputs: list[T]) -> list[T]:
        """Bring results home into tensors that had to be copied."""
        for target, output in zip(targets, outputs, strict=True):
            if output is not target:
                self.adapter.copy(target, output)
        self.adapter.mark_written(targets)
        return targets


_first = itemgetter(0)


def rows_of(rows: int, size: int, place: int) -> int:
    """How many of `rows` rows the rank at `place` gets when `size` ranks share them."""
    return rows // size + (place < rows % size)


def place_and_size(process_set: ProcessSet) -> tuple[int, int]:
    """Return this rank's place among the ranks of the set, and how many those are."""
    if process_set is global_process_set:
        return rank(), size()
    return process_set.ranks.index(rank()), len(process_set.ranks)


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. ValueError for an unknown handle."""
    return collectives.poll(handle)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous operation and return its result, or raise its error.

    A handle is good for one `synchronize`. ValueError for an unknown or used one.
    """
    return collectives.wait(handle)


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Block until every rank of the process set has called `barrier`.

    What all of them had submitted to the set by then has landed when it returns.
    """
    collectives.barrier(check_member(process_set, "barrier"))


def join(device: int = -1) -> int:
    """Block until every rank has called `join`; return the last one to do so.

    For ranks that have run out of data. Until it returns this rank takes part in whatever the
    others allreduce, with values that leave theirs as they are: zeros for Sum, Average and Adasum
    (an Average still divides by the number of all ranks), the neutral element for the rest. Other
    collectives than allreduce and barrier fail with MismatchError meanwhile, on every rank, and so
    do Min, Max and Product with a prescale_factor.
    Calls of other threads of this rank are a ValueError until it returns.

    `device` is the GPU whose memory holds those values, as in Horovod: the one that this process
    communicates on. It need not be said if a tensor has been there before.
    """
    if device != -1:
        context = f" (join: device={device}; leave it out where tensors are on the CPU)"
        collectives.use_device(device, context)
    return collectives.join()
