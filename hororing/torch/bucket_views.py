"""Gradients that live in an arena (hororing/arena.py), where they are reduced without a copy.

Each parameter has a view: its place in one of a few buckets. When its hook finds a fresh gradient,
it copies it there, once, and makes the view the gradient: cheaper than to let autograd add to views
that are zeroed before each step. What follows (accumulation, clipping, the optimizer's step) works
in the view; `zero_grad()` takes it away from the parameter until the next gradient comes.

A gradient stays where it is, and is reduced by copying, if it does not look as its parameter did,
if it is part of a graph, or if somebody else holds it or what has been in the view since an earlier
step: who keeps gradients finds that they keep their values. Each rank decides by itself.
"""

from __future__ import annotations

import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch

from hororing import arena, runtime
from hororing.arguments import Adasum
from hororing.compression import Compressor, NoneCompressor

if TYPE_CHECKING:
    from hororing.torch.gradient import Slot

# What has a view by default, None: nothing. Measured: to move 100 MiB of fresh gradients into views
# takes more processor time than to pack them in blocks that stay in the cache (ADR 19). Gradients
# below 16 KiB can only lose: copying them takes less time than making a view the gradient.
LEAST_BYTES: int | None = None
BUCKET_BYTES: Final = 32 << 20
_ALIGNMENT: Final = 64  # of a cache line

_engines_ended = 0


def _count_engines() -> None:
    global _engines_ended
    _engines_ended += 1


runtime.at_shutdown(_count_engines)


def check_bucket_views(wanted: object, op: int, compression: type[Compressor]) -> None:
    """Refuse what cannot be."""
    if wanted is not None and not isinstance(wanted, bool):
        raise TypeError(f"gradient_as_bucket_view={wanted!r} must be True, False or None")
    if wanted and op == Adasum:
        raise ValueError(
            "gradient_as_bucket_view=True cannot be used with op=Adasum, which reduces the changes "
            "of parameters and not gradients; leave it out"
        )
    if wanted and compression is not NoneCompressor:
        raise ValueError(
            f"gradient_as_bucket_view=True cannot be used with compression={compression.__name__}, "
            "whose results are what is reduced; leave out one of them"
        )


class BucketViews:
    """The views of one optimizer."""

    __slots__ = ("_demanded", "_engine", "_made", "_wanted")

    def __init__(self, demanded: bool | None) -> None:
        self._demanded = demanded
        self._wanted: list[tuple[Slot, tuple[int, ...]]] = []
        self._made: list[tuple[Slot, tuple[int, ...]]] = []
        self._engine = _engines_ended  # whose arena they are in

    def want(self, slot: Slot, param: torch.Tensor) -> None:
        """Give `slot` a view at the next `allocate`, if its parameter may have one."""
        if self._demanded is False or (self._demanded is None and not _CAN_TELL):
            return
        least = 1 if self._demanded else LEAST_BYTES
        if (
            least is not None
            and param.is_floating_point()
            and param.is_contiguous()
            and param.nbytes >= least
        ):
            self._wanted.append((slot, tuple(param.shape)))

    def allocate(self) -> None:
        """Make the views that are wanted; all of them again when there is another engine."""
        if self._engine != _engines_ended:
            self._engine = _engines_ended
            self._wanted = self._made + self._wanted
            self._made = []
            for slot, _ in self._wanted:
                slot.view = None
        wanted, self._wanted = self._wanted, []
        # Gradients come in reverse order of registration, mostly; they are neighbours then.
        while wanted:
            bucket: list[tuple[Slot, tuple[int, ...], int]] = []
            size = 0
            while wanted and (not bucket or size + _nbytes(*wanted[-1]) <= BUCKET_BYTES):
                slot, shape = wanted.pop()
                bucket.append((slot, shape, size))
                size += -(-_nbytes(slot, shape) // _ALIGNMENT) * _ALIGNMENT
            memory = arena.allocate(size)
            if memory is None:
                self._complain(arena.why_not())
                return
            for slot, shape, offset in bucket:
                slot.view = _view(memory, slot.dtype, shape, offset)
                self._made.append((slot, shape))

    def _complain(self, reason: str) -> None:
        if self._demanded:
            warnings.warn(
                f"gradient_as_bucket_view=True: there is no memory that the ranks share, so "
                f"gradients are reduced by copying them. {reason}",
                stacklevel=2,
            )


def _nbytes(slot: Slot, shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel() * slot.dtype.itemsize


def _view(
    memory: memoryview, dtype: torch.dtype, shape: tuple[int, ...], offset: int
) -> torch.Tensor:
    count = torch.Size(shape).numel()
    # A storage of its own, of its own bytes: that is all that a pickled one takes along.
    flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=offset)
    # By set_ it is no view of `flat` to autograd.
    view: torch.Tensor = torch.empty(0, dtype=dtype).set_(flat.view(shape))  # type: ignore[call-overload]
    return view


def move_into_view(param: torch.Tensor, slot: Slot) -> None:
    """Make the view of `slot` the gradient of `param`, with the same values, if that is allowed."""
    grad, view = param.grad, slot.view
    assert view is not None
    if (
        grad is None
        or grad.layout is not torch.strided
        or grad.dtype is not view.dtype
        or grad.shape != view.shape
        or grad.requires_grad
    ):
        return
    if _CAN_TELL and not (_owners(grad) == _OWNERS_OF_FRESH and _owners(view) == _OWNERS_OF_UNUSED):
        return
    view.copy_(grad)
    param.grad = view


# ---------------------------------------------------------------------------------------------
# Who else holds a tensor? torch tells nobody, but it counts.


def _owners(tensor: torch.Tensor) -> tuple[int, ...]:
    """Count references to the Python object, to the tensor behind it, and to its memory."""
    counted: Any = tensor
    storage = torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)
    return (sys.getrefcount(tensor), counted._use_count(), storage)


def _usual_owners() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What `move_into_view` finds where nobody else holds a fresh gradient or its view."""

    class Holder:
        __slots__ = ("view",)
        view: torch.Tensor

    holder, param = Holder(), torch.nn.Parameter(torch.zeros(1))
    holder.view = _view(memoryview(bytearray(64)), torch.float32, (1,), 0)
    param.grad = torch.zeros(1)
    grad, view = param.grad, holder.view
    return _owners(grad), _owners(view)


_CAN_TELL: Final = hasattr(torch._C, "_storage_Use_Count") and hasattr(torch.Tensor, "_use_count")
_OWNERS_OF_FRESH, _OWNERS_OF_UNUSED = _usual_owners() if _CAN_TELL else ((), ())
