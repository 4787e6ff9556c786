"""Compressors that send gradients as 16-bit floats, for the tensors of any of Keras' backends."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from keras import backend, ops

from hororing._requests.compression import CastCompressor, Compressor, NoneCompressor, WithoutState


class _Cast(CastCompressor):
    @staticmethod
    def float_type(tensor: Any) -> str | None:
        dtype: str = backend.standardize_dtype(tensor.dtype)
        return dtype if backend.is_float_dtype(dtype) else None

    @staticmethod
    def cast(tensor: Any, dtype: str) -> Any:
        if isinstance(tensor, np.ndarray | np.generic):
            return tensor.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
        return ops.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16. Values beyond 65504 become infinite."""

    dtype = "float16"


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: the range of float32, 8 bits of precision."""

    dtype = "bfloat16"


class Compression(metaclass=WithoutState):
    """The available compressors.

    >>> optimizer = hvd.DistributedOptimizer(
    ...     keras.optimizers.SGD(0.1), compression=hvd.Compression.fp16
    ... )
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
