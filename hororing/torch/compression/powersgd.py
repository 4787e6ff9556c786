"""PowerSGD: matrices of low rank instead of gradients.

    M of this rank: n x m;  Q: m x r, from the last step, the same on all ranks
    P = sum of M Q;  P <- an orthonormal basis of its columns;  Q = sum of M^T P
    result: P Q^T;  what this rank keeps: M - P Q^T / ranks

Both sums are allreduces, of (n + m) r elements in all. This is one step of subspace iteration: as
gradients change slowly, Q approaches the leading singular vectors over steps (warm start). A tensor
is a matrix of its first dimension and all others. P and the result are computed on every rank, so
they have the same bits if ranks have the same processors and numbers of threads.

Source: T. Vogels, S. P. Karimireddy, M. Jaggi, "PowerSGD: practical low-rank gradient compression
for distributed optimization", NeurIPS 2019, arXiv:1905.13727, algorithms 1 and 2.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import torch

from hororing.torch.compression.method import Link, Method, Piece, Steps

_MIN_RATIO = 2  # by which P and Q together must be smaller than M
_MIN_RANK_FOR_BLAS = 8  # of P Q^T on a CPU: a pass for each column is faster below


@dataclasses.dataclass(frozen=True)
class PowerSGD(Method):
    """Low rank.

    Parameters
    ----------
    rank : int, optional
        Of the matrices, r above; at least 1. Tensors of less than two dimensions, and those
        that P and Q would not halve, are sent uncompressed.
    scope : {"all", "hosts"}
        See `StatefulCompression`.
    """

    rank: int = 4

    def __post_init__(self) -> None:
        """Check the options."""
        super().__post_init__()
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"Compression.powersgd: rank={self.rank!r} must be at least 1")

    def compresses(self, param: torch.Tensor) -> bool:
        """Whether it is large and has at least two dimensions."""
        if not super().compresses(param) or param.dim() < 2:
            return False
        return self.traffic(param, 1) * _MIN_RATIO <= 1

    def traffic(self, param: torch.Tensor, ranks: int) -> float:
        """P and Q, instead of M."""
        rows, columns = param.shape[0], param.numel() // param.shape[0]
        return (rows + columns) * self.rank / (rows * columns)

    def reduce(self, piece: Piece, link: Link) -> Steps:
        """Sum P, and Q."""
        matrices = [part.view(part.shape[0], -1) for part in piece.parts(piece.flat)]
        factors = [
            _orthonormal(kept["q"].to(matrix)) if "q" in kept else self._first(name, matrix)
            for name, kept, matrix in zip(piece.names, piece.kept, matrices, strict=True)
        ]
        products = [matrix @ q for matrix, q in zip(matrices, factors, strict=True)]
        flat = yield link.sum(_joined(products), "p")
        bases = [_orthonormal(p) for p in _parted(flat, products)]
        # matrix.t() @ p would take ten times as long on a CPU.
        products = [p.t() @ matrix for matrix, p in zip(matrices, bases, strict=True)]
        flat = yield link.sum(_joined(products), "q")

        kept = [{"q": q.t().clone()} for q in _parted(flat, products)]
        finite = torch.isfinite(flat).all()
        flat /= piece.divisor
        results = []
        for matrix, p, q, gradient in zip(
            matrices, bases, _parted(flat, products), piece.given, strict=True
        ):
            usable = gradient.dtype is matrix.dtype and gradient.is_contiguous()
            results.append(gradient if usable else matrix.new_empty(gradient.shape))
            product = results[-1].data.view(matrix.shape)  # `data`: autograd does not count this
            _multiply(p, q, product)
            matrix.sub_(product, alpha=piece.divisor / link.size)
        return results, kept, finite

    def _first(self, name: str, matrix: torch.Tensor) -> torch.Tensor:
        """Return the first Q, the same on all ranks."""
        made = torch.Generator().manual_seed(zlib.crc32(name.encode("utf-8", "backslashreplace")))
        random = torch.randn(
            matrix.shape[1], self.rank, generator=made, dtype=torch.float32, device="cpu"
        )
        return _orthonormal(random.to(matrix))


def _orthonormal(matrix: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis that spans the columns."""
    basis: torch.Tensor = torch.linalg.qr(matrix)[0]
    return basis


def _multiply(p: torch.Tensor, q: torch.Tensor, out: torch.Tensor) -> None:
    """Set `out` to p @ q."""
    if len(q) > _MIN_RANK_FOR_BLAS or not out.is_cpu:
        torch.mm(p, q, out=out)
        return
    torch.mul(p[:, :1], q[0], out=out)
    for at in range(1, len(q)):
        out.addcmul_(p[:, at : at + 1], q[at])


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _parted(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    parts = torch.split(flat, [each.numel() for each in like])
    return [part.view(each.shape) for part, each in zip(parts, like, strict=True)]
