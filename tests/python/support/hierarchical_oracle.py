"""Hierarchical SGD of a linear model in NumPy, all ranks at once: the oracle for the adapters."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

ROWS, INPUTS, OUTPUTS = 5, 3, 2


def batch(seed: int, step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the batch of `rank` in step `step`, counted from 1."""
    random = np.random.default_rng((seed, step, rank))
    return random.normal(size=(ROWS, INPUTS)), random.normal(size=(ROWS, OUTPUTS))


def first_weights(seed: int) -> np.ndarray:
    return np.random.default_rng((seed, 0)).normal(size=(INPUTS, OUTPUTS))


class Oracle:
    """`levels` are pairs (period, groups). Most other arguments are those of HierarchicalSGD.

    `outer` is None, ("slowmo", alpha, beta) or ("nesterov", lr, momentum).
    """

    def __init__(
        self,
        size: int,
        seed: int,
        levels: Sequence[tuple[int, Sequence[Sequence[int]]]],
        warmup_steps: int = 0,
        gradient_groups: Sequence[Sequence[int]] | None = None,
        momentum: str = "keep",
        weights: Sequence[float] | None = None,
        delay_steps: int = 0,
        outer: tuple | None = None,
        lr: float = 0.1,
        beta: float = 0.9,
    ) -> None:
        self.size, self.seed, self.lr, self.beta = size, seed, lr, beta
        self.levels, self.warmup = levels, warmup_steps
        self.gradient_groups = gradient_groups or [[rank] for rank in range(size)]
        self.policy, self.delay, self.outer = momentum, delay_steps, outer
        self.n = np.ones(size) if weights is None else np.array(weights)
        self.w = np.stack([first_weights(seed)] * size)
        self.v = np.zeros_like(self.w)
        self.previous = self.w[0].copy()
        self.u = np.zeros_like(self.previous)
        self.step = 0
        self.pending: list[tuple[int, np.ndarray]] = []

    def gradients(self) -> np.ndarray:
        result = []
        for rank in range(self.size):
            x, y = batch(self.seed, self.step, rank)
            result.append(2 * x.T @ (x @ self.w[rank] - y) / y.size)
        return np.stack(result)

    def next(self) -> int | None:
        """Take a step; return the period of the level that averages, or None."""
        self.step += 1
        local = self.step > self.warmup
        g = self.gradients()
        for group in self.gradient_groups if local else [range(self.size)]:
            group = list(group)
            g[group] = g[group].mean(axis=0)
        self.v = self.beta * self.v + g
        self.w = self.w - self.lr * self.v
        if self.step == self.warmup:
            self.previous = self.w[0].copy()
        for due, change in self.pending:
            if due == self.step:
                self.w = self.w + change
                if self.policy == "reset":
                    self.v[:] = 0
        self.pending = [each for each in self.pending if each[0] > self.step]
        # The clock counts steps, independently of the formula.
        fires = None
        for at, (period, _) in enumerate(self.levels):
            if local and self.step in range(self.warmup + period, self.step + 1, period):
                fires = at
        if fires is None:
            return None
        self.average(fires)
        return self.levels[fires][0]

    def average(self, level: int) -> None:
        mean, mean_v = self.w.copy(), self.v.copy()
        for group in self.levels[level][1]:
            group = list(group)
            share = (self.n[group] / self.n[group].sum())[:, None, None]
            mean[group] = (share * self.w[group]).sum(axis=0)
            mean_v[group] = (share * self.v[group]).sum(axis=0)
        if self.outer is not None and level == len(self.levels) - 1:
            mean[:] = self.outer_step(mean[0])
        if self.delay:
            self.pending.append((self.step + self.delay, mean - self.w))
            return
        self.w = mean
        if self.policy == "average":
            self.v = mean_v
        elif self.policy == "reset":
            self.v[:] = 0

    def outer_step(self, mean: np.ndarray) -> np.ndarray:
        kind, first, second = self.outer
        if kind == "slowmo":
            self.u = second * self.u + (self.previous - mean) / self.lr
            new = self.previous - first * self.lr * self.u
        else:
            gradient = self.previous - mean
            self.u = second * self.u + gradient
            new = self.previous - first * (gradient + second * self.u)
        self.previous = new
        return new


def blocks(size: int, by: int) -> list[list[int]]:
    return [list(range(first, first + by)) for first in range(0, size, by)]


def configurations(size: int) -> dict[str, dict]:
    """Return arguments of `Oracle` by name, for any number of ranks."""
    half = size // 2 if size % 2 == 0 else 1
    two = [(2, blocks(size, half)), (4, [range(size)])]
    uneven = [(1, [[size - 1], *([list(range(size - 1))] if size > 1 else [])]), (3, [range(size)])]
    return {
        "local SGD": {"levels": [(3, [range(size)])]},
        "post-local SGD": {"levels": [(3, [range(size)])], "warmup_steps": 4},
        "two levels": {"levels": two},
        "gradients of groups": {
            "levels": two, "warmup_steps": 3, "gradient_groups": blocks(size, half),
        },
        "uneven groups": {"levels": uneven, "gradient_groups": uneven[0][1]},
        "momentum averaged": {"levels": two, "momentum": "average", "warmup_steps": 1},
        "momentum reset": {"levels": two, "momentum": "reset"},
        "weighted": {
            "levels": two, "weights": [rank + 0.5 for rank in range(size)], "momentum": "average",
        },
        "delayed": {"levels": two, "delay_steps": 1, "warmup_steps": 1},
        "delayed until the next": {"levels": two, "delay_steps": 2},
        "slow momentum": {"levels": two, "outer": ("slowmo", 0.8, 0.5), "warmup_steps": 2},
        "outer nesterov": {"levels": two, "outer": ("nesterov", 0.7, 0.9)},
        "outer, delayed, reset": {
            "levels": two, "outer": ("slowmo", 1.0, 0.6), "delay_steps": 1, "momentum": "reset",
            "gradient_groups": blocks(size, half),
        },
    }  # fmt: skip
