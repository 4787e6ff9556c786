"""The verbs on arrays of JAX and pytrees of them: eager, and in functions that JAX compiles.

A pytree travels as one request, all of it or nothing. Gradients: hororing/jax/_ffi/gradients.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax import numpy as jnp

from hororing._requests import arguments, control
from hororing._requests.arguments import Adasum, Average, Sum
from hororing._requests.compression import Compressor, NoneCompressor, compressed
from hororing._requests.handles import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from hororing._requests.names import encode_name
from hororing._requests.process_sets import ProcessSet, check_member, global_process_set
from hororing.jax._ffi import arrays
from hororing.jax._ffi.call import Call, call_site
from hororing.jax._ffi.gradients import carry_out
from hororing.jax._ffi.primitive import BARRIER, request


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Any:
    """Combine `tensor` over all ranks and return the result, the same bits on every rank.

    Outside of compiled functions it blocks, and its errors are those of hororing. Inside, XLA runs
    it when `tensor` is ready, and an error of another rank ends the program with
    `jax.errors.JaxRuntimeError`, which has the text.

    Parameters
    ----------
    tensor : jax.Array or pytree
        Of the same shapes and types on every rank.
    average : bool, optional
        Deprecated; True is op=Average, False op=Sum.
    name : str, optional
        Unique among tensors in flight. When omitted, it is made from the order of calls; in
        compiled functions from the program, the calling function and the order of calls there.
    compression : Compressor
        How arrays are sent, e.g. ``Compression.fp16``.
    op : int
        Average (the default), Sum, Min, Max, Product, or Adasum (floating point, among all ranks,
        whose number is a power of two). An average of integers is truncated toward zero; bool has
        no average.
    prescale_factor, postscale_factor : float
        Applied to every rank's tensor, and to the result.
    process_set : ProcessSet
        The ranks that take part; all of the job when omitted.
    weight : float or jax.Array, optional
        With op=Average, of floats: the weight of this rank's tensor, such as its number of
        samples. The result is the sum of the ranks' tensors times their weights, divided by the
        sum of the weights. Tensors of weight 0 are ignored; if all weights are 0 the result is 0.
        Either all ranks pass a weight, or none does. A weight that is negative or not finite is a
        ValueError on every rank.

    Returns
    -------
    jax.Array or pytree
        Of the same structure.

    Examples
    --------
    >>> mean = hvd.allreduce(jnp.ones(3))
    >>> total = jax.jit(lambda x: hvd.allreduce(x, op=hvd.Sum))(jnp.ones(3))
    """
    return _reduced(
        "allreduce", tensor, average, name, compression, op, (prescale_factor, postscale_factor),
        process_set, weight,
    )  # fmt: skip


def grouped_allreduce(
    tensors: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    weight: Any = None,
) -> Any:
    """Like `allreduce`, which takes pytrees as well: Horovod's name for a list of arrays.

    >>> mean, total = hvd.grouped_allreduce([jnp.ones(3), jnp.ones(())])
    """
    return _reduced(
        "grouped_allreduce", tensors, average, name, compression, op,
        (prescale_factor, postscale_factor), process_set, weight,
    )  # fmt: skip


def _reduced(
    verb: str,
    tree: Any,
    average: bool | None,
    name: str | None,
    compression: type[Compressor],
    op: int | None,
    factors: tuple[float, float],
    process_set: ProcessSet,
    weight: Any,
) -> Any:
    chosen = arguments.choose_op(op, average)
    if tree is not None and not jax.tree_util.tree_leaves(tree):
        return tree
    leaves, structure = arrays.flattened(tree, verb)
    results = reduce_leaves(
        _call(ALLREDUCE, verb, name, process_set, op=chosen), leaves, compression, factors, weight
    )
    return jax.tree_util.tree_unflatten(structure, results)


def reduce_leaves(
    call: Call,
    leaves: list[Any],
    compression: type[Compressor],
    factors: tuple[float, float],
    weight: Any,
) -> list[Any]:
    """Reduce checked arrays as one request."""
    number, array = arrays.checked_weight(weight, call.verb)
    call = call._replace(factors=arguments.check_factors(*factors, call.verb), weight=number)
    if call.op == Adasum:
        arguments.check_adasum(check_member(call.process_set, call.verb), call.verb)
    if call.op not in (Average, Sum) and any(
        jnp.issubdtype(each.dtype, jnp.complexfloating) for each in leaves
    ):
        raise ValueError(
            f"{call.verb}: op={arguments.op_name(call.op)} is not defined for complex numbers; use "
            "Average or Sum"
        )
    arrays.check_reducible(leaves, call.verb)

    def reduce(packed: list[Any]) -> list[Any]:
        return arrays.in_parts(partial(carry_out, call, weight=array), packed)

    return compressed(compression, leaves, reduce)


def _call(
    collective: int, verb: str, name: str | None, process_set: ProcessSet, **rest: Any
) -> Call:
    check_member(process_set, verb)
    if name is not None:
        encode_name(name)
    return Call(collective, verb, name, call_site(), process_set, **rest)


def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the arrays of all ranks along the first dimension, in rank order.

    First dimensions may differ between ranks and may be 0; the others must be equal. In compiled
    functions, whose shapes are fixed, first dimensions are equal, too. `tensor` may be a pytree.

    >>> of_all = hvd.allgather(jnp.ones((2, 3)))
    """
    return _gathered("allgather", tensor, name, process_set)


