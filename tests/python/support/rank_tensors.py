"""Tensors that differ between the ranks of torch.distributed, and checks with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist


def mine(*shape: int, dtype: torch.dtype = torch.float32, of: int | None = None) -> torch.Tensor:
    """Return a tensor that differs between ranks."""
    rank = dist.get_rank() if of is None else of
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) % 5 + 1 + rank).to(dtype)


def all_of(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([mine(*shape, dtype=dtype, of=r) for r in range(dist.get_world_size())])


def raises(kind: type[Exception], words: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=words):
        call()
