"""Gradient compression: the base classes. The adapters add compressors that need a framework."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, ClassVar


class Compressor:
    """Base of compressors; sub-class it to make your own.

    Compressed tensors are reduced element by element, so compression must commute with the
    reduction: a cast does, sparsification does not. The data type and shape of the compressed
    tensor must be the same on every rank.
    """

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor to send and whatever `decompress` needs to undo it."""
        raise NotImplementedError("a Compressor needs compress(tensor) -> (tensor, context)")

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the reduced tensor in its original form."""
        raise NotImplementedError("a Compressor needs decompress(tensor, context) -> tensor")


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return `tensor` itself."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return `tensor` itself."""
        return tensor


class CastCompressor(Compressor):
    """Sends floating-point tensors as another type, and integers as they are.

    Adapters set `dtype`, in their framework's terms, and how to cast.
    """

    dtype: ClassVar[Any]

    @staticmethod
    def float_type(tensor: Any) -> Any:
        """Return the type of a tensor, or None if it has no floating-point type."""
        raise NotImplementedError("a CastCompressor needs float_type(tensor) -> type or None")

    @staticmethod
    def cast(tensor: Any, dtype: Any) -> Any:
        """Return the tensor as another type."""
        raise NotImplementedError("a CastCompressor needs cast(tensor, dtype) -> tensor")

    @classmethod
    def compress(cls, tensor: Any) -> tuple[Any, Any]:
        """Cast, if that changes anything."""
        before = cls.float_type(tensor)
        if before is None or before == cls.dtype:
            return tensor, None
        return cls.cast(tensor, cls.dtype), before

    @classmethod
    def decompress(cls, tensor: Any, ctx: Any) -> Any:
        """Cast back."""
        return tensor if ctx is None else cls.cast(tensor, ctx)


class WithoutState(type):
    """The class of `Compression` in adapters without compressors with error feedback.

    Access to their names raises an error that names the alternatives; hasattr works as usual.
    """

    def __getattr__(cls, name: str) -> Any:
        if name in ("int8", "powersgd", "topk", "auto"):
            raise AttributeError(
                f"Compression.{name} keeps errors from step to step, which DistributedOptimizer of "
                "hororing.torch alone does; here use Compression.none, .fp16 or .bf16"
            )
        raise AttributeError(f"Compression has no attribute {name!r}")


@dataclasses.dataclass(frozen=True)
class StatefulCompression:
    """Options of a compressor with error feedback: unsent parts are added in the next step.

    Call it for other options: ``Compression.int8(scope="hosts")``.

    Parameters
    ----------
    scope : str, optional
        "all": between all ranks. "hosts": gradients of ranks on one host are added up without
        compression, and their sums are compressed between hosts.
    """

    scope: str = dataclasses.field(default="all", kw_only=True)

    def __post_init__(self) -> None:
        """Check the options."""
        if self.scope not in ("all", "hosts"):
            raise ValueError(f'Compression: scope={self.scope!r} must be "all" or "hosts"')

    def __call__(self, **options: Any) -> Any:
        """Return the compressor with other options."""
        return dataclasses.replace(self, **options)


def check_compression(compression: object) -> None:
    """Raise TypeError unless `compression` can be used as a compressor."""
    if isinstance(compression, StatefulCompression):
        raise TypeError(
            f"compression={compression!r} keeps errors from step to step: it is for "
            "DistributedOptimizer of hororing.torch alone; here use Compression.none, .fp16 or "
            ".bf16"
        )
    if not callable(getattr(compression, "compress", None)) or not callable(
        getattr(compression, "decompress", None)
    ):
        raise TypeError(
            f"compression={compression!r} is not a compressor; use one of Compression, such as "
            "hvd.Compression.fp16, or a class derived from Compressor"
        )


def compressed(
    compression: Any, tensors: Iterable[Any], reduce: Callable[[list[Any]], Iterable[Any]]
) -> list[Any]:
    """Compress the tensors, call `reduce` with them, and return the decompressed results."""
    check_compression(compression)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = reduce([tensor for tensor, _ in packed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]
