"""Compression with error feedback in NumPy, for all ranks at once, written from the publications.

Each method takes the gradients of one step as an array of (ranks, elements) and returns its
estimate of their sum; `errors` are the errors that it keeps, by rank.
"""

from __future__ import annotations

import numpy as np


class Int8:
    """Seide et al. 2014 with 8 bits, scales of blocks (Dettmers 2016), and the sum quantised."""

    def __init__(self, ranks: int, sizes: list[int], block: int) -> None:
        self.block = block
        self.blocks = sum(-(-size // block) for size in sizes)
        # The places of the elements in the blocks. Each gradient begins a new block.
        self.where = np.zeros(0, int)
        for size in sizes:
            begin = -(-(self.where[-1] + 1) // block) * block if len(self.where) else 0
            self.where = np.concatenate([self.where, begin + np.arange(size)])
        self.errors = np.zeros((ranks, self.blocks * block))

    def _round(self, values: np.ndarray) -> np.ndarray:
        result = np.empty_like(values)
        for number in range(self.blocks):
            part = slice(number * self.block, (number + 1) * self.block)
            step = np.float64(np.float32(np.abs(values[part]).max() / 127))
            result[part] = np.rint(values[part] / step) * step if step else 0
        return result

    def reduce(self, gradients: np.ndarray) -> np.ndarray:
        ranks = len(gradients)
        self.errors[:, self.where] += gradients
        total = np.zeros(self.blocks * self.block)
        for error in self.errors:
            sent = self._round(error)
            error -= sent
            total += sent
        result = self._round(total)
        for rank in range(ranks):  # the owner of a part of the sum keeps its error
            begin, end = (self.blocks * at // ranks * self.block for at in (rank, rank + 1))
            self.errors[rank, begin:end] += (total - result)[begin:end]
        return result[self.where]


class TopK:
    """Stich et al. 2018: the largest elements of each rank, and a memory of the others."""

    def __init__(self, ranks: int, sizes: list[int], ratio: float) -> None:
        self.ratio, self.bounds = ratio, np.cumsum([0, *sizes])
        self.errors = np.zeros((ranks, sum(sizes)))

    def reduce(self, gradients: np.ndarray) -> np.ndarray:
        self.errors += gradients
        total = np.zeros(gradients.shape[1])
        for error in self.errors:
            for begin, end in zip(self.bounds, self.bounds[1:], strict=False):
                count = int(np.ceil(self.ratio * (end - begin)))
                chosen = begin + np.argsort(-np.abs(error[begin:end]))[:count]
                total[chosen] += error[chosen]
                error[chosen] = 0
        return total


class PowerSGD:
    """Vogels et al. 2019, algorithms 1 and 2, for one matrix; `q` is the initial factor."""

    def __init__(self, ranks: int, shape: tuple[int, int], q: np.ndarray) -> None:
        self.shape, self.q = shape, q
        self.errors = np.zeros((ranks, *shape))

    def reduce(self, gradients: np.ndarray) -> np.ndarray:
        matrices = gradients.reshape(self.errors.shape) + self.errors
        p = np.mean([matrix @ self.q for matrix in matrices], axis=0)
        for column in range(p.shape[1]):  # Gram-Schmidt
            for before in range(column):
                p[:, column] -= (p[:, before] @ p[:, column]) * p[:, before]
            p[:, column] /= np.linalg.norm(p[:, column])
        self.q = np.mean([matrix.T @ p for matrix in matrices], axis=0)
        mean = p @ self.q.T
        self.errors = matrices - mean
        return len(matrices) * mean.reshape(-1)
