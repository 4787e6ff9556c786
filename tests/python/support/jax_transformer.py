"""A small transformer in JAX, float32, and its losses with an optimizer of optax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax import numpy as jnp

STEPS, SAMPLES = 20, 12  # for 1 to 4 ranks
TEXT = np.random.default_rng(3).integers(0, 11, (STEPS, SAMPLES, 13))  # step, sample, position
SHAPES = {"qkv": (16, 48), "out": (16, 16), "up": (16, 64), "down": (64, 16), "head": (16, 11)}


def parameters() -> dict[str, Any]:
    """Return the parameters, always the same."""
    rng = np.random.default_rng(4)
    shapes = {**SHAPES, "embedding": (11, 16)}
    return {
        name: (rng.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)
        for name, shape in shapes.items()
    }


def loss_of_text(params: dict[str, Any], tokens: Any) -> Any:
    """Return the mean of the cross entropies of the next tokens."""
    x = jax.lax.stop_gradient(params["embedding"])[tokens[:, :-1]]
    q, k, v = jnp.split(x @ params["qkv"], 3, -1)
    scores = jnp.einsum("bid,bjd->bij", q, k) / 4
    causal = jnp.tril(jnp.ones(scores.shape[1:], bool))
    attention = jax.nn.softmax(jnp.where(causal, scores, -1e9))
    x = x + attention @ v @ params["out"]
    x = x + jax.nn.gelu(x @ params["up"]) @ params["down"]
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["head"], tokens[:, 1:])
    return losses.mean()


def losses(
    tx: Any,
    batch_of: Callable[[Any], Any],
    average: Callable[[Any], Any] = lambda loss: loss,
    place: Callable[[Any], Any] = jax.device_put,
) -> list[float]:
    """Train, and return the losses of all steps.

    `batch_of` takes a step's tokens of all samples and returns those of this rank; `place` puts
    parameters on their devices.
    """

    @jax.jit
    def step(params: Any, state: Any, tokens: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of_text)(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, average(loss)

    params = jax.tree.map(place, parameters())
    state, found = jax.tree.map(place, tx.init(params)), []
    for tokens in TEXT:
        params, state, loss = step(params, state, batch_of(tokens))
        found.append(float(loss))
    return found
