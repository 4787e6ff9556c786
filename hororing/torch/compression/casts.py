"""Compressors that send gradients as 16-bit floats."""

from __future__ import annotations

import torch

from hororing._requests.compression import CastCompressor


class _Cast(CastCompressor):
    @staticmethod
    def float_type(tensor: torch.Tensor) -> torch.dtype | None:
        return tensor.dtype if tensor.is_floating_point() else None

    @staticmethod
    def cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return tensor.to(dtype)


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16. Values beyond 65504 become infinite."""

    dtype = torch.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: the range of float32, 8 bits of precision."""

    dtype = torch.bfloat16
