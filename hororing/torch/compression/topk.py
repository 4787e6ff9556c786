"""The largest elements of each gradient, with their indices.

Each rank sends the fraction `ratio` of a gradient's elements, those of the largest magnitude,
exactly, and keeps the others; a bucket takes one allgather. All ranks get 8 bytes for each sent
element, so this pays if the number of ranks times `ratio` is well below 1.

Source: S. U. Stich, J.-B. Cordonnier, M. Jaggi, "Sparsified SGD with memory", NeurIPS 2018,
arXiv:1809.07599.
"""

from __future__ import annotations

import dataclasses
import math

import torch

from hororing.torch.compression.method import Link, Method, Piece, Steps


@dataclasses.dataclass(frozen=True)
class TopK(Method):
    """The largest elements.

    Parameters
    ----------
    ratio : float, optional
        Of the elements of a gradient, in (0, 1]; at least one is sent.
    scope : {"all", "hosts"}
        See `StatefulCompression`.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not isinstance(self.ratio, int | float) or not 0 < self.ratio <= 1:
            raise ValueError(f"Compression.topk: ratio={self.ratio!r} must be in (0, 1]")

    def traffic(self, param: torch.Tensor, ranks: int) -> float:
        """Each rank gets 8 bytes per sent element from each other rank."""
        return self.ratio * ranks * 4 / param.element_size()

    def reduce(self, piece: Piece, link: Link) -> Steps:
        """Choose, gather, add up."""
        flat = piece.flat
        chosen, begin = [], 0
        for part in torch.split(piece.flat, list(piece.lengths)):
            count = math.ceil(self.ratio * len(part))
            chosen.append(torch.topk(part.abs(), count, sorted=False).indices + begin)
            begin += len(part)
        where = torch.cat(chosen)
        values = flat[where]
        flat[where] = 0
        indices = where.to(torch.int32 if len(flat) < 2**31 else torch.int64)

        all_indices, all_values = yield link.gather([indices, values], "gather")
        total = torch.zeros_like(flat)
        # In rank order, one rank at a time: within it no index occurs twice.
        for theirs, sent in zip(
            all_indices.split(len(where)), all_values.split(len(where)), strict=True
        ):
            total.index_add_(0, theirs.to(torch.int64), sent, alpha=1 / piece.divisor)
        return piece.parts(total), [{} for _ in piece.given], torch.isfinite(all_values).all()