def grouped_allgather(
    tensors: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Like `allgather`, which takes pytrees as well: Horovod's name for a list of arrays.

    >>> all_weights, all_biases = hvd.grouped_allgather([jnp.ones((2, 3)), jnp.ones(3)])
    """
    return _gathered("grouped_allgather", tensors, name, process_set)


def _gathered(verb: str, tree: Any, name: str | None, process_set: ProcessSet) -> Any:
    leaves, structure = arrays.flattened(tree, verb)
    call = _call(ALLGATHER, verb, name, process_set)
    arrays.check_rows(leaves, call, "use array[None]")
    results = arrays.in_parts(partial(carry_out, call), leaves)
    return jax.tree_util.tree_unflatten(structure, results)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return, on every rank, the array that rank `root_rank` passes.

    `tensor`, which may be a pytree, has the same structure, shapes and types on every rank.
    `root_rank` counts among all ranks of the job, also within a process set.

    >>> first = hvd.broadcast(jnp.arange(3), root_rank=0)
    """
    root_rank = arguments.check_root(root_rank, "broadcast")
    if not -(2**31) <= root_rank < 2**31:  # the core's integers
        raise ValueError(f"broadcast '{name}': root rank {root_rank} is out of range")
    leaves, structure = arrays.flattened(tensor, "broadcast")
    call = _call(BROADCAST, "broadcast", name, process_set, root=root_rank)
    results = arrays.in_parts(partial(carry_out, call), leaves)
    return jax.tree_util.tree_unflatten(structure, results)


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank, and return the rows that all ranks sent here.

    The rows come in the order of the ranks that sent them. With `splits`, the result is a pair: the
    rows, and how many came from each rank, as int32.

    Parameters
    ----------
    tensor : jax.Array
        Rows for rank 0, then those for rank 1, ...; ranks may differ in the first dimension.
    splits : list of int or array, optional
        How many rows each rank of the set gets. Rows beyond their sum are not sent. Without
        `splits`, every rank gets the same number; so it must be in compiled functions.
    name, process_set : str, ProcessSet
        As for `allreduce`.

    Examples
    --------
    >>> rows = hvd.alltoall(jnp.arange(4))
    """
    array = arrays.checked(tensor, "alltoall")
    rows = arrays.static_splits(splits)
    call = _call(ALLTOALL, "alltoall", name, process_set, splits=rows)
    arrays.check_rows([array], call, "use array[None]")
    received, received_splits = arrays.in_parts(partial(carry_out, call), [array])
    return received if splits is None else (received, received_splits)


def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Combine `tensor` over all ranks and return this rank's rows of the result.

    The first dimension is split over the ranks in order; where it does not divide evenly, the first
    ranks get one row more. `op` is Average or Sum; the rest as for `allreduce`.

    >>> part = hvd.reducescatter(jnp.ones((4, 2)), op=hvd.Sum)
    """
    factors = prescale_factor, postscale_factor
    return _scattered("reducescatter", tensor, name, compression, op, process_set, factors)


def grouped_reducescatter(
    tensors: Any,
    name: str | None = None,
    compression: type[Compressor] = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Like `reducescatter`, which takes pytrees as well: Horovod's name for a list of arrays.

    >>> parts = hvd.grouped_reducescatter([jnp.ones((4, 2)), jnp.ones(2)], op=hvd.Sum)
    """
    factors = prescale_factor, postscale_factor
    return _scattered("grouped_reducescatter", tensors, name, compression, op, process_set, factors)


def _scattered(
    verb: str,
    tree: Any,
    name: str | None,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
) -> Any:
    leaves, structure = arrays.flattened(tree, verb)
    factors = arguments.check_factors(*factors, verb)
    chosen = arguments.check_scatter_op(op, verb)
    call = _call(REDUCESCATTER, verb, name, process_set, op=chosen, factors=factors)
    arrays.check_rows(leaves, call, "use allreduce")
    arrays.check_reducible(leaves, verb)
    results = compressed(
        compression, leaves, lambda packed: arrays.in_parts(partial(carry_out, call), packed)
    )
    return jax.tree_util.tree_unflatten(structure, results)


def barrier(value: Any = None, process_set: ProcessSet = global_process_set) -> Any:
    """Block until every rank has called `barrier`; return `value`.

    In a compiled function, only what depends on the result waits. So it needs a value there: all of
    the pytree is computed before the barrier, and used after it.

    Raises
    ------
    ValueError
        Without a value in a function that is being traced, where it would do nothing.

    Examples
    --------
    >>> hvd.barrier()
    >>> float(jax.jit(lambda x: hvd.barrier(x * 2) + 1)(1.0))
    3.0
    """
    members = check_member(process_set, "barrier")
    leaves, structure = jax.tree_util.tree_flatten(value)
    if not arrays.is_traced():
        jax.block_until_ready(leaves)
        control.barrier(members)
        return value
    if not leaves:
        raise ValueError(
            "barrier: in a compiled function nothing waits for it; pass the value that is to wait, "
            "as in x = hvd.barrier(x)"
        )
    call = _call(BARRIER, "barrier", None, process_set)
    *leaves, before = jax.lax.optimization_barrier((*leaves, jnp.zeros(())))
    (after,) = request(call, [before])
    *leaves, _ = jax.lax.optimization_barrier((*leaves, after))
    return jax.tree_util.tree_unflatten(structure, leaves)


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "reducescatter",
]
