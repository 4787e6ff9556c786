"""The gradients of the verbs, which are Horovod's.

* allreduce: reduced with the same operation and factors, which for Min, Max and Product is not the
  mathematical gradient; for a weighted average the sum, times this rank's share of the weights;
* allgather: the average of the whole gradient, of which each rank takes its own rows;
* broadcast: the average of the gradient on the root, zero elsewhere;
* alltoall: every row goes back to its sender, zero for rows that were not sent;
* reducescatter: all rows of the gradient, times the number of ranks for Sum, times the factors.

The requests of a backward pass are named after those of the forward pass, so ranks may run
their graphs in any order, and are verbs with gradients themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from hororing._engine.state import rank
from hororing._requests import arguments, handles
from hororing._requests.arguments import Average
from hororing._requests.process_sets import ProcessSet, rank_and_size
from hororing.torch._tensor.verbs import verbs


class Request(NamedTuple):
    """The arguments of a verb, besides the tensors."""

    verb: str
    name: str
    process_set: ProcessSet
    op: int = Average
    factors: tuple[float, float] = (1.0, 1.0)  # prescale, postscale
    weight: float | None = None

    def backward(self) -> Request:
        """Return the same request for the gradients."""
        return self._replace(name=f"{self.name}.grad")


def _record(ctx: Any, request: Request, results: Sequence[torch.Tensor]) -> None:
    """Remember the request, and which results have gradients: in a mixed group, not integers."""
    ctx.request = request
    ctx.recorded = [i for i, r in enumerate(results) if r.is_floating_point() or r.is_complex()]
    ctx.mark_non_differentiable(*(r for i, r in enumerate(results) if i not in ctx.recorded))


def _recorded(ctx: Any, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [gradients[index] for index in ctx.recorded]


def _in_place_of_all(ctx: Any, count: int, recorded: Any) -> list[torch.Tensor | None]:
    everything: list[torch.Tensor | None] = [None] * count
    for index, gradient in zip(ctx.recorded, recorded, strict=True):
        everything[index] = gradient
    return everything


class _Allreduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        verb, name, process_set, op, factors, weight = request
        handle = verbs.reduce_async(
            verb, tensors, False, name, op, *factors, tuple,
            process_set=process_set, blocking=True, weight=weight,
        )  # fmt: skip
        results: tuple[torch.Tensor, ...] = handles.wait(handle)
        _record(ctx, request, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        request = ctx.request.backward()
        if request.weight is None:
            reduced = allreduce(request, *_recorded(ctx, gradients))
        else:
            total = verbs.allreduce(
                torch.tensor([float(request.weight)], dtype=torch.float64, device="cpu"),
                name=f"{request.name}.weight", op=arguments.Sum, process_set=request.process_set,
            ).item()  # fmt: skip
            share = request.weight / total if total > 0 else 0.0
            request = request._replace(op=arguments.Sum, weight=None)
            reduced = [each * share for each in allreduce(request, *_recorded(ctx, gradients))]
        return (None, *_in_place_of_all(ctx, len(gradients), reduced))


class _Allgather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        verb, name, process_set, *_ = request
        results: tuple[torch.Tensor, ...] = handles.wait(
            verbs.gather_async(verb, tensors, name, process_set=process_set, blocking=True)
        )
        _record(ctx, request, results)
        ctx.rows = [tensor.shape[0] for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        name, process_set = ctx.request.name, ctx.request.process_set
        whole = allreduce(
            Request("grouped_allreduce", f"{name}.grad", process_set), *_recorded(ctx, gradients)
        )
        # rows[r][i]: rows of tensor i on rank r
        rows = verbs.allgather(torch.tensor([ctx.rows], device="cpu"), f"{name}.rows", process_set)
        rank, _ = rank_and_size(process_set)
        before = rows[:rank].sum(dim=0).tolist()
        mine = [
            gradient.narrow(0, before[index], ctx.rows[index])
            for index, gradient in zip(ctx.recorded, whole, strict=True)
        ]
        return (None, *_in_place_of_all(ctx, len(gradients), mine))


class _Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, root_rank: int, tensor: torch.Tensor) -> torch.Tensor:
        ctx.request, ctx.root_rank = request, root_rank
        return verbs.broadcast(tensor, root_rank, request.name, request.process_set)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        name, process_set = ctx.request.name, ctx.request.process_set
        (averaged,) = allreduce(Request("allreduce", f"{name}.grad", process_set), gradient)
        if rank() != ctx.root_rank:  # zeros that depend on `averaged`: all ranks differentiate it
            everywhere = torch.ones((), dtype=torch.bool, device=averaged.device)
            averaged = averaged.masked_fill(everywhere, 0)
        return None, None, averaged


class _Alltoall(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, request: Request, splits: Any, tensor: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        received, received_splits = handles.wait(
            verbs.exchange_async(tensor, splits, request.name, request.process_set, blocking=True)
        )
        ctx.request, ctx.rows, ctx.received = request, tensor.shape[0], received_splits.tolist()
        ctx.mark_non_differentiable(received_splits)
        return received, received_splits

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor, _: Any) -> Any:
        returned, _ = alltoall(ctx.request.backward(), ctx.received, gradient)
        not_sent = ctx.rows - returned.shape[0]
        if not_sent:
            zeros = returned.new_zeros(not_sent, *returned.shape[1:])
            returned = torch.cat([returned, zeros])
        return None, None, returned


class _Reducescatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, request: Request, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        verb, name, process_set, op, factors, _ = request
        handle = verbs.scatter_async(
            verb, tensors, name, op, process_set, *factors, tuple, blocking=True
        )
        results: tuple[torch.Tensor, ...] = handles.wait(handle)
        _record(ctx, request, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        _, name, process_set, op, (prescale, postscale), _ = ctx.request
        factor = prescale * postscale
        if op == arguments.Sum:
            factor *= rank_and_size(process_set)[1]
        mine = [gradient * factor for gradient in _recorded(ctx, gradients)]
        whole = allgather(Request("grouped_allgather", f"{name}.grad", process_set), *mine)
        return (None, *_in_place_of_all(ctx, len(gradients), whole))


# torch does not declare the type of `apply`.
allreduce: Any = _Allreduce.apply
allgather: Any = _Allgather.apply
broadcast: Any = _Broadcast.apply
alltoall: Any = _Alltoall.apply
reducescatter: Any = _Reducescatter.apply
