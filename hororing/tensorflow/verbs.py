"""The verbs on TensorFlow tensors, in eager mode and in graphs. Their gradients: autograd.py.

Arguments that are Horovod's and have no meaning here: `device_dense` and `device_sparse` (the core
works in host memory, and TensorFlow copies what is on a GPU) and `ignore_name_scope` (default names
hold no scopes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

from hororing._engine import membership
from hororing._requests import arguments, control
from hororing._requests.arguments import Adasum, Average, Sum
from hororing._requests.compression import Compressor, NoneCompressor, check_compression, compressed
from hororing._requests.process_sets import (
    ProcessSet,
    check_member,
    global_process_set,
    rank_and_size,
)
from hororing.tensorflow._tensor import autograd
from hororing.tensorflow._tensor.names import request_name
from hororing.tensorflow._tensor.tensors import (
    check_devices,
    checked_list,
    checked_tensor,
    checked_weight,
    members,
    refuse_lone_parts,
)
from hororing.tensorflow.topology import at_run_time, size_op

F = TypeVar("F", bound=Callable[..., Any])


def _without_autograph(function: F) -> F:
    """Exclude a function without Python conditionals on tensors from AutoGraph."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


@_without_autograph
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    weight: Any = None,
) -> Any:
    """Combine `tensor` over all ranks and return the result, the same bits on every rank.

    Parameters
    ----------
    tensor : tensor
        A tensor or variable, of the same shape and type on every rank; or tf.IndexedSlices,
        whose rows are gathered (op is Average, which divides the values, or Sum).
    average : bool, optional
        Deprecated; True is op=Average, False op=Sum.
    compression : Compressor, optional
        How the tensor is sent, e.g. ``Compression.fp16``.
    op : ReduceOp, optional
        Average (the default), Sum, Min, Max, Product, or Adasum (floating point, among all
        ranks, whose number is a power of two). An average of integers is truncated toward zero;
        bool has no average.
    prescale_factor, postscale_factor : float, optional
        Applied to every rank's tensor, and to the result.
    name : str, optional
        Unique among tensors in flight; made from the graph, or from the order of eager calls,
        when omitted.
    process_set : ProcessSet, optional
        The ranks that take part; all of the job when omitted.
    device_dense, device_sparse, ignore_name_scope : str or bool, optional
        Accepted for Horovod's sake; no effect.
    weight : float or callable, optional
        With op=Average, of floats: the weight of this rank's tensor, such as its number of
        samples; a number, or a tensor of one element. The result is the sum of the ranks'
        tensors times their weights, divided by the sum of the weights. Tensors of weight 0 are
        ignored; if all weights are 0 the result is 0. Either all ranks pass a weight, or none
        does. A weight that is negative or not finite is a ValueError on every rank.

    Examples
    --------
    >>> mean = hvd.allreduce(weights, name="weights")
    >>> total = hvd.allreduce(tf.constant(3), op=hvd.Sum, name="correct")
    """
    check_devices(device_dense, device_sparse)
    chosen = arguments.choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        _refuse_weight(weight)
        factors = prescale_factor, postscale_factor
        return _allreduce_sparse(tensor, name, compression, chosen, factors, process_set)
    (result,) = _grouped_allreduce(
        "allreduce", [tensor], name, compression, chosen, (prescale_factor, postscale_factor),
        process_set, weight,
    )  # fmt: skip
    return result


def _refuse_weight(weight: Any) -> None:
    if weight is not None:
        raise NotImplementedError(
            "allreduce: weight cannot be used with tf.IndexedSlices; use tf.convert_to_tensor"
        )


