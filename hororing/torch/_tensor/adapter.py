"""`hororing._requests.adapter.Adapter` for `torch.Tensor`: all knowledge about torch's tensors.

Nothing is compiled against torch, and each private function of torch has a public fallback.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch.autograd.graph import increment_version

from hororing._requests import arguments, handles

# Old releases of torch lack uint16.
DTYPES: Final[dict[torch.dtype, int]] = {
    getattr(torch, name): number for name, number in handles.DTYPES.items() if hasattr(torch, name)
}

REDUCED: Final = {dtype: n for dtype, n in DTYPES.items() if n in handles.REDUCED.values()}

# Complex numbers are sent as pairs of these.
_PARTS: Final[dict[torch.dtype, torch.dtype]] = {
    torch.complex32: torch.float16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}

_PLAIN_TYPES: Final = (torch.Tensor, torch.nn.Parameter)


def _writes_counter() -> Callable[[Sequence[torch.Tensor]], None]:
    """Return a function that counts a write to each of some tensors, except inference tensors.

    These have no version. Old releases of torch refuse them, and also several tensors in one call.
    """
    with torch.inference_mode():
        tensors = [torch.empty(0)]
    # The public function checks its argument, which takes as long as counting.
    count: Callable[..., None] = getattr(torch._C, "_increment_version", increment_version)
    try:
        count(tensors)
    except Exception:  # of a type that depends on the release
        return _count_one_by_one
    return count


def _count_one_by_one(tensors: Sequence[torch.Tensor]) -> None:
    for tensor in tensors:
        if not tensor.is_inference():
            increment_version(tensor)


class TorchAdapter:
    """Dense tensors of the CPU and of CUDA devices, contiguous or not."""

    # Autograd notices when a tensor that it saved has been written to.
    mark_written = staticmethod(_writes_counter())

    def __init__(self) -> None:
        exchange = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)  # since torch 2.10
        self.plain_tensors = handles.plain_tensors(
            _PLAIN_TYPES, self.plain, exchange, (torch.Tensor.is_neg,)
        )
        # A lazily negated gradient is fine: its sum is negated alike. Autograd writes to it itself.
        self.plain_gradients = handles.plain_tensors(_PLAIN_TYPES, self.plain, exchange)

    def check(self, tensor: object, verb: str) -> torch.Tensor:
        """Accept strided tensors of the supported types, and complex ones."""
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(
                f"{verb} of hororing.torch takes torch tensors, not {type(tensor).__name__}; "
                "use torch.as_tensor(...)"
            )
        if tensor.is_nested:
            raise ValueError(
                f"{verb}: nested tensors are not supported; use the tensors of tensor.unbind(), "
                "or tensor.values()"
            )
        if tensor.layout is not torch.strided:
            remedy = (
                "use sparse_allreduce_async(tensor, name, op) or tensor.to_dense()"
                if tensor.layout is torch.sparse_coo
                else "use tensor.to_dense()"
            )
            raise ValueError(f"{verb}: {tensor.layout} tensors are not supported; {remedy}")
        if tensor.device.type not in ("cpu", "cuda"):
            raise ValueError(
                f"{verb}: {tensor.device.type.upper()} tensors need a copy in the memory of the "
                "host or of a CUDA device; use tensor.cpu() and copy the result back"
            )
        try:
            tensor.data_ptr()
        except RuntimeError as error:
            raise ValueError(
                f"{verb}: {error}; call it outside of vmap, jvp and other transforms of torch.func"
            ) from None
        if tensor.dtype in _PARTS:
            # A single complex number is one row of two parts to the core, which must not be split.
            if tensor.dim() == 0 and verb.endswith(("allgather", "alltoall", "reducescatter")):
                raise ValueError(
                    f"{verb}: a tensor without dimensions has no rows; use tensor.reshape(1)"
                )
        elif tensor.dtype not in DTYPES:
            raise ValueError(
                f"{verb}: tensors of type {tensor.dtype} are not supported; use one of "
                f"{', '.join(map(str, DTYPES))}"
            )
        return tensor

    def check_writable(self, tensor: torch.Tensor, verb: str) -> None:
        """Refuse tensors whose elements share memory."""
        if tensor.numel() > 0 and any(
            stride == 0 and extent > 1
            for stride, extent in zip(tensor.stride(), tensor.shape, strict=True)
        ):
            raise ValueError(
                f"{verb}: elements of an expanded tensor share memory, so no result can be "
                "written into it; use tensor.clone()"
            )

    def dense(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return C order, detached from autograd, with no pending negation or conjugation."""
        if tensor.is_contiguous() and not tensor.is_neg() and not tensor.is_conj():
            return tensor
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def plain(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]] | None:
        """Describe a tensor that none of the checks above would refuse or copy."""
        if (
            type(tensor) in _PLAIN_TYPES
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.is_contiguous()
            and not tensor.is_neg()
        ):
            number = REDUCED.get(tensor.dtype)
            return None if number is None else (tensor.data_ptr(), number, tensor.shape)
        return None

    def plain_like(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return a plain tensor if `tensor` may be one."""
        if (
            type(tensor) in _PLAIN_TYPES
            and tensor.is_cpu
            and tensor.layout is torch.strided
            and not tensor.is_nested
        ):
            return torch.empty_like(tensor)
        return None

    def device(self, tensor: torch.Tensor) -> int:
        """Return the number of its device."""
        return handles.HOST if tensor.is_cpu else tensor.get_device()

    def stream(self, device: int) -> int:
        """Return torch's current stream."""
        return int(torch.cuda.current_stream(device).cuda_stream)

    def record(self, owners: object) -> None:
        """Inform torch's allocator."""
        if isinstance(owners, torch.Tensor):
            if owners.is_cuda:
                owners.record_stream(torch.cuda.current_stream(owners.device))
        elif isinstance(owners, (list, tuple)):
            for owner in owners:
                self.record(owner)

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a plain tensor in C order."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def describe(self, tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
        """Return address, data type and shape."""
        number = DTYPES.get(tensor.dtype)
        if number is None:
            return tensor.data_ptr(), DTYPES[_PARTS[tensor.dtype]], (*tensor.shape, 2)
        return tensor.data_ptr(), number, tuple(tensor.shape)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy elements, unseen by autograd."""
        with torch.inference_mode() if target.is_inference() else torch.no_grad():
            target.copy_(source)

    def gathered(self, result: handles.Gathered, like: torch.Tensor) -> torch.Tensor:
        """Wrap the core's memory."""
        if result.buffer is None:
            return self.empty_rows(like, result.rows)
        flat = torch.frombuffer(result.buffer, dtype=like.dtype)
        return flat.reshape(result.rows, *like.shape[1:])

    def empty_rows(self, tensor: torch.Tensor, rows: int) -> torch.Tensor:
        """Return a plain tensor in C order."""
        return torch.empty((rows, *tensor.shape[1:]), dtype=tensor.dtype, device=tensor.device)

    def splits(self, splits: object) -> list[int]:
        """Accept sequences of integers and int32 tensors."""
        if isinstance(splits, torch.Tensor):
            dtype = str(splits.dtype).removeprefix("torch.")
            return arguments.check_splits(splits.tolist(), splits.dim(), dtype)
        return arguments.check_splits(splits)

    def int32s(self, numbers: list[int]) -> torch.Tensor:
        """Return a plain tensor in host memory."""
        return torch.tensor(numbers, dtype=torch.int32, device="cpu")
