"""Batch normalisation over the batches of all ranks, the common part for flax's two modules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
from jax import numpy as jnp

from hororing._requests.arguments import Sum
from hororing._requests.process_sets import ProcessSet
from hororing.jax.verbs import allreduce

T = TypeVar("T")


def reduced_axes(x: Any, axis: int | Sequence[int]) -> tuple[int, ...]:
    """Return the axes of `x` that statistics are taken over: all but those of the features."""
    features = {at % x.ndim for at in ([axis] if isinstance(axis, int) else axis)}
    return tuple(at for at in range(x.ndim) if at not in features)


def statistics(
    x: Any, axes: tuple[int, ...], mask: Any, process_set: ProcessSet
) -> tuple[Any, Any]:
    """Return mean and variance over the axes and the ranks, in float32 or wider.

    One request: numbers of elements, sums and sums of squares. Ranks may have batches of different
    sizes. Differentiable: with gradients that are averaged over the ranks afterwards, the result is
    that of one process with the whole batch.
    """
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    if mask is None:
        kept, count = wide, jnp.asarray(math.prod(x.shape[at] for at in axes), wide.dtype)
    else:
        mask = jnp.broadcast_to(mask, x.shape)
        kept = jnp.where(mask, wide, 0)
        count = mask.sum(axes).astype(wide.dtype)
    sums = {"count": count, "sum": kept.sum(axes), "squares": (kept * kept).sum(axes)}
    whole = allreduce(sums, op=Sum, process_set=process_set)
    divisor = jnp.maximum(whole["count"], 1)
    mean = whole["sum"] / divisor
    return mean, jnp.maximum(whole["squares"] / divisor - mean * mean, 0)


def normalized(
    x: Any, mean: Any, var: Any, scale: Any, bias: Any, axes: tuple[int, ...], epsilon: float
) -> Any:
    """Return ``(x - mean) / sqrt(var + epsilon) * scale + bias``; the last two may be None."""

    def spread(features: Any) -> Any:
        return jnp.expand_dims(features, axes)

    factor = jax.lax.rsqrt(spread(var) + epsilon)
    if scale is not None:
        factor = factor * spread(scale)
    result = (x - spread(mean)) * factor
    return result if bias is None else result + spread(bias)


def chosen(given: bool | None, default: bool | None, what: str) -> bool:
    """Return whether running averages are used. ValueError if neither says so."""
    choice = default if given is None else given
    if choice is None:
        raise ValueError(
            f"{what}: use_running_average must be True or False, as an argument or an attribute"
        )
    return choice


def refuse_axis_name(axis_name: str | None, what: str) -> None:
    """Raise ValueError for an axis of pmap or vmap."""
    if axis_name is not None:
        raise ValueError(
            f"{what}: axis_name={axis_name!r} is for devices of one process; leave it out, or use "
            "flax's own BatchNorm"
        )
