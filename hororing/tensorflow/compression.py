"""Compressors that send gradients as 16-bit floats."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hororing._requests.compression import CastCompressor, Compressor, NoneCompressor, WithoutState


class _Cast(CastCompressor):
    @staticmethod
    def float_type(tensor: Any) -> tf.DType | None:
        dtype = tf.as_dtype(tensor.dtype)
        return dtype if dtype.is_floating else None

    @staticmethod
    def cast(tensor: Any, dtype: tf.DType) -> tf.Tensor:
        return tf.cast(tensor, dtype)


class FP16Compressor(_Cast):
    """Sends floating-point tensors as float16. Values beyond 65504 become infinite."""

    dtype = tf.float16


class BF16Compressor(_Cast):
    """Sends floating-point tensors as bfloat16: the range of float32, 8 bits of precision."""

    dtype = tf.bfloat16


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
