"""The process group: torch.distributed's collectives as requests of the engine.

A group is a process set. Its calls are numbered, and the number is the request's name: so calls
match in their order, and one that differs between ranks is a MismatchError on all of them. A call
that fails on one rank alone, before the engine has it, takes its number too; the rank sends a
barrier in its place, from which the others learn that it made no such call.

torch calls the methods by their names, from Python or (DDP, functional collectives) from C++.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as torch_distributed

from hororing import arguments, collectives, control, process_sets
from hororing.errors import MismatchError, StalledError, UnsupportedOpError
from hororing.process_sets import ProcessSet
from hororing.torch.distributed.message import Message
from hororing.torch.distributed.work import Work
from hororing.torch.ops import start_sparse_allreduce
from hororing.torch.verbs import adapter, verbs

# torch's stubs tell of other signatures, and lack much.
dist: Any = torch_distributed
_Base: Any = dist.ProcessGroup

Tensors = list[torch.Tensor]
F = TypeVar("F", bound=Callable[..., Any])

_RedOpType: Final = dist.ReduceOp.RedOpType
_OPS: Final[dict[Any, int]] = {
    _RedOpType.SUM: arguments.Sum,
    _RedOpType.AVG: arguments.Average,
    _RedOpType.MIN: arguments.Min,
    _RedOpType.MAX: arguments.Max,
    _RedOpType.PRODUCT: arguments.Product,
}
# Of integers and bool: all ranks' tensors are gathered and combined here.
_BITWISE: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    _RedOpType.BAND: torch.bitwise_and,
    _RedOpType.BOR: torch.bitwise_or,
    _RedOpType.BXOR: torch.bitwise_xor,
}
# What reduce-scatter can do; the rest is an allreduce, of which each rank keeps its part.
_SCATTERS: Final = (arguments.Sum, arguments.Average)


def _number(op: Any, verb: str) -> int:
    """Return the engine's operation for one of torch's."""
    number = _OPS.get(op.op)
    if number is None:
        raise UnsupportedOpError(
            f"{verb}: op={op.op.name} is not supported; use SUM, AVG, MIN, MAX or PRODUCT; BAND, "
            "BOR and BXOR work in all_reduce and reduce"
        )
    return number


def _call(function: F) -> F:
    """Give a method the name of its request, and that to the other ranks if it fails."""
    verb = function.__name__.lstrip("_")

    @functools.wraps(function)
    def call(self: ProcessGroup, *args: Any, **kwargs: Any) -> Work:
        name = self.next_name(verb)
        try:
            work: Work = function(self, name, *args, **kwargs)
        except (TypeError, ValueError, NotImplementedError):
            self.refuse(name)
            raise
        return work

    return call  # type: ignore[return-value]


def _single(tensors: Any, verb: str) -> Any:
    if len(tensors) != 1:
        raise ValueError(f"{verb}: a process has one tensor here, not {len(tensors)}")
    return tensors[0]


def _fill(verb: str, outputs: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    """Copy what each rank of the group has sent."""
    for rank, (output, part) in enumerate(zip(outputs, parts, strict=True)):
        if output.numel() != part.numel():
            raise MismatchError(
                f"{verb}: rank {rank} of the group has sent {part.numel()} elements, but the "
                f"output for them has {output.numel()} (shape {list(output.shape)})"
            )
        adapter.copy(output, part.reshape(output.shape))


def _alike(tensors: Sequence[torch.Tensor]) -> bool:
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


class ProcessGroup(_Base):  # type: ignore[misc]
    """A process group of torch.distributed over hororing. `init_process_group` makes it.

    All collectives take tensors of the CPU or of one CUDA device, of the types that
    `hororing.torch` knows; tensors need not be contiguous. Each returns a `Work`. Errors that this
    rank alone can find are raised here, and the others get a MismatchError; all others come from
    `wait`: MismatchError if ranks disagree, on all of them, after which the group can go on;
    StalledError after the group's timeout; ShutDownError, PeerLostError and TransportError when the
    job ends.

    Parameters
    ----------
    rank : of this process among `ranks`.
    ranks : of the job, ascending.
    timeout : how long a call waits.
    at_shutdown : called when the group is destroyed.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        timeout: timedelta,
        at_shutdown: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(rank, len(ranks))
        self._place, self._ranks = rank, list(ranks)
        self._torch_name = self._description = "undefined"
        self._timeout_s = timeout.total_seconds()
        self._at_shutdown: Callable[[], None] | None = at_shutdown
        self._numbers = itertools.count(1)
        # Of messages, by source, target and tag.
        self._messages: defaultdict[tuple[int, int, int], Iterator[int]] = defaultdict(
            lambda: itertools.count(1)
        )
        members = process_sets.of_members(self._ranks)
        # torch's own name may differ between the members.
        self._name = f"group{next(members.users)}"
        found = members.get(self._timeout_s)
        if found is None:
            raise StalledError(
                f"process group of ranks {self._ranks}: some of them have not made it within "
                f"{self._timeout_s:g} s"
            )
        self._set: ProcessSet = found

    # -- what it is

    def getBackendName(self) -> str:
        """Return "hororing"."""
        return "hororing"

    _get_backend_name = name = getBackendName

    def __repr__(self) -> str:
        return f"<hororing {self._name} of ranks {self._ranks}: rank {self._place} of it>"

    def getGroupName(self) -> str:
        """Return torch's name of the group."""
        return self._torch_name

    def setGroupName(self, name: str) -> None:
        """Note torch's name of the group."""
        self._torch_name = name

    def getGroupDesc(self) -> str:
        """Return torch's description of the group."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Note torch's description of the group."""
        self._description = description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def set_timeout(self, timeout: timedelta) -> None:
        """Have later calls wait so long."""
        self._timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """End the group. What is in flight goes on; later calls are a ValueError."""
        ended, self._at_shutdown = self._at_shutdown, None
        if ended is not None:
            ended()

    abort = shutdown

    # -- names and waits

    def next_name(self, verb: str) -> str:
        """Return the name of the next call. ValueError after `shutdown`."""
        self._check_alive(verb)
        return f"{self._name}.{next(self._numbers)}"

    def refuse(self, name: str) -> None:
        """Let the other ranks know that this one fails to make the call."""
        with contextlib.suppress(ValueError):  # there is no engine
            handle = control.start_barrier(name, self._members(), wait_follows=False)
            collectives.abandon(handle, None)

    def _members(self) -> int:
        return process_sets.check_member(self._set, "process group")

    def _root(self, opts: Any) -> int:
        rank: int = opts.rootRank
        if not 0 <= rank < len(self._ranks):
            raise ValueError(f"rank {rank} is not one of the group, which has {len(self._ranks)}")
        return self._ranks[rank]

    def _work(
        self,
        verb: str,
        name: str,
        handle: int,
        result: Tensors,
        opts: Any = None,
        finish: Callable[[Any], None] | None = None,
    ) -> Work:
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0.0
        return Work(
            f"{verb} '{name}'", handle, result, timeout_s if timeout_s > 0 else self._timeout_s,
            finish,
        )  # fmt: skip

    # -- collectives

    @_call
    def allreduce(self, name: str, tensors: Any, opts: Any = None) -> Work:
        """Combine one tensor over the group, in place; dense, or sparse COO for SUM and AVG."""
        opts = opts or dist.AllreduceOptions()
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        tensor, op = _single(tensors, "all_reduce"), opts.reduceOp
        if tensor.layout is torch.sparse_coo:
            return self._sparse_allreduce(name, tensor, op, opts)
        if op.op in _BITWISE:
            return self._bitwise("all_reduce", name, tensor, op, opts, True)
        answer = verbs.start_one(
            tensor, True, None, name, _number(op, "all_reduce"), 1.0, 1.0, self._set,
            not opts.asyncOp,
        )  # fmt: skip
        handle = answer if type(answer) is int else 0
        return self._work("all_reduce", name, handle, tensors, opts)

    def _sparse_allreduce(self, name: str, tensor: torch.Tensor, op: Any, opts: Any) -> Work:
        handle, combine = start_sparse_allreduce(
            tensor.detach(), name, _number(op, "all_reduce"), self._set
        )
        return self._work(
            "all_reduce", name, handle, [tensor], opts,
            lambda gathered: adapter.copy(tensor, combine(gathered).coalesce()),
        )  # fmt: skip

    def _bitwise(
        self, verb: str, name: str, tensor: torch.Tensor, op: Any, opts: Any, keeps: bool
    ) -> Work:
        if tensor.is_floating_point() or tensor.is_complex():
            raise UnsupportedOpError(
                f"{verb}: op={op.op.name} is not defined for {tensor.dtype}; it takes integers"
            )

        def finish(gathered: tuple[torch.Tensor]) -> None:
            if keeps:
                combined = functools.reduce(_BITWISE[op.op], gathered[0].unbind())
                adapter.copy(tensor, combined.reshape(tensor.shape))

        handle = verbs.gather_async(verb, [tensor.unsqueeze(0)], name, process_set=self._set)
        return self._work(verb, name, handle, [tensor], opts, finish)

    @_call
    def allreduce_coalesced(self, name: str, tensors: Tensors, opts: Any = None) -> Work:
        """Combine several tensors, in place, in one request."""
        opts = opts or dist.AllreduceCoalescedOptions()
        handle = verbs.reduce_async(
            "all_reduce_coalesced", tensors, True, name,
            _number(opts.reduceOp, "all_reduce_coalesced"), 1.0, 1.0, process_set=self._set,
            wait_follows=not opts.asyncOp,
        )  # fmt: skip
        return self._work("all_reduce_coalesced", name, handle, tensors, opts)

    @_call
    def reduce(self, name: str, tensors: Any, opts: Any) -> Work:
        """Combine one tensor over the group into that of the root."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        tensor, op = _single(tensors, "reduce"), opts.reduceOp
        keeps = self._root(opts) == self._ranks[self._place]
        if op.op in _BITWISE:
            return self._bitwise("reduce", name, tensor, op, opts, keeps)
        handle = verbs.reduce_async(
            "reduce", tensors, keeps, name, _number(op, "reduce"), 1.0, 1.0,
            process_set=self._set, wait_follows=not opts.asyncOp,
        )  # fmt: skip
        return self._work("reduce", name, handle, tensors, opts)

    @_call
    def broadcast(self, name: str, tensors: Any, opts: Any) -> Work:
        """Copy the root's tensor to all ranks."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        handle = verbs.start_broadcast(
            _single(tensors, "broadcast"), self._root(opts), name, self._set, in_place=True,
            wait_follows=not opts.asyncOp,
        )  # fmt: skip
        return self._work("broadcast", name, handle, tensors, opts)

    @_call
    def allgather(
        self, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Copy every rank's tensor into a list; ranks may differ in the first dimension."""
        opts = opts or dist.AllgatherOptions()
        tensor, targets = _single(inputs, "all_gather"), _single(outputs, "all_gather")
        return self._gather("all_gather", name, [list(targets)], [tensor], opts)

    @_call
    def allgather_coalesced(
        self, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any = None
    ) -> Work:
        """Do as `allgather` with several tensors, which are lists of `outputs` by rank."""
        opts = opts or dist.AllgatherOptions()
        self._check_count("all_gather_coalesced", "lists of outputs", outputs)
        if any(len(each) != len(inputs) for each in outputs):
            raise ValueError(
                f"all_gather_coalesced: every list of outputs must have {len(inputs)} tensors, as "
                "the inputs are"
            )
        return self._gather(
            "all_gather_coalesced", name, [list(each) for each in zip(*outputs, strict=True)],
            inputs, opts,
        )  # fmt: skip

    def _gather(
        self, verb: str, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any
    ) -> Work:
        """Gather each input into its outputs, which are in rank order."""
        for targets in outputs:
            self._check_count(verb, "outputs", targets)
        # Of equal shapes: then ranks that differ find out. A row of a tensor, else its own rows.
        alike = [_alike([one, *targets]) for one, targets in zip(inputs, outputs, strict=True)]
        sent = [
            tensor.unsqueeze(0) if even or tensor.dim() == 0 else tensor
            for tensor, even in zip(inputs, alike, strict=True)
        ]

        def finish(gathered: tuple[torch.Tensor, ...]) -> None:
            for rows, targets, even in zip(gathered, outputs, alike, strict=True):
                sizes = [1 if even or not each.dim() else each.shape[0] for each in targets]
                if sum(sizes) != len(rows):
                    raise MismatchError(
                        f"{verb} '{name}': the ranks have sent {len(rows)} rows together, but the "
                        f"outputs have {sizes}"
                    )
                _fill(verb, targets, torch.split(rows, sizes))

        handle = verbs.gather_async(
            verb, sent, name, process_set=self._set, wait_follows=not opts.asyncOp
        )
        return self._work(
            verb, name, handle, list(itertools.chain.from_iterable(outputs)), opts, finish
        )

    @_call
    def _allgather_base(
        self, name: str, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Copy every rank's tensor into one, after one another."""
        opts = opts or dist.AllgatherOptions()
        return self._gather_into("all_gather_into_tensor", name, [output], [tensor], opts)

    @_call
    def allgather_into_tensor_coalesced(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Do as `_allgather_base` with several tensors, in one request."""
        opts = opts or dist.AllgatherOptions()
        return self._gather_into("all_gather_into_tensor_coalesced", name, outputs, inputs, opts)

    def _gather_into(
        self, verb: str, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Work:
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(verb, "output", output, "input", tensor)

        def finish(gathered: tuple[torch.Tensor, ...]) -> None:
            for output, rows in zip(outputs, gathered, strict=True):
                adapter.copy(output, rows.reshape(output.shape))

        handle = verbs.gather_async(
            verb, [tensor.unsqueeze(0) for tensor in inputs], name, process_set=self._set,
            wait_follows=not opts.asyncOp,
        )  # fmt: skip
        return self._work(verb, name, handle, outputs, opts, finish)

    @_call
    def gather(self, name: str, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Copy every rank's tensor, all of one shape, into a list of the root."""
        tensor, root = _single(inputs, "gather"), self._root(opts)
        targets = list(_single(outputs, "gather")) if root == self._ranks[self._place] else []
        if targets:
            self._check_count("gather", "outputs", targets)

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            if targets:
                _fill("gather", targets, torch.split(answer[0], 1))

        splits = [int(rank == root) for rank in self._ranks]
        handle = verbs.exchange_async(tensor.unsqueeze(0), splits, name, self._set)
        return self._work("gather", name, handle, targets, opts, finish)

    @_call
    def scatter(self, name: str, outputs: Tensors, inputs: list[Tensors], opts: Any) -> Work:
        """Copy one of the root's tensors, all of one shape, to each rank."""
        output = _single(outputs, "scatter")
        if self._root(opts) == self._ranks[self._place]:
            sources = _single(inputs, "scatter")
            self._check_count("scatter", "inputs", sources)
            rows = torch.stack([source.detach() for source in sources])
        else:
            rows = output.detach().new_empty((0, *output.shape))
        splits = [int(len(rows) > 0)] * len(self._ranks)

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            _fill("scatter", [output], [answer[0]])

        handle = verbs.exchange_async(rows, splits, name, self._set)
        return self._work("scatter", name, handle, [output], opts, finish)

    @_call
    def reduce_scatter(
        self, name: str, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Combine a list of tensors, of which each rank gets one."""
        opts = opts or dist.ReduceScatterOptions()
        output, sources = _single(outputs, "reduce_scatter"), _single(inputs, "reduce_scatter")
        self._check_count("reduce_scatter", "inputs", sources)
        if output.shape != sources[self._place].shape:
            raise ValueError(
                f"reduce_scatter: the output has shape {list(output.shape)}, but this rank's part "
                f"of the inputs has {list(sources[self._place].shape)}"
            )
        if _alike(sources):
            rows = torch.stack([source.detach() for source in sources])
            return self._scatter("reduce_scatter", name, [output], [rows], opts)
        # The ranks' parts differ in size.
        flat = torch.cat([source.detach().reshape(-1) for source in sources])
        sizes = [source.numel() for source in sources]
        return self._reduce_parts(
            "reduce_scatter", name, [output], [flat],
            lambda all_parts: torch.split(all_parts, sizes)[self._place], opts,
        )  # fmt: skip

    @_call
    def _reduce_scatter_base(
        self, name: str, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Combine a tensor, of which each rank gets an equal part."""
        opts = opts or dist.ReduceScatterOptions()
        return self._scatter_tensors("reduce_scatter_tensor", name, [output], [tensor], opts)

    @_call
    def reduce_scatter_tensor_coalesced(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Do as `_reduce_scatter_base` with several tensors, in one request."""
        opts = opts or dist.ReduceScatterOptions()
        return self._scatter_tensors("reduce_scatter_tensor_coalesced", name, outputs, inputs, opts)

    def _scatter_tensors(
        self, verb: str, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Work:
        rows = []
        for output, tensor in zip(outputs, inputs, strict=True):
            self._check_whole(verb, "input", tensor, "output", output)
            rows.append(tensor.reshape(len(self._ranks), *output.shape))
        return self._scatter(verb, name, outputs, rows, opts)

    def _scatter(self, verb: str, name: str, outputs: Tensors, rows: Tensors, opts: Any) -> Work:
        """Combine tensors that have a row for each rank."""
        op = _number(opts.reduceOp, verb)
        if op not in _SCATTERS:
            return self._reduce_parts(
                verb, name, outputs, rows, lambda every: every[self._place], opts
            )

        def finish(parts: list[torch.Tensor]) -> None:
            for output, part in zip(outputs, parts, strict=True):
                adapter.copy(output, part.reshape(output.shape))

        handle = verbs.scatter_async(
            verb, rows, name, op, self._set, 1.0, 1.0, wait_follows=not opts.asyncOp
        )
        return self._work(verb, name, handle, outputs, opts, finish)

    def _reduce_parts(
        self,
        verb: str,
        name: str,
        outputs: Tensors,
        inputs: Tensors,
        part: Callable[[torch.Tensor], torch.Tensor],
        opts: Any,
    ) -> Work:
        """Combine everything on every rank, of which it keeps a part."""

        def finish(results: Tensors) -> None:
            for output, result in zip(outputs, results, strict=True):
                adapter.copy(output, part(result).reshape(output.shape))

        handle = verbs.reduce_async(
            verb, inputs, False, name, _number(opts.reduceOp, verb), 1.0, 1.0,
            process_set=self._set, wait_follows=not opts.asyncOp,
        )  # fmt: skip
        return self._work(verb, name, handle, outputs, opts, finish)

    @_call
    def alltoall_base(
        self,
        name: str,
        output: torch.Tensor,
        tensor: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> Work:
        """Send rows to every rank; splits are rows by rank, or empty for equally many."""
        verb = "all_to_all_single"
        opts = opts or dist.AllToAllOptions()
        sends = self._splits(verb, "input", tensor, input_splits)
        receives = self._splits(verb, "output", output, output_splits)

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            rows, counts = answer
            if counts.tolist() != receives:
                raise MismatchError(
                    f"{verb} '{name}': this rank expects {receives} rows from the ranks of the "
                    f"group, which have sent {counts.tolist()}"
                )
            adapter.copy(output, rows.reshape(output.shape))

        handle = verbs.exchange_async(tensor, sends, name, self._set, wait_follows=not opts.asyncOp)
        return self._work(verb, name, handle, [output], opts, finish)

    @_call
    def alltoall(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any = None) -> Work:
        """Send a tensor to every rank; sizes may differ."""
        verb = "all_to_all"
        opts = opts or dist.AllToAllOptions()
        self._check_count(verb, "inputs", inputs)
        self._check_count(verb, "outputs", outputs)
        flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])

        def finish(answer: tuple[torch.Tensor, torch.Tensor]) -> None:
            _fill(verb, outputs, torch.split(answer[0], answer[1].tolist()))

        handle = verbs.exchange_async(
            flat, [tensor.numel() for tensor in inputs], name, self._set,
            wait_follows=not opts.asyncOp,
        )  # fmt: skip
        return self._work(verb, name, handle, outputs, opts, finish)

    @_call
    def barrier(self, name: str, opts: Any = None) -> Work:
        """Wait for all ranks."""
        opts = opts or dist.BarrierOptions()
        handle = control.start_barrier(name, self._members(), wait_follows=not opts.asyncOp)
        return self._work("barrier", name, handle, [], opts)

    # -- messages

    def send(self, tensors: Tensors, target: int, tag: int = 0) -> Work:
        """Send a tensor to a rank of the group, which receives it into one of as many elements.

        Messages of one tag arrive in order. ValueError if the target is this rank.
        """
        tensor = adapter.check(_single(tensors, "send"), "send")
        flat = tensor.data.reshape(-1)
        return self._message("send", tensor, flat, self._place, target, tag, target, None)

    def recv(self, tensors: Tensors, source: int, tag: int = 0) -> Work:
        """Receive a tensor from a rank of the group.

        MismatchError on both ranks if it differs in data type or number of elements.
        """
        tensor = adapter.check(_single(tensors, "recv"), "recv")
        adapter.check_writable(tensor, "recv")
        if tensor.is_contiguous():
            flat, finish = tensor.detach().view(-1), None
        else:
            flat = tensor.detach().new_empty(tensor.numel())

            def finish(_: Any) -> None:
                adapter.copy(tensor, flat.view(tensor.shape))

        return self._message("recv", tensor, flat, source, self._place, tag, source, finish)

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> Work:
        """Raise NotImplementedError: both ranks must know who sends."""
        raise NotImplementedError("recv: messages from any source are not supported; pass src")

    def _message(
        self,
        verb: str,
        tensor: torch.Tensor,
        flat: torch.Tensor,
        source: int,
        target: int,
        tag: int,
        peer: int,
        finish: Callable[[Any], None] | None,
    ) -> Work:
        self._check_alive(verb)
        if not 0 <= peer < len(self._ranks) or peer == self._place:
            raise ValueError(f"{verb}: rank {peer} is not another rank of {self!r}")
        number = next(self._messages[source, target, tag])
        # Other groups of these two have messages, too.
        name = f"set{self._members()}.{self._name}.from{source}.to{target}.tag{tag}.{number}"
        root = self._ranks[source]

        def start(pair: ProcessSet) -> int:
            return verbs.start_broadcast(flat, root, name, pair, in_place=True)

        pair = process_sets.of_members([root, self._ranks[target]])
        return Message(f"{verb} '{name}'", tensor, self._timeout_s, pair, start, source, finish)

    # The names of torch 2.13; those above are what torch has called them before.
    all_gather_single = _allgather_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    # -- checks

    def _check_alive(self, verb: str) -> None:
        if self._at_shutdown is None:
            raise ValueError(f"{verb}: {self!r} has been destroyed")

    def _check_count(self, verb: str, what: str, tensors: Sequence[Any]) -> None:
        if len(tensors) != len(self._ranks):
            raise ValueError(
                f"{verb}: there are {len(tensors)} {what}; there must be one for each of the "
                f"{len(self._ranks)} ranks of the group"
            )

    def _check_whole(
        self, verb: str, what: str, whole: torch.Tensor, of_what: str, part: torch.Tensor
    ) -> None:
        if whole.numel() != part.numel() * len(self._ranks) or whole.dtype != part.dtype:
            raise ValueError(
                f"{verb}: the {what} has {whole.numel()} elements of {whole.dtype}; it must have "
                f"{len(self._ranks)} (ranks) times the {part.numel()} of the {of_what}, of "
                f"{part.dtype}"
            )

    def _splits(
        self, verb: str, what: str, tensor: torch.Tensor, splits: Sequence[int]
    ) -> list[int]:
        rows, size = tensor.shape[0] if tensor.dim() else 0, len(self._ranks)
        if not splits:
            if rows % size:
                raise ValueError(
                    f"{verb}: the {rows} rows of the {what} cannot be split equally among {size} "
                    "ranks; pass splits"
                )
            return [rows // size] * size
        if len(splits) != size or sum(splits) != rows:
            raise ValueError(
                f"{verb}: the {what} has {rows} rows for {size} ranks, but its splits are "
                f"{list(splits)}"
            )
        return list(splits)
