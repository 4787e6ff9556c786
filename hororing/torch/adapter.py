"""`hororing.verbs.Adapter` for `torch.Tensor`: everything that is known about torch's tensors.

Only public Python of torch is used: nothing is compiled against it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from hororing import collectives

# Old releases of torch lack uint16.
DTYPES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): number
    for name, number in collectives.DTYPES.items()
    if hasattr(torch, name)
}


class TorchAdapter:
    """Dense CPU tensors, contiguous or not."""

    def check(self, tensor: object, verb: str) -> torch.Tensor:
        """Accept strided CPU tensors of the supported types."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{verb} of hororing.torch takes torch tensors, not {type(tensor).__name__}; "
                "use torch.as_tensor(...)"
            )
        if tensor.layout is not torch.strided:
            remedy = (
                "use sparse_allreduce_async(tensor, name, op) or tensor.to_dense()"
                if tensor.layout is torch.sparse_coo
                else "use tensor.to_dense()"
            )
            raise ValueError(f"{verb}: {tensor.layout} tensors are not supported; {remedy}")
        if tensor.device.type != "cpu":
            raise ValueError(
                f"{verb}: {tensor.device.type.upper()} tensors need a copy in host memory in this "
                "version; use tensor.cpu() and copy the result back"
            )
        if tensor.dtype not in DTYPES:
            raise ValueError(
                f"{verb}: tensors of type {tensor.dtype} are not supported; use one of "
                f"{', '.join(map(str, DTYPES))}"
            )
        return tensor

    def check_writable(self, tensor: torch.Tensor, verb: str) -> None:
        """Refuse tensors of which several elements share memory."""
        if tensor.numel() > 0 and any(
            stride == 0 and extent > 1
            for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise ValueError(
                f"{verb}: elements of an expanded tensor share memory, so no result can be "
                "written into it; use tensor.clone()"
            )

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return C order, detached from autograd, with no pending negation."""
        if tensor.is_contiguous() and not tensor.is_neg():
            return tensor
        return tensor.detach().resolve_neg().contiguous()

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor in C order."""
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    def describe(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
        """Address, data type, shape."""
        return tensor.data_ptr(), DTYPES[tensor.dtype], tuple(tensor.shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy elements, unseen by autograd."""
        with torch.no_grad():
            target.copy_(source)

    def mark_written(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let autograd notice when a tensor that it saved has been written to."""
        torch.autograd.graph.increment_version(tensors)

    def gathered(self, result: collectives.Gathered, like: torch.Tensor) -> torch.Tensor:
        """Wrap the core's memory."""
        if result.buffer is None:
            return self.empty_rows(like, result.rows)
        flat = torch.frombuffer(result.buffer, dtype=like.dtype)
        return flat.reshape(result.rows, *like.shape[1:])

    def empty_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a plain tensor in C order."""
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype)

    def splits(self, splits: object) -> list[int]:
        """Accept sequences of integers and int32 tensors."""
        if isinstance(splits, torch.Tensor):
            dtype = str(splits.dtype).removeprefix("torch.")
            return collectives.check_splits(splits.tolist(), splits.dim(), dtype)
        return collectives.check_splits(splits)

    def int32s(self, numbers: list[int]) -> torch.Tensor:
        """Return a plain tensor."""
        return torch.tensor(numbers, dtype=torch.int32)
