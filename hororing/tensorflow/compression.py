"""Compressors that send gradients as 16-bit floats."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hororing.compression import Compressor, NoneCompressor


def _cast(tensor: Any, dtype: tf.DType) -> tuple[tf.Tensor, tf.DType | None]:
    # Integers and tensors that already have the type go as they are.
    tensor = tf.convert_to_tensor(tensor)
    if not tensor.dtype.is_floating or tensor.dtype == dtype:
        return tensor, None
    return tf.cast(tensor, dtype), tensor.dtype


class FP16Compressor(Compressor):
    """Sends floating-point tensors as float16. Values beyond 65504 become infinite."""

    @staticmethod
    def compress(tensor: Any) -> tuple[tf.Tensor, Any]:
        """Cast to float16."""
        return _cast(tensor, tf.float16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Cast back."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class BF16Compressor(Compressor):
    """Sends floating-point tensors as bfloat16: the range of float32, 8 bits of precision."""

    @staticmethod
    def compress(tensor: Any) -> tuple[tf.Tensor, Any]:
        """Cast to bfloat16."""
        return _cast(tensor, tf.bfloat16)

    @staticmethod
    def decompress(tensor: tf.Tensor, ctx: Any) -> tf.Tensor:
        """Cast back."""
        return tensor if ctx is None else tf.cast(tensor, ctx)


class Compression:
    """The compressors there are."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
