"""The common part of LARS and LAMB: norms of many tensors at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import torch

# Beyond so many elements float32 is too coarse to add up squares in.
_MANY: Final = 10_000_000


def tensors_by_type(params: list[torch.Tensor], what: str) -> Iterator[list[torch.Tensor]]:
    """Yield the parameters with a gradient, grouped by device and type."""
    lists: dict[Any, list[torch.Tensor]] = {}
    for param in params:
        if param.grad is None:
            continue
        if param.is_complex():
            raise TypeError(f"{what} cannot update complex parameters; use torch.view_as_real")
        if param.grad.is_sparse:
            raise ValueError(
                f"{what} needs dense gradients; use sparse_as_dense=True of DistributedOptimizer, "
                "or an embedding with sparse=False"
            )
        lists.setdefault((param.device, param.dtype), []).append(param)
    yield from lists.values()


def norms(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the 2-norms, one number each, in the tensors' type.

    Those of large float32 tensors are added up in float64.
    """
    kinds = [torch.float64 if tensor.numel() > _MANY else tensor.dtype for tensor in tensors]
    if kinds == [tensor.dtype for tensor in tensors]:
        found = list(torch._foreach_norm(tensors, 2))  # torch 2.3 has no dtype= here
    else:
        found = [
            torch.linalg.vector_norm(tensor, dtype=kind)
            for tensor, kind in zip(tensors, kinds, strict=True)
        ]
    return torch.stack([norm.to(tensors[0].dtype) for norm in found])
