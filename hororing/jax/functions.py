"""What scripts send besides gradients: parameters, states of optimizers, metrics."""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import numpy as np
from jax import numpy as jnp

from hororing._requests.objects import broadcast_object
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.jax._ffi.arrays import is_traced
from hororing.jax.verbs import allreduce, broadcast

T = TypeVar("T")


def broadcast_parameters(
    params: T, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> T:
    """Return the parameters of rank `root_rank`; call it before the first step.

    Parameters
    ----------
    params : pytree
        Arrays, such as the parameters of flax or the state of an optax optimizer; keys of
        jax.random and Python numbers, too. Of the same structure on every rank. Other leaves must
        be picklable.
    root_rank : int
        Counts among all ranks of the job, also within a process set.
    process_set : ProcessSet
        The ranks that take part.

    Returns
    -------
    pytree
        New arrays: JAX does not change any.

    Raises
    ------
    MismatchError
        On every rank, if shapes or types differ; the text has the path of the leaf.
    ValueError
        In a compiled function, for leaves that are not arrays.

    Examples
    --------
    >>> params = hvd.broadcast_parameters({"kernel": jnp.ones((3, 2))}, root_rank=0)
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    results: list[Any] = [leaf for _, leaf in leaves]
    others: dict[int, Any] = {}
    for at, (path, leaf) in enumerate(leaves):
        name = f"broadcast_parameters{jax.tree_util.keystr(path)}"
        if not isinstance(leaf, jax.Array | np.ndarray | np.generic):
            others[at] = leaf
        elif isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = broadcast(jax.random.key_data(leaf), root_rank, name, process_set)
            results[at] = jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        else:
            results[at] = _as(leaf, broadcast(leaf, root_rank, name, process_set))
    if others:
        if is_traced():
            raise ValueError(
                "broadcast_parameters: only arrays can be sent in a compiled function, not "
                f"{type(next(iter(others.values()))).__name__}; call it outside of jax.jit"
            )
        sent = broadcast_object(others, root_rank, "broadcast_parameters", process_set)
        for at, leaf in sent.items():
            results[at] = leaf
    return jax.tree_util.tree_unflatten(structure, results)  # type: ignore[no-any-return]


def _as(given: Any, received: Any) -> Any:
    """Keep arrays of NumPy what they are: with 64 bits, for example."""
    return received if isinstance(given, jax.Array) else np.asarray(received, given.dtype)


def broadcast_optimizer_state(
    opt_state: T, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> T:
    """Return the optimizer's state of rank `root_rank`: `broadcast_parameters` for ``opt_state``.

    >>> state = hvd.broadcast_optimizer_state((jnp.zeros(3), jnp.zeros((), jnp.int32)))
    """
    return broadcast_parameters(opt_state, root_rank, process_set)


def metric_average(
    value: Any,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Any:
    """Return the mean of a metric over the ranks, or of a pytree of metrics.

    Integers and bools are averaged as floats. With `weight`, such as this rank's number of samples,
    it is the weighted mean. As `allreduce`, inside and outside of compiled functions.

    >>> metrics = hvd.metric_average({"loss": 0.5, "accuracy": jnp.asarray(0.9)})
    """

    def as_float(leaf: Any) -> Any:
        array = jnp.asarray(leaf)
        smooth = jnp.issubdtype(array.dtype, jnp.inexact)
        return array if smooth else array.astype(jnp.promote_types(array.dtype, jnp.float32))

    floats = jax.tree_util.tree_map(as_float, value)
    return allreduce(floats, name=name, process_set=process_set, weight=weight)


__all__ = ["broadcast_optimizer_state", "broadcast_parameters", "metric_average"]
