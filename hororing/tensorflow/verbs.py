"""The verbs on TensorFlow tensors, in eager mode and in graphs.

Gradients are those of torch's verbs (hororing/torch/autograd.py): an allreduce's is reduced like
it; an allgather's is averaged, and each rank takes its own rows; a broadcast's is averaged on the
root and zero elsewhere; rows of an alltoall go back to where they came from; those of a
reducescatter are gathered.

Arguments that are Horovod's and have no meaning here: `device_dense` and `device_sparse` (the core
works in host memory, and TensorFlow copies what is on a GPU) and `ignore_name_scope` (default names
hold no scopes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hororing import arguments, collectives, runtime
from hororing.arguments import Adasum, Average, Sum
from hororing.collectives import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from hororing.compression import Compressor, NoneCompressor, check_compression
from hororing.names import take_back
from hororing.process_sets import ProcessSet, check_member, global_process_set, ids_and_ranks
from hororing.tensorflow.names import request_name
from hororing.tensorflow.requests import Request, carry_out
from hororing.verbs import place_and_size

# Complex numbers travel as pairs of these.
_PARTS: Final = {tf.complex64: tf.float32, tf.complex128: tf.float64}


F = TypeVar("F", bound=Callable[..., Any])


def _as_it_is(function: F) -> F:
    """Spare AutoGraph the search for Python conditionals on tensors: there are none here."""
    return tf.autograph.experimental.do_not_convert(function)  # type: ignore[no-any-return]


# -- tensors -------------------------------------------------------------------------------------


def checked_tensor(tensor: Any, verb: str) -> tf.Tensor:
    """Return what was given as a tensor that the core can take."""
    if isinstance(tensor, (tf.SparseTensor, tf.RaggedTensor, tf.IndexedSlices)):
        remedy = (
            "use tf.sparse.to_dense" if isinstance(tensor, tf.SparseTensor)
            else "use tensor.to_tensor()" if isinstance(tensor, tf.RaggedTensor)
            else "use allreduce, or tf.convert_to_tensor"
        )  # fmt: skip
        text = f"{verb}: {type(tensor).__name__} is not supported; {remedy}"
        if isinstance(tensor, tf.IndexedSlices):
            raise NotImplementedError(text)
        raise ValueError(text)
    if isinstance(tensor, (str, bytes)) or tensor is None:
        raise TypeError(f"{verb} takes tensors, not {type(tensor).__name__}")
    tensor = tf.convert_to_tensor(tensor)
    if tensor.dtype not in _PARTS and tensor.dtype.name not in collectives.DTYPES:
        raise ValueError(
            f"{verb}: tensors of type {tensor.dtype.name} are not supported; cast it, or use one "
            f"of {', '.join([*collectives.DTYPES, *(dtype.name for dtype in _PARTS)])}"
        )
    return tensor


def _members(tensors: Iterable[Any]) -> list[Any]:
    """The tensors of a group; one tensor is the group of its rows."""
    # A tensor of a graph cannot be iterated over.
    return tf.unstack(tensors) if isinstance(tensors, (tf.Tensor, tf.Variable)) else list(tensors)


def _checked_list(tensors: Iterable[Any], verb: str) -> list[tf.Tensor]:
    checked = [checked_tensor(tensor, verb) for tensor in _members(tensors)]
    if not checked:
        raise ValueError(f"{verb}: there are no tensors; pass at least one")
    return checked


def _as_parts(tensor: tf.Tensor) -> tf.Tensor:
    return tf.bitcast(tensor, _PARTS[tensor.dtype]) if tensor.dtype in _PARTS else tensor


def _from_parts(tensor: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    return tf.bitcast(tensor, dtype) if dtype in _PARTS else tensor


# -- requests with gradients -----------------------------------------------------------------------


class _Call(NamedTuple):
    """What is asked of a verb, beside the tensors."""

    name: str
    process_set: ProcessSet
    op: int = Average
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0

    def request(
        self, collective: int, tensors: Sequence[tf.Tensor], splits: Any = None
    ) -> tuple[tf.Tensor, ...]:
        """Carry it out for these tensors, which may be complex."""
        parts = [_as_parts(tensor) for tensor in tensors]
        name, process_set, op, factors, root = self
        (results,) = carry_out(
            [Request(collective, name, parts, process_set, op, factors, root, splits)]
        )
        whole = [
            _from_parts(result, tensor.dtype)
            for result, tensor in zip(results, tensors, strict=False)
        ]
        return (*whole, *results[len(whole) :])

    def backward(self, **changes: Any) -> _Call:
        """Ask the same of the gradients."""
        return self._replace(name=f"{self.name}.grad", **changes)


Forward = Callable[[Sequence[tf.Tensor]], tuple[tf.Tensor, ...]]
# Gradients of the differentiable results in, gradients of the differentiable tensors out.
Backward = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


def _recorded(
    call: _Call, forward: Forward, backward: Backward, tensors: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    """Return `forward(tensors)`, differentiable where the tensors are numbers with gradients."""
    smooth = [index for index, tensor in enumerate(tensors) if _is_smooth(tensor)]
    try:
        if not smooth:
            return forward(tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def recorded(*given: tf.Tensor) -> Any:
            together = list(tensors)
            for index, tensor in zip(smooth, given, strict=True):
                together[index] = tensor
            results = forward(together)
            recorded_results = [at for at, result in enumerate(results) if _is_smooth(result)]

            def gradient(*upstream: tf.Tensor) -> Any:
                return list(
                    backward([tf.convert_to_tensor(upstream[at]) for at in recorded_results])
                )

            return results, gradient

        return tuple(recorded(*(tensors[index] for index in smooth)))
    except BaseException:
        take_back(call.name)
        raise


def _is_smooth(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def _allreduce(call: _Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    if call.op not in (Average, Sum):
        for tensor in tensors:
            if tensor.dtype in _PARTS:
                raise ValueError(
                    f"'{call.name}': op={arguments.op_name(call.op)} is not defined for "
                    f"{tensor.dtype.name}; use Average or Sum"
                )
    return _recorded(
        call, partial(call.request, ALLREDUCE), partial(_allreduce, call.backward()), tensors
    )


def _allgather(call: _Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    smooth = [tensor for tensor in tensors if _is_smooth(tensor)]

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        whole = _allreduce(call.backward(op=Average), gradients)
        mine = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in smooth])
        # rows[r][i]: rows of tensor i on rank r
        (rows,) = _Call(f"{call.name}.rows", call.process_set).request(ALLGATHER, [mine[None]])
        place, _ = place_and_size(call.process_set)
        before = tf.reduce_sum(rows[:place], 0)
        return [
            gradient[before[index] : before[index] + mine[index]]
            for index, gradient in enumerate(whole)
        ]

    return _recorded(call, partial(call.request, ALLGATHER), backward, tensors)


def _broadcast(call: _Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        (averaged,) = _allreduce(call.backward(op=Average), gradients)
        return [averaged if runtime.rank() == call.root else tf.zeros_like(averaged)]

    return _recorded(call, partial(call.request, BROADCAST), backward, tensors)


def _alltoall(
    call: _Call, splits: tf.Tensor | None, tensors: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    (tensor,) = tensors
    received_splits: list[tf.Tensor] = []

    def forward(given: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        results = call.request(ALLTOALL, given, splits)
        received_splits[:] = results[1:]
        return results

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        back = tf.cast(received_splits[0], tf.int64)
        returned, _ = _alltoall(call.backward(), back, gradients)
        not_sent = tf.shape(tensor)[0] - tf.shape(returned)[0]
        zeros = tf.zeros(tf.concat([[not_sent], tf.shape(returned)[1:]], 0), returned.dtype)
        return [tf.ensure_shape(tf.concat([returned, zeros], 0), tensor.shape)]

    return _recorded(call, forward, backward, tensors)


def _reducescatter(call: _Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    def backward(gradients: list[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        factor = call.factors[0] * call.factors[1]
        if call.op == Sum:
            factor *= place_and_size(call.process_set)[1]
        mine = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return _allgather(call.backward(factors=(1.0, 1.0)), mine)

    return _recorded(call, partial(call.request, REDUCESCATTER), backward, tensors)


# -- the verbs -------------------------------------------------------------------------------------


def _compressed(
    compression: type[Compressor],
    tensors: Sequence[tf.Tensor],
    call: Callable[[Sequence[tf.Tensor]], tuple[tf.Tensor, ...]],
) -> list[tf.Tensor]:
    check_compression(compression)
    packed = [compression.compress(tensor) for tensor in tensors]
    results = call([tensor for tensor, _ in packed])
    return [
        compression.decompress(result, context)
        for result, (_, context) in zip(results, packed, strict=True)
    ]


def check_devices(*devices: str) -> None:
    for device in devices:
        if not isinstance(device, str):
            raise TypeError(f"a device must be a str, not {type(device).__name__} ({device!r})")


@_as_it_is
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
) -> Any:
    """Combine `tensor` over all ranks and return the result, the same bits on every rank.

    Parameters
    ----------
    tensor : a tensor or variable, of the same shape and type on every rank; or tf.IndexedSlices,
        whose rows are gathered (op is Average, which divides the values, or Sum).
    average : deprecated; True is op=Average, False op=Sum.
    compression : how the tensor travels, e.g. ``Compression.fp16``.
    op : Average (the default), Sum, Min, Max, Product, or Adasum (floating point, among all ranks,
        whose number is a power of two). An average of integers is truncated toward zero; bool has
        no average.
    prescale_factor, postscale_factor : applied to every rank's tensor, and to the result.
    name : unique among tensors in flight; made from the graph, or from the order of eager calls,
        when omitted.
    process_set : the ranks that take part; all of the job when omitted.
    device_dense, device_sparse, ignore_name_scope : Horovod's, of no effect here.
    """
    check_devices(device_dense, device_sparse)
    chosen = arguments.choose_op(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        factors = prescale_factor, postscale_factor
        return _allreduce_sparse(tensor, name, compression, chosen, factors, process_set)
    (result,) = _grouped_allreduce(
        "allreduce", [tensor], name, compression, chosen, (prescale_factor, postscale_factor),
        process_set,
    )  # fmt: skip
    return result


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
            "allreduce: there is no prescale_factor and no postscale_factor for tf.IndexedSlices; "
            "scale its values, or use tf.convert_to_tensor"
        )
    call = _Call(request_name("allreduce", name, process_set), process_set)
    values, indices = checked_tensor(slices.values, "allreduce"), slices.indices
    check_compression(compression)
    packed, context = compression.compress(values)
    all_values, all_indices = _allgather(call, [packed, indices])
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
    """What was gathered, as slices; divided by the number of ranks where op is Average."""
    if op == Average:
        values = values / tf.cast(place_and_size(process_set)[1], values.dtype)
    return tf.IndexedSlices(values, indices, like.dense_shape)


def _grouped_allreduce(
    verb: str,
    tensors: Iterable[Any],
    name: str | None,
    compression: type[Compressor],
    op: int,
    factors: tuple[float, float],
    process_set: ProcessSet,
) -> list[tf.Tensor]:
    checked = _checked_list(tensors, verb)
    factors = arguments.check_factors(*factors, verb)
    if op == Adasum:
        arguments.check_adasum(check_member(process_set, verb), verb)
    call = _Call(request_name(verb, name, process_set), process_set, op, factors)
    return _compressed(compression, checked, partial(_allreduce, call))


@_as_it_is
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
) -> Any:
    """Do as `allreduce` for several tensors under one name, all or none of them.

    Types and shapes may differ within the group; tf.IndexedSlices among them are reduced beside
    it. Returns a list; an empty list or None is returned as it is.
    """
    check_devices(device_dense, device_sparse)
    chosen = arguments.choose_op(op, average)
    results = [] if tensors is None else _members(tensors)
    if not results:
        return tensors
    dense = [at for at, each in enumerate(results) if not isinstance(each, tf.IndexedSlices)]
    sparse = [at for at in range(len(results)) if at not in dense]
    factors = prescale_factor, postscale_factor
    if dense:
        reduced = _grouped_allreduce(
            "grouped_allreduce", [results[at] for at in dense], name, compression, chosen, factors,
            process_set,
        )  # fmt: skip
        for at, tensor in zip(dense, reduced, strict=True):
            results[at] = tensor
    for at in sparse:
        sparse_name = None if name is None else f"{name}.{at}"
        results[at] = _allreduce_sparse(
            results[at], sparse_name, compression, chosen, factors, process_set
        )
    return results


@_as_it_is
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> tf.Tensor:
    """Concatenate the tensors of all ranks along the first dimension, in rank order.

    First dimensions may differ between ranks and may be 0; the others must be equal.
    """
    (result,) = _gathered("allgather", [tensor], name, process_set)
    return result


@_as_it_is
def grouped_allgather(
    tensors: Iterable[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[tf.Tensor]:
    """Do as `allgather` for several tensors under one name, all or none of them."""
    return list(_gathered("grouped_allgather", tensors, name, process_set))


def _gathered(
    verb: str, tensors: Iterable[Any], name: str | None, process_set: ProcessSet
) -> tuple[tf.Tensor, ...]:
    checked = _checked_list(tensors, verb)
    _refuse_lone_parts(checked, verb)
    return _allgather(_Call(request_name(verb, name, process_set), process_set), checked)


def _refuse_lone_parts(tensors: Sequence[tf.Tensor], verb: str) -> None:
    # A number alone is a row of two parts to the core, which must not be split.
    if any(tensor.dtype in _PARTS and tensor.shape.rank == 0 for tensor in tensors):
        raise ValueError(f"{verb}: a tensor without dimensions has no rows; use tf.reshape(x, [1])")


@_as_it_is
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
    """
    root_rank = arguments.check_root(root_rank, "broadcast")
    checked = _checked_list([tensor], "broadcast")
    call = _Call(request_name("broadcast", name, process_set), process_set, root=root_rank)
    (result,) = _broadcast(call, checked)
    return result


