"""The verbs on torch tensors. See `hororing.verbs.Verbs` for what each does.

The blocking verbs that return new tensors are differentiable:

* allreduce: the gradient is reduced with the same operation and factors (which for Min, Max and
  Product is not the mathematical gradient, but what Horovod does);
* allgather: the average of the whole gradient, of which each rank takes its own rows;
* broadcast: the average of the gradient on the root, zero elsewhere.

The requests of a backward pass are named after those of the forward pass, so ranks may run
their graphs in any order. Verbs that write in place and asynchronous ones are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from hororing import collectives
from hororing.collectives import Average, default_name
from hororing.compression import Compressor, NoneCompressor, check_compression
from hororing.runtime import rank, size
from hororing.torch.adapter import TorchAdapter
from hororing.verbs import Verbs, barrier, poll, synchronize

verbs: Verbs[torch.Tensor] = Verbs(TorchAdapter())

allreduce_ = verbs.allreduce_
allreduce_async = verbs.allreduce_async
allreduce_async_ = verbs.allreduce_async_
grouped_allreduce_ = verbs.grouped_allreduce_
grouped_allreduce_async = verbs.grouped_allreduce_async
grouped_allreduce_async_ = verbs.grouped_allreduce_async_
broadcast_ = verbs.broadcast_
broadcast_async = verbs.broadcast_async
broadcast_async_ = verbs.broadcast_async_
allgather_async = verbs.allgather_async
grouped_allgather_async = verbs.grouped_allgather_async


def _recorded(tensors: Iterable[object]) -> bool:
    return torch.is_grad_enabled() and any(
        isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors
    )


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        verb: str,
        name: str,
        op: int,
        factors: tuple[float, float],
        *tensors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.arguments = verb, f"{name}.grad", op, factors
        handle = verbs.reduce_async(
            verb, tensors, False, name, op, *factors, tuple, wait_follows=True
        )
        results: tuple[torch.Tensor, ...] = collectives.wait(handle)
        # Integers of a mixed group have no gradient.
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        ctx.recorded = [index for index, r in enumerate(results) if r.is_floating_point()]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        mine: list[torch.Tensor | None] = [None] * len(gradients)
        reduced = _reduced(*ctx.arguments, *(gradients[i] for i in ctx.recorded))
        for index, gradient in zip(ctx.recorded, reduced, strict=True):
            mine[index] = gradient
        return (None, None, None, None, *mine)


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, verb: str, name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results: tuple[torch.Tensor, ...] = collectives.wait(
            verbs.gather_async(verb, tensors, name, wait_follows=True)
        )
        ctx.name, ctx.rows = name, [tensor.shape[0] for tensor in tensors]
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        ctx.recorded = [index for index, r in enumerate(results) if r.is_floating_point()]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        averaged = _reduced(
            "grouped_allreduce", f"{ctx.name}.grad", Average, (1.0, 1.0),
            *(gradients[i] for i in ctx.recorded),
        )  # fmt: skip
        # rows[r][i]: rows of tensor i on rank r
        rows = verbs.allgather(torch.tensor([ctx.rows]), f"{ctx.name}.rows")
        before = rows[: rank()].sum(dim=0).tolist()
        mine: list[torch.Tensor | None] = [None] * len(gradients)
        for index, gradient in zip(ctx.recorded, averaged, strict=True):
            mine[index] = gradient.narrow(0, before[index], ctx.rows[index])
        return (None, None, *mine)


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int, name: str) -> torch.Tensor:
        ctx.root_rank, ctx.name = root_rank, name
        return verbs.broadcast(tensor, root_rank, name)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (averaged,) = _reduced("allreduce", f"{ctx.name}.grad", Average, (1.0, 1.0), gradient)
        return averaged if rank() == ctx.root_rank else torch.zeros_like(averaged), None, None


# torch does not declare the type of `apply`.
_reduced: Any = _Allreduce.apply
_gathered: Any = _Allgather.apply
_sent: Any = _Broadcast.apply


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Differentiable `Verbs.allreduce`."""
    chosen = collectives.choose_op(op, average)
    if not _recorded([tensor]):
        return verbs.allreduce(
            tensor, None, name, compression, chosen, prescale_factor, postscale_factor
        )
    check_compression(compression)
    compressed, context = compression.compress(tensor)
    (result,) = _reduced(
        "allreduce", name or default_name("allreduce"), chosen,
        (prescale_factor, postscale_factor), compressed,
    )  # fmt: skip
    return compression.decompress(result, context)  # type: ignore[no-any-return]


