"""Collectives that combine: all_reduce, reduce and reduce_scatter, and their forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

import torch

from hororing._requests import arguments
from hororing.errors import UnsupportedOpError
from hororing.torch._tensor.verbs import adapter, verbs
from hororing.torch.distributed.base import Group, Tensors, dist, request, same_shape, single
from hororing.torch.distributed.work import Work
from hororing.torch.ops import start_sparse_allreduce

_RedOpType: Final = dist.ReduceOp.RedOpType
_OPS: Final[dict[Any, int]] = {
    _RedOpType.SUM: arguments.Sum,
    _RedOpType.AVG: arguments.Average,
    _RedOpType.MIN: arguments.Min,
    _RedOpType.MAX: arguments.Max,
    _RedOpType.PRODUCT: arguments.Product,
}
# For integers and bool: the tensors of all ranks are gathered and combined here.
_BITWISE: Final[dict[Any, Callable[..., torch.Tensor]]] = {
    _RedOpType.BAND: torch.bitwise_and,
    _RedOpType.BOR: torch.bitwise_or,
    _RedOpType.BXOR: torch.bitwise_xor,
}
# Supported by reduce-scatter; others use an allreduce, of which each rank keeps its part.
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


class Reductions(Group):
    """Collectives that combine tensors of all ranks."""

    @request
    def allreduce(self, name: str, tensors: Any, opts: Any = None) -> Work:
        """Combine one tensor over the group, in place; dense, or sparse COO for SUM and AVG."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        tensor, op = single(tensors, "all_reduce"), opts.reduceOp
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

    @request
    def allreduce_coalesced(self, name: str, tensors: Tensors, opts: Any = None) -> Work:
        """Combine several tensors, in place, in one request."""
        opts = opts or dist.AllreduceCoalescedOptions()
        handle = verbs.reduce_async(
            "all_reduce_coalesced", tensors, True, name,
            _number(opts.reduceOp, "all_reduce_coalesced"), 1.0, 1.0, process_set=self._set,
            blocking=not opts.asyncOp,
        )  # fmt: skip
        return self._work("all_reduce_coalesced", name, handle, tensors, opts)

    @request
    def reduce(self, name: str, tensors: Any, opts: Any) -> Work:
        """Combine one tensor over the group, into the root's tensor."""
        tensors = [tensors] if isinstance(tensors, torch.Tensor) else tensors
        tensor, op = single(tensors, "reduce"), opts.reduceOp
        keeps = self._root(opts) == self._ranks[self._place]
        if op.op in _BITWISE:
            return self._bitwise("reduce", name, tensor, op, opts, keeps)
        handle = verbs.reduce_async(
            "reduce", tensors, keeps, name, _number(op, "reduce"), 1.0, 1.0,
            process_set=self._set, blocking=not opts.asyncOp,
        )  # fmt: skip
        return self._work("reduce", name, handle, tensors, opts)

    @request
    def reduce_scatter(
        self, name: str, outputs: Tensors, inputs: list[Tensors], opts: Any = None
    ) -> Work:
        """Combine a list of tensors, one for each rank."""
        output, sources = single(outputs, "reduce_scatter"), single(inputs, "reduce_scatter")
        self._check_count("reduce_scatter", "inputs", sources)
        if output.shape != sources[self._place].shape:
            raise ValueError(
                f"reduce_scatter: the output has shape {list(output.shape)}, but this rank's part "
                f"of the inputs has {list(sources[self._place].shape)}"
            )
        if same_shape(sources):
            rows = torch.stack([source.detach() for source in sources])
            return self._scatter("reduce_scatter", name, [output], [rows], opts)
        # The ranks' parts differ in size.
        flat = torch.cat([source.detach().reshape(-1) for source in sources])
        sizes = [source.numel() for source in sources]
        return self._reduce_parts(
            "reduce_scatter", name, [output], [flat],
            lambda all_parts: torch.split(all_parts, sizes)[self._place], opts,
        )  # fmt: skip

    @request
    def _reduce_scatter_base(
        self, name: str, output: torch.Tensor, tensor: torch.Tensor, opts: Any = None
    ) -> Work:
        """Combine a tensor; each rank gets an equal part."""
        opts = opts or dist.ReduceScatterOptions()
        return self._scatter_tensors("reduce_scatter_tensor", name, [output], [tensor], opts)

    @request
    def reduce_scatter_tensor_coalesced(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Work:
        """Like `_reduce_scatter_base` with several tensors, in one request."""
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
        """Combine tensors that have one row per rank."""
        op = _number(opts.reduceOp, verb)
        if op not in _SCATTERS:
            return self._reduce_parts(
                verb, name, outputs, rows, lambda every: every[self._place], opts
            )

        def finish(parts: list[torch.Tensor]) -> None:
            for output, part in zip(outputs, parts, strict=True):
                adapter.copy(output, part.reshape(output.shape))

        if not self._is_ascending:
            rows = [torch.stack(self._in_set_order(each)) for each in rows]
        handle = verbs.scatter_async(
            verb, rows, name, op, self._set, 1.0, 1.0, blocking=not opts.asyncOp
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
        """Combine everything on every rank, which keeps its part."""

        def finish(results: Tensors) -> None:
            for output, result in zip(outputs, results, strict=True):
                adapter.copy(output, part(result).reshape(output.shape))

        handle = verbs.reduce_async(
            verb, inputs, False, name, _number(opts.reduceOp, verb), 1.0, 1.0,
            process_set=self._set, blocking=not opts.asyncOp,
        )  # fmt: skip
        return self._work(verb, name, handle, outputs, opts, finish)

    # The names in torch 2.13; those above are its earlier names.
    reduce_scatter_single = _reduce_scatter_base
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