@_as_it_is
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank, and return the rows that all ranks sent here.

    Parameters
    ----------
    tensor : rows for rank 0, then those for rank 1, ...; ranks may differ in the first dimension.
    splits : how many rows each rank of the set gets: a list, or a one-dimensional tensor of int32.
        Rows beyond their sum are not sent. Equally many when omitted.

    Returns the rows in the order of the ranks they come from; with `splits`, also how many came
    from each, as int32.
    """
    checked = _checked_list([tensor], "alltoall")
    _refuse_lone_parts(checked, "alltoall")
    rows = None if splits is None else _checked_splits(splits)
    call = _Call(request_name("alltoall", name, process_set), process_set)
    received, received_splits = _alltoall(call, rows, checked)
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


@_as_it_is
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
    """
    check_devices(device_dense)
    factors = prescale_factor, postscale_factor
    (result,) = _scattered("reducescatter", [tensor], name, compression, op, process_set, factors)
    return result


@_as_it_is
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
    """Do as `reducescatter` for several tensors under one name, all or none of them."""
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
    checked = _checked_list(tensors, verb)
    factors = arguments.check_factors(*factors, verb)
    arguments.check_scatter_op(op, verb)
    if any(tensor.shape.rank == 0 for tensor in checked):
        raise ValueError(
            f"{verb}: a tensor without dimensions has no rows to scatter; use allreduce"
        )
    call = _Call(request_name(verb, name, process_set), process_set, op, factors)
    return _compressed(compression, checked, partial(_reducescatter, call))


