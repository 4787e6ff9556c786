"""Outer optimizers of local SGD: they turn an average of all ranks' weights into new weights.

    mean      the average of the weights
    previous  the weights after the outer step before
    momentum  of the outer optimizer; zeros in the beginning

`update` is plain arithmetic, for arrays and tensors of any framework. All ranks have the same
values, so nothing is communicated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol


class Outer(Protocol):
    """An outer optimizer."""

    def update(self, previous: Any, mean: Any, momentum: Any, lr: float) -> tuple[Any, Any]:
        """Return new weights and new momentum. `lr` is that of the inner optimizer."""


@dataclass(frozen=True)
class SlowMo:
    """Slow momentum: u <- beta u + (previous - mean) / lr;  x <- previous - alpha lr u.

    Source: Wang et al. 2019, arXiv:1910.00643, algorithm 1. With alpha 1 and beta 0 it is local
    SGD.
    """

    alpha: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        if not self.alpha > 0:
            raise ValueError(f"SlowMo: alpha={self.alpha} must be positive")
        if not 0 <= self.beta < 1:
            raise ValueError(f"SlowMo: beta={self.beta} must be in 0 .. 1, without 1")

    def update(self, previous: Any, mean: Any, momentum: Any, lr: float) -> tuple[Any, Any]:
        """See `Outer`. With lr = 0 nothing was learned: the mean."""
        if lr == 0:
            return mean, momentum
        momentum = self.beta * momentum + (previous - mean) / lr
        return previous - self.alpha * lr * momentum, momentum


@dataclass(frozen=True)
class OuterSGD:
    """SGD on previous - mean as a gradient, by default with Nesterov's momentum.

    Source: Douillard et al. 2023, arXiv:2311.08105 (DiLoCo), whose values are the defaults. With
    lr 1 and momentum 0 it is local SGD.
    """

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"OuterSGD: lr={self.lr} must be positive")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"OuterSGD: momentum={self.momentum} must be in 0 .. 1, without 1")

    def update(self, previous: Any, mean: Any, momentum: Any, lr: float) -> tuple[Any, Any]:
        """See `Outer`; the inner learning rate is not used."""
        gradient = previous - mean
        momentum = self.momentum * momentum + gradient
        step = gradient + self.momentum * momentum if self.nesterov else momentum
        return previous - self.lr * step, momentum
