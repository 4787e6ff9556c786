"""Compressors: casts to 16 bits, and methods with error feedback.

`Compression.none`, `.fp16` and `.bf16` have no state and work wherever `compression=` is taken. The
others are for `DistributedOptimizer`; see docs/compression.md, and ADR 58 for their design.
"""

from __future__ import annotations

from hororing._requests.compression import Compressor, NoneCompressor
from hororing.torch.compression.auto import Auto
from hororing.torch.compression.casts import BF16Compressor, FP16Compressor
from hororing.torch.compression.int8 import Int8
from hororing.torch.compression.powersgd import PowerSGD
from hororing.torch.compression.topk import TopK


class Compression:
    """The available compressors.

    `none`, `fp16` and `bf16` are classes. The others are objects with error feedback; call one to
    get it with other options: `int8(block=256)`, `powersgd(rank=4)`, `topk(ratio=0.01)`, and
    `auto`, which chooses. All of these take ``scope="hosts"``.

    >>> optimizer = hvd.DistributedOptimizer(
    ...     optimizer, model.named_parameters(), compression=hvd.Compression.fp16
    ... )
    >>> half = hvd.allreduce(scores, name="scores", compression=hvd.Compression.fp16)
    """

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8()
    powersgd = PowerSGD()
    topk = TopK()
    auto = Auto()


__all__ = [
    "Auto",
    "BF16Compressor",
    "Compression",
    "Compressor",
    "FP16Compressor",
    "Int8",
    "NoneCompressor",
    "PowerSGD",
    "TopK",
]