def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Differentiable `Verbs.grouped_allreduce`."""
    chosen = collectives.choose_op(op, average)
    tensors = list(tensors)
    if not _recorded(tensors):
        return verbs.grouped_allreduce(
            tensors, None, name, compression, chosen, prescale_factor, postscale_factor
        )
    check_compression(compression)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = _reduced(
        "grouped_allreduce", name or default_name("grouped_allreduce"), chosen,
        (prescale_factor, postscale_factor), *(compressed for compressed, _ in packed),
    )  # fmt: skip
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]


def allgather(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
    """Differentiable `Verbs.allgather`."""
    if not _recorded([tensor]):
        return verbs.allgather(tensor, name)
    (result,) = _gathered("allgather", name or default_name("allgather"), tensor)
    return result  # type: ignore[no-any-return]


def grouped_allgather(
    tensors: Iterable[torch.Tensor], name: str | None = None
) -> tuple[torch.Tensor, ...]:
    """Differentiable `Verbs.grouped_allgather`."""
    tensors = list(tensors)
    if not _recorded(tensors):
        return verbs.grouped_allgather(tensors, name)
    name = name or default_name("grouped_allgather")
    return _gathered("grouped_allgather", name, *tensors)  # type: ignore[no-any-return]


def broadcast(tensor: torch.Tensor, root_rank: int, name: str | None = None) -> torch.Tensor:
    """Differentiable `Verbs.broadcast`."""
    if not _recorded([tensor]):
        return verbs.broadcast(tensor, root_rank, name)
    return _sent(tensor, root_rank, name or default_name("broadcast"))  # type: ignore[no-any-return]


# Their parameters and results are those of the verbs.
for _function in (allreduce, grouped_allreduce, allgather, grouped_allgather, broadcast):
    _function.__doc__ = getattr(Verbs, _function.__name__).__doc__


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str | None, op: int
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse COO tensors and return a function that finishes it.

    Indices and values of all ranks are gathered, both in one request. The result is not
    coalesced: an index may occur once per rank.

    Raises
    ------
    ValueError : on every rank, from the returned function, when the dense shapes differ.
    """
    _, finish = start_sparse_allreduce(tensor, name, op)
    return finish


def start_sparse_allreduce(
    tensor: torch.Tensor, name: str | None, op: int
) -> tuple[int, Callable[[], torch.Tensor]]:
    """Return the handle as well, for those who may abandon it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        given = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"sparse_allreduce_async takes sparse COO tensors, not {given}; use allreduce_async"
        )
    if op not in (collectives.Average, collectives.Sum):
        raise ValueError(
            f"sparse_allreduce_async: op={collectives.op_name(collectives.check_op(op))} is not "
            "defined for sparse tensors; use Average or Sum"
        )
    # Gathering joins along the first dimension: one row per stored value, one row of the shape.
    rows = [tensor._indices().t(), tensor._values(), torch.tensor([tensor.shape])]
    handle = verbs.gather_async("sparse_allreduce", rows, name)
    shape = tensor.shape

    def finish() -> torch.Tensor:
        indices, values, shapes = synchronize(handle)
        if bool((shapes != shapes[0]).any()):
            raise ValueError(
                f"sparse allreduce '{name}': shapes differ; by rank: {shapes.tolist()}. Every "
                "rank must pass the same dense shape"
            )
        if op == collectives.Average:
            values = values / size()
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)

    return handle, finish


__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "poll",
    "sparse_allreduce_async",
    "synchronize",
]
