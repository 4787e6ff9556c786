"""Compressors that send arrays as 16-bit floats."""

from __future__ import annotations

from typing import Any

from jax import numpy as jnp

from hororing._requests.compression import CastCompressor, Compressor, NoneCompressor, WithoutState


class _Cast(CastCompressor):
    @staticmethod
    def float_type(tensor: Any) -> Any:
        return tensor.dtype if jnp.issubdtype(tensor.dtype, jnp.floating) else None

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        return tensor.astype(dtype)


class FP16Compressor(_Cast):
    """Sends floating-point arrays as float16. Values beyond 65504 become infinite."""

    dtype = jnp.dtype(jnp.float16)


class BF16Compressor(_Cast):
    """Sends floating-point arrays as bfloat16: the range of float32, 8 bits of precision."""

    dtype = jnp.dtype(jnp.bfloat16)


class Compression(metaclass=WithoutState):
    """The available compressors.

    >>> mean = hvd.allreduce(jnp.ones(3), compression=hvd.Compression.bf16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


__all__ = ["BF16Compressor", "Compression", "Compressor", "FP16Compressor", "NoneCompressor"]