@_as_it_is
def join() -> tf.Tensor:
    """Block until every rank has called `join`; return the last one to do so, as int32.

    Until then this rank takes part in what the others allreduce, with values that leave theirs as
    they are (docs/uneven_data.md).
    """
    if tf.executing_eagerly():
        return tf.constant(collectives.join(), tf.int32)
    return _at_run_time(collectives.join, "join")


# -- the topology, asked when the graph runs -------------------------------------------------------


def _at_run_time(answer: Callable[[], int], name: str | None) -> tf.Tensor:
    if tf.executing_eagerly():
        return tf.constant(answer(), tf.int32)
    result = tf.numpy_function(lambda: np.int32(answer()), [], tf.int32, name=name)
    result.set_shape([])
    return result


def _set_of(process_set_id: int) -> list[int]:
    sets = ids_and_ranks()
    if process_set_id not in sets:
        raise ValueError(f"there is no process set {process_set_id}; there are {sorted(sets)}")
    return sets[process_set_id]


def rank_op(name: str | None = None) -> tf.Tensor:
    """`rank()` when the graph runs, not when it is built. (An elastic job changes it.)"""
    return _at_run_time(runtime.rank, name)


def local_rank_op(name: str | None = None) -> tf.Tensor:
    """`local_rank()` when the graph runs."""
    return _at_run_time(runtime.local_rank, name)


def local_size_op(name: str | None = None) -> tf.Tensor:
    """`local_size()` when the graph runs."""
    return _at_run_time(runtime.local_size, name)


def size_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Return the number of ranks of a process set when the graph runs."""
    return _at_run_time(lambda: len(_set_of(process_set_id)), name)


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> tf.Tensor:
    """Whether this rank is in a process set when the graph runs: 1 or 0."""
    return _at_run_time(lambda: int(runtime.rank() in _set_of(process_set_id)), name)


__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "broadcast",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]
