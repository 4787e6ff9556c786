"""Gradients as 8-bit integers, with a scale for each block.

    gradient + error --quantise--> parts, to the rank that owns each --> sum in float32
    sum --quantise--> to all ranks

Each block of b elements is sent as b integers round(x / s), s = max|x| / 127, and s itself in 4
bytes: (b + 4) bytes instead of 4 b, both ways. A rank adds the error of the sum that it owns to
that of its own integers. So the sum over ranks of results and errors equals that of gradients and
earlier errors.

Source: F. Seide et al. 2014 (see method.py); scales of blocks: T. Dettmers, "8-bit approximations
for parallelism in deep learning", ICLR 2016, arXiv:1511.04561.
"""

from __future__ import annotations

import dataclasses
import itertools

import torch

from hororing.torch.compression.method import Link, Method, Piece, Steps

_SCALE_BYTES = 4


@dataclasses.dataclass(frozen=True)
class Int8(Method):
    """Blockwise 8-bit integers.

    Parameters
    ----------
    block : int, optional
        Elements that share a scale, a multiple of 4 of at most 65,536: gradients are padded to
        whole blocks.
    scope : {"all", "hosts"}
        See `StatefulCompression`.
    """

    block: int = 256

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not isinstance(self.block, int) or not 4 <= self.block <= 65536 or self.block % 4:
            raise ValueError(
                f"Compression.int8: block={self.block!r} must be a multiple of 4 of at most 65536"
            )

    @property
    def multiple(self) -> int:  # type: ignore[override]
        """A block."""
        return self.block

    def traffic(self, param: torch.Tensor, ranks: int) -> float:
        """One byte for each element, and the scales."""
        return (1 + _SCALE_BYTES / self.block) / param.element_size()

    def reduce(self, piece: Piece, link: Link) -> Steps:
        """Exchange, add up, gather."""
        values = piece.flat.view(-1, self.block)
        bounds = [len(values) * rank // link.size for rank in range(link.size + 1)]
        splits = [end - begin for begin, end in itertools.pairwise(bounds)]
        owned = values[bounds[link.rank] : bounds[link.rank + 1]]

        received, _ = yield link.exchange(self._quantise(values), splits, "exchange")
        received = received.view(link.size, len(owned), self.block + _SCALE_BYTES)
        total = self._values(received, values.dtype).sum(0)
        rows = self._quantise(total)
        owned.add_(total)  # its rounding errors, for the next step

        (gathered,) = yield link.gather([rows], "gather")
        total = self._values(gathered, values.dtype, piece.divisor)
        finite = torch.isfinite(self._scales(gathered)).all()
        return piece.parts(total.view(-1)), [{} for _ in piece.given], finite

    def _quantise(self, values: torch.Tensor) -> torch.Tensor:
        """Return the rows for `values`, and replace `values` by the rounding errors.

        A block with an infinity or a NaN becomes infinities and NaNs.
        """
        if values.numel() == 0:
            return values.new_empty(0, self.block + _SCALE_BYTES, dtype=torch.int8)
        # aminmax would be one call, but takes 20 times as long on a CPU.
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        scales = torch.maximum(high, -low).div_(127).to(torch.float32)
        scales.clamp_(min=torch.finfo(torch.float32).tiny)
        rows = values.new_empty(len(values), self.block + _SCALE_BYTES, dtype=torch.int8)
        integers = (values / scales).round_()
        rows[:, : self.block] = integers
        rows[:, self.block :] = scales.view(torch.int8)
        values.addcmul_(integers, scales.to(values.dtype), value=-1)
        return rows

    def _scales(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[..., self.block :].contiguous().view(torch.float32)

    def _values(self, rows: torch.Tensor, dtype: torch.dtype, divisor: int = 1) -> torch.Tensor:
        """Return the values of `rows`, divided."""
        return rows[..., : self.block] * self._scales(rows).to(dtype).div_(divisor)