def _allreduce_sparse(
    slices: tf.IndexedSlices,
    name: str | None,
    compression: type[Compressor],
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """Gather rows and their indices. One index may come from several ranks: it adds up."""
    if op not in (Average, Sum):
        raise NotImplementedError(
            f"allreduce: op={arguments.op_name(op)} is not defined for tf.IndexedSlices; use "
            "Average or Sum, or tf.convert_to_tensor"
        )
    if factors != (1.0, 1.0):
        raise NotImplementedError(
            "allreduce: prescale_factor and postscale_factor cannot be used with tf.IndexedSlices; "
            "scale its values, or use tf.convert_to_tensor"
        )
    call = autograd.Call(request_name("allreduce", name, process_set), process_set)
    values, indices = checked_tensor(slices.values, "allreduce"), slices.indices
    check_compression(compression)
    packed, context = compression.compress(values)
    all_values, all_indices = autograd.allgather(call, [packed, indices])
    return averaged_slices(
        compression.decompress(all_values, context), all_indices, slices, op, process_set
    )


def averaged_slices(
    values: tf.Tensor,
    indices: tf.Tensor,
    like: tf.IndexedSlices,
    op: int,
    process_set: ProcessSet,
) -> tf.IndexedSlices:
    """Return gathered slices; divided by the number of ranks if op is Average."""
    if op == Average:
        # In an elastic job, the number of ranks may change during the life of a graph.
        changes = membership.is_elastic() and process_set is global_process_set
        count = size_op() if changes else rank_and_size(process_set)[1]
        if values.dtype.is_integer:  # the quotient of the sum, not the sum of truncated quotients
            indices, at = tf.unique(indices)
            sums = tf.math.unsorted_segment_sum(tf.cast(values, tf.int64), at, tf.size(indices))
            values = tf.cast(tf.truncatediv(sums, tf.cast(count, tf.int64)), values.dtype)
        else:
            values = values / tf.cast(count, values.dtype)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def _grouped_allreduce(
    verb: str,
    tensors: Iterable[Any],
    name: str | None,
    compression: type[Compressor],
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
    weight: Any = None,
) -> list[tf.Tensor]:
    checked = checked_list(tensors, verb)
    factors = arguments.check_factors(*factors, verb)
    weight = checked_weight(weight, verb)
    if op == Adasum:
        arguments.check_adasum(check_member(process_set, verb), verb)
    call = autograd.Call(
        request_name(verb, name, process_set), process_set, op, factors, weight=weight
    )
    return compressed(compression, checked, partial(autograd.allreduce, call))


@_without_autograph
def grouped_allreduce(
    tensors: Iterable[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
    weight: Any = None,
) -> Any:
    """Like `allreduce`, for several tensors under one name: all or none of them.

    Types and shapes may differ within the group; tf.IndexedSlices among them are reduced beside
    it. Returns a list; an empty list or None is returned as it is.

    >>> mean, total = hvd.grouped_allreduce([weights, bias], name="both")
    """
    check_devices(device_dense, device_sparse)
    chosen = arguments.choose_op(op, average)
    results = [] if tensors is None else members(tensors)
    if not results:
        return tensors
    dense = [at for at, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    sparse = [at for at in range(len(results)) if at not in dense]
    factors = prescale_factor, postscale_factor
    if dense:
        reduced = _grouped_allreduce(
            "grouped_allreduce", [results[at] for at in dense], name, compression, chosen, factors,
            process_set, weight,
        )  # fmt: skip
        for at, tensor in zip(dense, reduced, strict=True):
            results[at] = tensor
    for at in sparse:
        _refuse_weight(weight)
        sparse_name = None if name is None else f"{name}.{at}"
        results[at] = _allreduce_sparse(
            results[at], sparse_name, compression, chosen, factors, process_set
        )
    return results


@_without_autograph
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    First dimensions may differ between ranks and may be 0; the others must be equal.

    >>> of_all = hvd.allgather(weights, name="weights")
    """
    (result,) = _gathered("allgather", [tensor], name, process_set)
    return result


@_without_autograph
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Like `allgather`, for several tensors under one name: all or none of them.

    >>> all_weights, all_biases = hvd.grouped_allgather([weights, bias], name="both")
    """
    return list(_gathered("grouped_allgather", tensors, name, process_set))


def _gathered(
    verb: str, tensors: Iterable[Any], name: str | None, process_set: ProcessSet
) -> tuple[tf.Tensor, ...]:
    checked = checked_list(tensors, verb)
    refuse_lone_parts(checked, verb)
    call = autograd.Call(request_name(verb, name, process_set), process_set)
    return autograd.allgather(call, checked)


@_without_autograph
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Return, on every rank, the tensor that rank `root_rank` passes.

    `tensor` has the same shape and type on every rank. `root_rank` counts among all ranks of the
    job, also within a process set.

    >>> first = hvd.broadcast(weights, root_rank=0, name="weights")
    """
    root_rank = arguments.check_root(root_rank, "broadcast")
    checked = checked_list([tensor], "broadcast")
    call = autograd.Call(request_name("broadcast", name, process_set), process_set, root=root_rank)
    (result,) = autograd.broadcast(call, checked)
    return result


@_without_autograph
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank, and return the rows that all ranks sent here.

    The rows come in the order of the ranks that sent them. With `splits`, the result is a pair: the
    rows, and how many came from each rank, as int32.

    Parameters
    ----------
    tensor : tensor
        Rows for rank 0, then those for rank 1, ...; ranks may differ in the first dimension.
    splits : sequence of int, optional
        How many rows each rank of the set gets: a list, or a one-dimensional tensor of int32.
        Rows beyond their sum are not sent. Without `splits`, every rank gets the same number.

    Examples
    --------
    >>> rows = hvd.alltoall(weights, name="rows")
    """
    checked = checked_list([tensor], "alltoall")
    refuse_lone_parts(checked, "alltoall")
    rows = None if splits is None else _checked_splits(splits)
    call = autograd.Call(request_name("alltoall", name, process_set), process_set)
    received, received_splits = autograd.alltoall(call, rows, checked)
    return received if splits is None else (received, received_splits)


def _checked_splits(splits: Any) -> tf.Tensor:
    if isinstance(splits, (tf.Tensor, tf.Variable, np.ndarray)):
        tensor = tf.convert_to_tensor(splits)
        dimensions = 1 if tensor.shape.rank is None else tensor.shape.rank
        arguments.check_splits([], dimensions, tensor.dtype.name)
        return tf.cast(tensor, tf.int64)
    numbers = arguments.check_splits(splits)
    try:
        return tf.constant(numbers, tf.int64)
    except (ValueError, OverflowError):  # far beyond any number of rows
        raise ValueError(f"alltoall: splits {numbers} are out of range") from None


@_without_autograph
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> tf.Tensor:
    """Combine `tensor` over all ranks and return this rank's rows of the result.

    The first dimension is split over the ranks in order; where it does not divide evenly, the first
    ranks get one row more. `op` is Average or Sum; the rest as for `allreduce`.

    >>> part = hvd.reducescatter(weights, op=hvd.Sum, name="weights")
    """
    check_devices(device_dense)
    factors = prescale_factor, postscale_factor
    (result,) = _scattered("reducescatter", [tensor], name, compression, op, process_set, factors)
    return result


@_without_autograph
def grouped_reducescatter(
    tensors: Iterable[Any],
    device_dense: str = "",
    compression: type[Compressor] = NoneCompressor,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[tf.Tensor]:
    """Like `reducescatter`, for several tensors under one name: all or none of them.

    >>> parts = hvd.grouped_reducescatter([weights, bias], op=hvd.Sum, name="both")
    """
    check_devices(device_dense)
    factors = prescale_factor, postscale_factor
    return _scattered("grouped_reducescatter", tensors, name, compression, op, process_set, factors)


def _scattered(
    verb: str,
    tensors: Iterable[Any],
    name: str | None,
    compression: type[Compressor],
    op: int,
    process_set: ProcessSet,
    factors: tuple[float, float],
) -> list[tf.Tensor]:
    checked = checked_list(tensors, verb)
    factors = arguments.check_factors(*factors, verb)
    op = arguments.check_scatter_op(op, verb)
    if any(tensor.shape.rank == 0 for tensor in checked):
        raise ValueError(
            f"{verb}: a tensor without dimensions has no rows to scatter; use allreduce"
        )
    call = autograd.Call(request_name(verb, name, process_set), process_set, op, factors)
    return compressed(compression, checked, partial(autograd.reducescatter, call))


@_without_autograph
def join() -> tf.Tensor:
    """Block until every rank has called `join`; return the last one to do so, as int32.

    Until then this rank takes part in what the others allreduce, with values that leave theirs as
    they are (docs/uneven_data.md).

    >>> last = hvd.join()
    """
    return at_run_time(control.join, "join")


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "reducescatter",
]
