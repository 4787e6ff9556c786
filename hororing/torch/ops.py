"""The verbs on torch tensors. See `hororing.verbs.Verbs` for what each does.

The blocking verbs that return new tensors are differentiable: `hororing.torch.autograd` says how.
Verbs that write in place and asynchronous ones are not recorded.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch

from hororing import arguments
from hororing import verbs as neutral
from hororing.compression import Compressor, NoneCompressor, check_compression
from hororing.names import default_name, take_back
from hororing.process_sets import ProcessSet, check_member, global_process_set, place_and_size
from hororing.torch import autograd
from hororing.torch.autograd import Request
from hororing.torch.uncompiled import uncompiled
from hororing.torch.verbs import verbs
from hororing.verbs import Verbs

F = TypeVar("F", bound=Callable[..., Any])


def _published(function: F) -> F:
    """Return `function` as a global of this module, as which it is pickled."""
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
    return False


@contextlib.contextmanager
def _request(
    verb: str,
    name: str | None,
    process_set: ProcessSet,
    op: int = arguments.Average,
    prescale: float = 1.0,
    postscale: float = 1.0,
) -> Iterator[Request]:
    """Name the request now: its gradient is named after it."""
    members = check_member(process_set, verb)
    if name is None:
        name = default_name(verb, members)
    try:
        yield Request(verb, name, process_set, op, (prescale, postscale))
    except BaseException:
        take_back(name)
        raise


def _compressed(
    compression: type[Compressor], tensors: Iterable[torch.Tensor], call: Callable[..., Any]
) -> list[torch.Tensor]:
    check_compression(compression)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = call(*(tensor for tensor, _ in packed))
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]


@uncompiled
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Differentiable `Verbs.allreduce`."""
    factors = prescale_factor, postscale_factor
    if not _recorded([tensor]):
        return verbs.allreduce(tensor, average, name, compression, op, *factors, process_set)
    chosen = arguments.choose_op(op, average)
    with _request("allreduce", name, process_set, chosen, *factors) as request:
        return _compressed(compression, [tensor], partial(autograd.allreduce, request))[0]


@uncompiled
def grouped_allreduce(
    tensors: Iterable[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Differentiable `Verbs.grouped_allreduce`."""
    chosen = arguments.choose_op(op, average)
    factors = prescale_factor, postscale_factor
    tensors = list(tensors)
    if not _recorded(tensors):
        return verbs.grouped_allreduce(
            tensors, None, name, compression, chosen, *factors, process_set
        )
    with _request("grouped_allreduce", name, process_set, chosen, *factors) as request:
        return _compressed(compression, tensors, partial(autograd.allreduce, request))


@uncompiled
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Differentiable `Verbs.allgather`."""
    if not _recorded([tensor]):
        return verbs.allgather(tensor, name, process_set)
    with _request("allgather", name, process_set) as request:
        (result,) = autograd.allgather(request, tensor)
        return result  # type: ignore[no-any-return]


@uncompiled
def grouped_allgather(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> tuple[torch.Tensor, ...]:
    """Differentiable `Verbs.grouped_allgather`."""
    tensors = list(tensors)
    if not _recorded(tensors):
        return verbs.grouped_allgather(tensors, name, process_set)
    with _request("grouped_allgather", name, process_set) as request:
        return autograd.allgather(request, *tensors)  # type: ignore[no-any-return]


@uncompiled
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Differentiable `Verbs.broadcast`."""
    if not _recorded([tensor]):
        return verbs.broadcast(tensor, root_rank, name, process_set)
    with _request("broadcast", name, process_set) as request:
        return autograd.broadcast(request, root_rank, tensor)  # type: ignore[no-any-return]


@uncompiled
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Differentiable `Verbs.alltoall`."""
    if not _recorded([tensor]):
        return verbs.alltoall(tensor, splits, name, process_set)
    with _request("alltoall", name, process_set) as request:
        received, received_splits = autograd.alltoall(request, splits, tensor)
        return received if splits is None else (received, received_splits)


@uncompiled
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int = arguments.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Differentiable `Verbs.reducescatter`."""
    factors = prescale_factor, postscale_factor
    if not _recorded([tensor]):
        return verbs.reducescatter(tensor, name, compression, op, process_set, *factors)
    with _request("reducescatter", name, process_set, op, *factors) as request:
        return _compressed(compression, [tensor], partial(autograd.reducescatter, request))[0]


@uncompiled
def grouped_reducescatter(
    tensors: Iterable[torch.Tensor],
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int = arguments.Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Differentiable `Verbs.grouped_reducescatter`."""
    factors = prescale_factor, postscale_factor
    tensors = list(tensors)
    if not _recorded(tensors):
        return verbs.grouped_reducescatter(tensors, name, compression, op, process_set, *factors)
    with _request("grouped_reducescatter", name, process_set, op, *factors) as request:
        return _compressed(compression, tensors, partial(autograd.reducescatter, request))


# Their parameters and results are those of the verbs.
for _function in (
    allreduce, grouped_allreduce, allgather, grouped_allgather, broadcast, alltoall,
    reducescatter, grouped_reducescatter,
):  # fmt: skip
    _function.__doc__ = getattr(Verbs, _function.__name__).__doc__


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
    """
    _, finish = start_sparse_allreduce(tensor, name, op, process_set)
    return finish


def start_sparse_allreduce(
    tensor: torch.Tensor,
    name: str | None,
    op: int,
    process_set: ProcessSet = global_process_set,
) -> tuple[int, Callable[[], torch.Tensor]]:
    """Return the handle as well, for those who may abandon it."""
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.sparse_coo:
        given = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(
            f"sparse_allreduce_async takes sparse COO tensors, not {given}; use allreduce_async"
        )
    if op not in (arguments.Average, arguments.Sum):
        raise ValueError(
            f"sparse_allreduce_async: op={arguments.op_name(arguments.check_op(op))} is not "
            "defined for sparse tensors; use Average or Sum"
        )
    # Gathering joins along the first dimension: one row per stored value, one row of the shape.
    # On its device, as all of a group.
    own_shape = torch.tensor([tensor.shape], device=tensor.device)
    rows = [tensor._indices().t(), tensor._values(), own_shape]
    handle = verbs.gather_async("sparse_allreduce", rows, name, process_set=process_set)
    shape = tensor.shape

    def finish() -> torch.Tensor:
        indices, values, shapes = synchronize(handle)
        if bool((shapes != shapes[0]).any()):
            raise ValueError(
                f"sparse allreduce '{name}': shapes differ; by rank: {shapes.tolist()}. Every "
                "rank must pass the same dense shape"
            )
        if op == arguments.Average:
            values = values / place_and_size(process_set)[1]
        return torch.sparse_coo_tensor(indices.t(), values, shape, check_invariants=False)

    return handle, finish


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
