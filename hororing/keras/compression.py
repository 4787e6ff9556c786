"""Compressors that send gradients as 16-bit floats, for the tensors of any of Keras' backends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from keras import backend, ops

from hororing.compression import Compressor, NoneCompressor

_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _cast(tensor: Any, dtype: str) -> Any:
    if isinstance(tensor, np.ndarray | np.generic):
        return tensor.astype(_BFLOAT16 if dtype == "bfloat16" else dtype)
    return ops.cast(tensor, dtype)


def _compress(tensor: Any, dtype: str) -> tuple[Any, str | None]:
    # Integers and tensors that already have the type go as they are.
    before = backend.standardize_dtype(tensor.dtype)
    if not backend.is_float_dtype(before) or before == dtype:
        return tensor, None
    return _cast(tensor, dtype), before


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16. Values beyond 65504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Cast to float16."""
        return _compress(tensor, "float16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Cast back."""
        return tensor if ctx is None else _cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floating-point tensors as bfloat16: the range of float32, 8 bits of precision."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Cast to bfloat16."""
        return _compress(tensor, "bfloat16")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Cast back."""
        return tensor if ctx is None else _cast(tensor, ctx)


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
