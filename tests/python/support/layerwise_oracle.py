"""LARS and LAMB in NumPy's float64, one tensor at a time, as in their papers.

Optimizers are compared with them on a problem of 100 steps, with random gradients that depend on
the weights, and a rate that rises and falls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
SHAPES = [(7, 5), (3, 4, 2), (6,), (1,), (4, 4), (5, 2)]
STEPS = 100

LARS_VARIANTS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"eps": 0.3},
    {"denominator": "sum"},
    {"denominator": "sum", "eps": 0.1, "momentum_form": "unscaled"},
    {"momentum_form": "unscaled"},
    {"momentum_form": "unscaled", "nesterov": True},
    {"nesterov": True},
    {"clip": True},
    {"clip": True, "denominator": "sum", "momentum_form": "unscaled", "nesterov": True},
    {"momentum": 0.0},
]
LARS_DEFAULTS = {"momentum": 0.9, "weight_decay": 0.05, "trust_coefficient": 0.02, "eps": 0.0,
                 "denominator": "paper", "momentum_form": "scaled", "clip": False,
                 "nesterov": False}  # fmt: skip
LAMB_VARIANTS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"phi": (0.5, 2.0)},
    {"betas": (0.8, 0.95), "eps": 1e-3},
]
LAMB_DEFAULTS = {"betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.05, "phi": None}


def rate(step: int) -> float:
    return 0.02 * (1 + step) if step < 10 else 0.2 * (1 - step / STEPS)


def norm(array: Array) -> float:
    return float(np.sqrt(np.sum(np.square(array))))


def lars(*, momentum, weight_decay, trust_coefficient, eps, denominator, momentum_form, clip,
         nesterov, adapt=True) -> Callable[[Array, Array, float], Array]:  # fmt: skip
    """Return a function that maps weights, gradient and rate to the next weights."""
    velocity: Any = 0.0

    def step(w: Array, g: Array, gamma: float) -> Array:
        nonlocal velocity
        direction = g + weight_decay * w
        trust = 1.0
        length = norm(g) if denominator == "paper" else norm(direction)
        if adapt and norm(w) > 0 and length > 0:
            below = length + eps + (weight_decay * norm(w) if denominator == "paper" else 0.0)
            trust = trust_coefficient * norm(w) / below
            if clip:
                trust = min(trust / gamma, 1.0)
        if momentum_form == "scaled":
            velocity = momentum * velocity + gamma * trust * direction
            change = momentum * velocity + gamma * trust * direction if nesterov else velocity
        else:
            velocity = momentum * velocity + direction
            change = gamma * trust * (momentum * velocity + direction if nesterov else velocity)
        return w - change

    return step


def lamb(*, betas, eps, weight_decay, phi, adapt=True) -> Callable[[Array, Array, float], Array]:
    """Return a function that maps weights, gradient and rate to the next weights."""
    m: Any = 0.0
    v: Any = 0.0
    t = 0

    def step(w: Array, g: Array, gamma: float) -> Array:
        nonlocal m, v, t
        t += 1
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g**2
        u = m / (1 - betas[0] ** t) / (np.sqrt(v / (1 - betas[1] ** t)) + eps) + weight_decay * w
        ratio = 1.0
        if adapt and norm(w) > 0 and norm(u) > 0:
            size = norm(w) if phi is None else min(max(norm(w), phi[0]), phi[1])
            ratio = size / norm(u)
        return w - gamma * ratio * u

    return step


def beginning(seed: int) -> list[Array]:
    """Return initial weights; one tensor is zero, and so is its norm."""
    random = np.random.default_rng(seed)
    weights = [random.normal(size=shape) for shape in SHAPES]
    weights[4][:] = 0
    return weights


def noises(seed: int) -> Iterator[list[Array]]:
    """Yield the random part of the gradients of each step; a tensor's is zero in some steps."""
    random = np.random.default_rng(seed + 1)
    for step in range(STEPS):
        noise = [random.normal(size=shape) for shape in SHAPES]
        if step in (0, 50):
            noise[5][:] = 0
        yield noise


def gradient(weight: Any, noise: Any) -> Any:
    """Return the gradient, for arrays and tensors of any framework."""
    return 0.1 * weight * (noise * noise).sum() + noise


def trajectory(
    make: Callable[..., Any], options: dict[str, Any], seed: int, count: int = STEPS
) -> list[Array]:
    """Return the last weights. One-dimensional tensors neither decay nor adapt."""
    weights = beginning(seed)
    steps = [
        make(**(options if w.ndim > 1 else {**options, "weight_decay": 0.0, "adapt": False}))
        for w in weights
    ]
    for number, noise in zip(range(count), noises(seed), strict=False):
        weights = [
            step(w, gradient(w, n), rate(number))
            for step, w, n in zip(steps, weights, noise, strict=True)
        ]
    return weights


def assert_close(found: list[Array], expected: list[Array], tolerance: float) -> None:
    """Compare tensors relative to their norms, or to 1 if a tensor is close to zero."""
    for at, (here, there) in enumerate(zip(found, expected, strict=True)):
        error = norm(np.asarray(here, np.float64) - there) / max(norm(there), 1.0)
        assert error <= tolerance, f"tensor {at}: {error}"
