"""The verbs on torch tensors. See `hororing._requests.verbs.Verbs` for what each does.

The blocking verbs that return new tensors are differentiable: torch/_tensor/autograd.py says how.
Verbs that write in place and asynchronous ones are not recorded.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar, cast

import torch
from torch.autograd import forward_ad

from hororing._requests import arguments
from hororing._requests import verbs as neutral
from hororing._requests.compression import compressed
from hororing._requests.names import naming
from hororing._requests.process_sets import (
    ProcessSet,
    check_member,
    global_process_set,
    rank_and_size,
)
from hororing.torch._tensor import autograd
from hororing.torch._tensor.autograd import Request
from hororing.torch._tensor.uncompiled import uncompiled
from hororing.torch._tensor.verbs import verbs

F = TypeVar("F", bound=Callable[..., Any])


def _published(function: F) -> F:
    """Return `function` as a global of this module, so that it is pickled by that name."""
    published = uncompiled(function)
    published.__module__, published.__qualname__ = __name__, function.__name__
    return published


allreduce_ = _published(verbs.allreduce_)
allreduce_async = _published(verbs.allreduce_async)
allreduce_async_ = _published(verbs.allreduce_async_)
grouped_allreduce_ = _published(verbs.grouped_allreduce_)
grouped_allreduce_async = _published(verbs.grouped_allreduce_async)
grouped_allreduce_async_ = _published(verbs.grouped_allreduce_async_)
broadcast_ = _published(verbs.broadcast_)
broadcast_async = _published(verbs.broadcast_async)
broadcast_async_ = _published(verbs.broadcast_async_)
allgather_async = _published(verbs.allgather_async)
grouped_allgather_async = _published(verbs.grouped_allgather_async)
alltoall_async = _published(verbs.alltoall_async)
reducescatter_async = _published(verbs.reducescatter_async)
grouped_reducescatter_async = _published(verbs.grouped_reducescatter_async)
barrier = _published(neutral.barrier)
join = _published(neutral.join)
poll = _published(neutral.poll)
synchronize = _published(neutral.synchronize)


def _recorded(tensors: Iterable[object]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                return True
    # In forward mode torch then says that it cannot differentiate the verb.
    unpack: Any = forward_ad.unpack_dual  # torch declares no types
    return forward_ad._current_level >= 0 and any(
        isinstance(tensor, torch.Tensor) and unpack(tensor).tangent is not None
        for tensor in tensors
    )


def _differentiable(verb: F, record: Callable[..., Any]) -> F:
    """Return `verb`, of `verbs`, so that autograd records calls with tensors that need gradients.

    `record(request, given, *tensors)` returns their results; `given` are all arguments by name.
    """
    signature = inspect.signature(verb)
    first = next(iter(signature.parameters))
    several = first == "tensors"

    @functools.wraps(verb)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args and first in kwargs:
            args = (kwargs.pop(first),)
        tensors: Sequence[torch.Tensor] = args[:1]
        if several and args:
            tensors = list(args[0])
            args = (tensors, *args[1:])
        if not _recorded(tensors):
            return verb(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        op = given.get("op", arguments.Average)
        op = arguments.choose_op(op, given.get("average"))
        factors = given.get("prescale_factor", 1.0), given.get("postscale_factor", 1.0)
        name, process_set = given["name"], given["process_set"]
        members = check_member(process_set, verb.__name__)
        with naming(name, verb.__name__, members) as name:  # now: its gradient is named after it
            request = Request(verb.__name__, name, process_set, op, factors, given.get("weight"))
            results = record(request, given, *tensors)
        return results if several else results[0]

    return _published(cast(F, call))


def _reduced(function: Callable[..., Any]) -> Callable[..., Any]:
    def record(request: Request, given: dict[str, Any], *tensors: torch.Tensor) -> Any:
        return compressed(given["compression"], tensors, lambda packed: function(request, *packed))

    return record


def _gathered(request: Request, given: dict[str, Any], *tensors: torch.Tensor) -> Any:
    return autograd.allgather(request, *tensors)


def _broadcast(request: Request, given: dict[str, Any], tensor: torch.Tensor) -> Any:
    return [autograd.broadcast(request, given["root_rank"], tensor)]


def _exchanged(request: Request, given: dict[str, Any], tensor: torch.Tensor) -> Any:
    received, received_splits = autograd.alltoall(request, given["splits"], tensor)
    return [received if given["splits"] is None else (received, received_splits)]


allreduce = _differentiable(verbs.allreduce, _reduced(autograd.allreduce))
grouped_allreduce = _differentiable(verbs.grouped_allreduce, _reduced(autograd.allreduce))
allgather = _differentiable(verbs.allgather, _gathered)
grouped_allgather = _differentiable(verbs.grouped_allgather, _gathered)
broadcast = _differentiable(verbs.broadcast, _broadcast)
alltoall = _differentiable(verbs.alltoall, _exchanged)
reducescatter = _differentiable(verbs.reducescatter, _reduced(autograd.reducescatter))
grouped_reducescatter = _differentiable(
    verbs.grouped_reducescatter, _reduced(autograd.reducescatter)
)


@uncompiled
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> Callable[[], torch.Tensor]:
    """Start the sum or average of sparse COO tensors and return a function that finishes it.

    Indices and values of all ranks are gathered, both in one request. The result is not
    coalesced: an index may occur once per rank.

    Raises
    ------
    ValueError : on every rank, from the returned function, when the dense shapes differ.

    Examples
    --------
    >>> finish = hvd.sparse_allreduce_async(torch.eye(3).to_sparse(), "embedding", hvd.Sum)
    >>> total = finish()
    """
    handle, combine = start_sparse_allreduce(tensor, name, op, process_set)
    return lambda: combine(synchronize(handle))


def start_sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
    weight: float | None = None,
) -> tuple[int, Callable[[Any], torch.Tensor]]:
    """Return the handle, and a function that makes the sum from the result of `synchronize`."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        given = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"sparse_allreduce_async takes sparse COO tensors, not {given}; use allreduce_async"
        )
    op = arguments.check_op(op)
    if op not in (arguments.Average, arguments.Sum):
        raise ValueError(
            f"sparse_allreduce_async: op={arguments.op_name(op)} is not "
            "defined for sparse tensors; use Average or Sum"
        )
    # Gathering joins along the first dimension: one row per stored value, one row of the shape. All
    # tensors of a group are on one device.
    own_shape = torch.tensor([tensor.shape], device=tensor.device)
    rows = [tensor._indices().t(), tensor._values(), own_shape]
    if weight is not None:
        pair = [weight, float(len(rows[1]))]
        rows.append(torch.tensor([pair], dtype=torch.float64, device=tensor.device))
    handle = verbs.gather_async("sparse_allreduce", rows, name, process_set=process_set)
    shape = tensor.shape

    def combine(gathered: tuple[torch.Tensor, ...]) -> torch.Tensor:
        indices, values, shapes, *weights = gathered
        if bool((shapes != shapes[0]).any()):
            raise ValueError(
                f"sparse allreduce '{name}': shapes differ; by rank: {shapes.tolist()}. Every "
                "rank must pass the same dense shape"
            )
        if weights:
            values = _weighted(values, *weights[0].unbind(1))
        elif op == arguments.Average:
            values = values / rank_and_size(process_set)[1]
        return torch.sparse_coo_tensor(
            indices.t(), values, shape, device=values.device, check_invariants=False
        )

    return handle, combine


def _weighted(values: torch.Tensor, weights: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Multiply each rank's values by its share of the weights; `counts` are how many it has.

    Weights themselves could exceed the range of 16-bit floats. 0 times anything is 0.
    """
    shares = (weights / (weights.sum().item() or 1.0)).repeat_interleave(counts.long())
    shares = shares.view(-1, *[1] * (values.dim() - 1))
    return (values * shares).masked_fill_(shares == 0, 0).to(values.dtype)


__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
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
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "sparse_allreduce_async",
    "synchronize",
]
