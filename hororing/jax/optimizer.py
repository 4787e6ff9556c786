"""`DistributedOptimizer`: an optax transformation that reduces gradients first."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from hororing._adapters.optimizer_options import WHAT, Settings, checked_settings
from hororing._requests.arguments import Average
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.jax._ffi.arrays import checked_weight
from hororing.jax.gradients import check_groups, reduce_gradients


class DistributedState(NamedTuple):
    """The state with `backward_passes_per_step` > 1: that of the optimizer, and of the passes."""

    inner: Any
    sums: Any  # of the gradients since the last step; a mean with weights
    count: jax.Array  # of these passes
    weight: jax.Array  # the sum of their weights


def DistributedOptimizer(
    optimizer: Any,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    backward_passes_per_step: int = 1,
    op: int = Average,
    gradient_predivide_factor: float = 1.0,
    average_aggregated_gradients: bool = False,
    num_groups: int = 0,
    groups: int | Sequence[Sequence[str]] | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return `optimizer` with an `update` that first reduces the gradients over the ranks.

    Inside of compiled functions, XLA begins to reduce a group of gradients when they are computed,
    and computes others meanwhile.

    Parameters
    ----------
    optimizer : optax.GradientTransformation
        Any; its state does not change its form, unless `backward_passes_per_step` > 1.
    name : str, optional
        Prefix of the names of the requests; counts optimizers when omitted.
    compression : Compressor
        How gradients are sent, e.g. ``Compression.fp16``.
    backward_passes_per_step : int
        The gradients of so many calls of `update` are added up and then reduced. Other calls return
        zeros as updates.
    op : int
        Average, Sum or Adasum.
    gradient_predivide_factor : float
        With op=Average: gradients are divided by it before they are added up, and by the rest
        after.
    average_aggregated_gradients : bool
        The sum over the passes is divided by their number.
    num_groups : int
        Deprecated form of `groups`.
    groups : int or list of list of str, optional
        The number of groups of gradients, each of which is reduced as a whole; or lists of paths of
        leaves or subtrees, as ``jax.tree_util.keystr`` writes them: ``[["['head']", ".scale"]]``.
        When omitted, and for what is in no list, groups of about 8 MiB, the last layers first.
    process_set : ProcessSet
        The ranks that take part. Others use the optimizer as it is.

    Returns
    -------
    optax.GradientTransformationExtraArgs
        Its ``update(gradients, state, params, weight=...)`` takes this rank's weight, such as its
        number of samples, for a weighted average (op=Average): a number, or an array with one
        element. All ranks pass one, or none does. With several passes, it is the weight of the
        pass, and all passes have one.

    Raises
    ------
    NotInitializedError
        Before `init`.

    Examples
    --------
    >>> tx = hvd.DistributedOptimizer(optax.adamw(1e-3 * hvd.size()))
    >>> params = hvd.broadcast_parameters({"kernel": jnp.ones((3, 2))})
    >>> state = tx.init(params)
    >>> updates, state = tx.update({"kernel": jnp.ones((3, 2))}, state, params)
    >>> params = optax.apply_updates(params, updates)
    """
    import optax  # optional: nothing else needs it

    if not callable(getattr(optimizer, "init", None)) or not callable(
        getattr(optimizer, "update", None)
    ):
        raise TypeError(
            f"{WHAT} takes a transformation of optax, such as optax.adamw(1e-3), not "
            f"{type(optimizer).__name__}; in flax, wrap what becomes `tx`"
        )
    check_groups(WHAT, groups)
    settings = checked_settings(
        name=name, compression=compression, op=op, num_groups=num_groups, groups=groups,
        backward_passes_per_step=backward_passes_per_step, process_set=process_set,
        gradient_predivide_factor=gradient_predivide_factor,
        average_aggregated_gradients=average_aggregated_gradients,
    )  # fmt: skip
    inner = optax.with_extra_args_support(optimizer)
    make = _every_pass if settings.passes == 1 else _several_passes
    return optax.GradientTransformationExtraArgs(*make(inner, settings))


Functions = tuple[Callable[..., Any], Callable[..., Any]]  # init and update


def _every_pass(inner: Any, settings: Settings) -> Functions:
    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        reduced = reduce_gradients(updates, settings.name, settings, weight)
        updates, state = inner.update(reduced, state, params, **extra)
        return updates, state

    return inner.init, update


def _several_passes(inner: Any, settings: Settings) -> Functions:
    def init(params: Any) -> DistributedState:
        zeros = jax.tree_util.tree_map(jnp.zeros_like, params)
        return DistributedState(inner.init(params), zeros, jnp.zeros((), jnp.int32), jnp.zeros(()))

    def update(
        updates: Any, state: Any, params: Any = None, *, weight: Any = None, **extra: Any
    ) -> tuple[Any, Any]:
        sums, total = _added(state, updates, weight)

        def step() -> tuple[Any, DistributedState]:
            divisor = settings.passes if settings.average_passes and weight is None else 1
            whole = jax.tree_util.tree_map(lambda each: each / divisor, sums)
            given = None if weight is None else total
            reduced = reduce_gradients(whole, settings.name, settings, given)
            stepped, after = inner.update(reduced, state.inner, params, **extra)
            zeros = jax.tree_util.tree_map(jnp.zeros_like, sums)
            return stepped, DistributedState(after, zeros, state.count * 0, total * 0)

        def wait() -> tuple[Any, DistributedState]:
            stepped, _ = jax.eval_shape(step)
            nothing = jax.tree_util.tree_map(
                lambda each: jnp.zeros(each.shape, each.dtype), stepped
            )
            return nothing, DistributedState(state.inner, sums, state.count + 1, total)

        due = state.count + 1 >= settings.passes
        if not isinstance(due, jax.core.Tracer):
            return step() if due else wait()
        # Of several ranks, either all or none call `step`: they count alike.
        found: tuple[Any, Any] = jax.lax.cond(due, step, wait)
        return found

    return init, update


def _added(state: DistributedState, updates: Any, weight: Any) -> tuple[Any, Any]:
    """Return the sums with the gradients of this pass, or their weighted mean, and its weight."""
    if weight is None:
        return jax.tree_util.tree_map(jnp.add, state.sums, updates), state.weight
    number, array = checked_weight(weight, WHAT)
    this = jnp.asarray(number if array is None else array, state.weight.dtype)
    total = state.weight + this
    share = jnp.where(total > 0, this / jnp.where(total > 0, total, 1), 0)

    def mean(before: Any, now: Any) -> Any:
        part = share.astype(before.dtype)
        moved = jnp.where(this > 0, before + (now - before) * part, before)
        return moved.astype(before.dtype)

    return jax.tree_util.tree_map(mean, state.sums, updates), total


__all__ = ["DistributedOptimizer", "DistributedState"]
