"""Modules of flax.linen: ``from hororing.jax.linen import SyncBatchNorm``."""

from __future__ import annotations

from typing import Any

from flax import linen
from jax import numpy as jnp

from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.jax import batch_norm

_WHAT = "SyncBatchNorm"


class SyncBatchNorm(linen.BatchNorm):  # type: ignore[misc]
    """flax.linen.BatchNorm with the statistics of all ranks' batches.

    Parameters and ``batch_stats`` have the names of BatchNorm. While the module is initialised, and
    with running averages, it does not communicate.

    Parameters
    ----------
    process_set : ProcessSet
        The ranks whose batches count.
    **options : Any
        `use_running_average`, `axis`, `momentum`, `epsilon`, `dtype` and so on, as for BatchNorm,
        but without `axis_name`.

    Examples
    --------
    >>> from hororing.jax.linen import SyncBatchNorm
    >>> norm = SyncBatchNorm(use_running_average=False)
    >>> variables = norm.init(jax.random.key(0), jnp.ones((4, 3)))
    >>> y, updated = norm.apply(variables, jnp.ones((4, 3)), mutable=["batch_stats"])
    """

    process_set: ProcessSet = global_process_set

    @linen.compact  # type: ignore[untyped-decorator]
    def __call__(self, x: Any, use_running_average: bool | None = None, *, mask: Any = None) -> Any:
        """Normalise `x`; `mask` says which elements count."""
        batch_norm.refuse_axis_name(self.axis_name, _WHAT)
        running = batch_norm.chosen(use_running_average, self.use_running_average, _WHAT)
        axes = batch_norm.reduced_axes(x, self.axis)
        shape = tuple(size for at, size in enumerate(x.shape) if at not in axes)
        means = self.variable("batch_stats", "mean", jnp.zeros, shape, jnp.float32)
        variances = self.variable("batch_stats", "var", jnp.ones, shape, jnp.float32)
        if running or self.is_initializing():
            mean, var = means.value, variances.value
        else:
            mean, var = batch_norm.statistics(x, axes, mask, self.process_set)
            kept = self.momentum
            means.value = kept * means.value + (1 - kept) * mean
            variances.value = kept * variances.value + (1 - kept) * var
        scale = bias = None
        if self.use_scale:
            scale = self.param("scale", self.scale_init, shape, self.param_dtype)
        if self.use_bias:
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        result = batch_norm.normalized(x, mean, var, scale, bias, axes, self.epsilon)
        return result.astype(self.dtype or jnp.result_type(x, self.param_dtype))


__all__ = ["SyncBatchNorm"]
