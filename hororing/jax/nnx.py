"""Modules of flax.nnx: ``from hororing.jax.nnx import SyncBatchNorm``."""

from __future__ import annotations

from typing import Any

import jax
from flax import nnx
from jax import numpy as jnp

from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.jax import batch_norm

_WHAT = "SyncBatchNorm"


class SyncBatchNorm(nnx.BatchNorm):  # type: ignore[misc]
    """flax.nnx.BatchNorm with the statistics of all ranks' batches.

    Parameters
    ----------
    num_features : int
        Number of features, the size of `axis`.
    process_set : ProcessSet
        The ranks whose batches count.
    **options : Any
        `rngs`, `use_running_average`, `axis`, `momentum`, `epsilon`, `dtype` and so on, as for
        BatchNorm, but without `axis_name`.

    Examples
    --------
    >>> from flax import nnx
    >>> from hororing.jax.nnx import SyncBatchNorm
    >>> y = SyncBatchNorm(3, rngs=nnx.Rngs(0))(jnp.ones((4, 3)))
    """

    def __init__(
        self, num_features: int, *, process_set: ProcessSet = global_process_set, **options: Any
    ) -> None:
        super().__init__(num_features, **options)
        batch_norm.refuse_axis_name(self.axis_name, _WHAT)
        self.process_set = process_set

    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        """Normalise `x`; `mask` says which elements count."""
        running = batch_norm.chosen(use_running_average, self.use_running_average, _WHAT)
        axes = batch_norm.reduced_axes(x, self.axis)
        if running:
            mean, var = _value(self.mean), _value(self.var)
        else:
            mean, var = batch_norm.statistics(x, axes, mask, self.process_set)
            for average, latest in ((self.mean, mean), (self.var, var)):
                kept = self.momentum * _value(average) + (1 - self.momentum) * latest
                _assign(average, jax.lax.stop_gradient(kept))
        scale = None if self.scale is None else _value(self.scale)
        bias = None if self.bias is None else _value(self.bias)
        result = batch_norm.normalized(x, mean, var, scale, bias, axes, self.epsilon)
        return result.astype(self.dtype or jnp.result_type(x, self.param_dtype))


def _value(variable: Any) -> Any:
    return variable.get_value() if hasattr(variable, "get_value") else variable.value  # flax < 0.12


def _assign(variable: Any, value: Any) -> None:
    if hasattr(variable, "set_value"):
        variable.set_value(value)
    else:
        variable.value = value


__all__ = ["SyncBatchNorm"]
