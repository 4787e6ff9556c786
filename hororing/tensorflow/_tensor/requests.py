"""The boundary between TensorFlow and the core: requests in, result tensors out.

All requests of one `carry_out` are in flight together, and the rest of the graph continues
meanwhile: each is submitted as soon as its tensors exist, and one operation waits for all. Eager
mode works in the same way, but there Python waits, so Ctrl-C works and errors are hororing's own
exceptions. In graphs they are TensorFlow's, with the same text.

XLA cannot compile our operations.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import tensorflow as tf

from hororing import errors
from hororing._engine import membership, state
from hororing._engine.core import error_for
from hororing._requests import arguments
from hororing._requests import handles as request_handles
from hororing._requests.arguments import Average, Sum
from hororing._requests.handles import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from hororing._requests.names import encode_name, note_submitted
from hororing._requests.process_sets import (
    ProcessSet,
    check_member,
    global_process_set,
    rank_and_size,
)
from hororing._requests.verbs.reducescatter import rows_of
from hororing.tensorflow._tensor import ordering  # noqa: F401  # graphs whose requests have the same names
from hororing.tensorflow._tensor.errors import as_both
from hororing.tensorflow._tensor.names import unique_in_graph
from hororing.tensorflow._tensor.plugin import operations
from hororing.tensorflow._tensor.tensors import PARTS, as_parts, from_parts

T = TypeVar("T")


class Request(NamedTuple):
    """One request of the core. Several tensors are a group: all of them or none."""

    collective: int  # one of collectives.ALLREDUCE, ALLGATHER, BROADCAST, ALLTOALL, REDUCESCATTER
    name: str
    tensors: Sequence[tf.Tensor]
    process_set: ProcessSet = global_process_set
    op: int = Sum
    factors: tuple[float, float] = (1.0, 1.0)  # prescale, postscale
    root: int = 0
    splits: tf.Tensor | None = None  # int64, one-dimensional; of an alltoall
    weight: tf.Tensor | None = None  # float64, of shape [1]; of a weighted average

    @property
    def result_dtypes(self) -> list[tf.DType]:
        """Types of the results: those of the tensors, and int32 for received splits."""
        dtypes = [tensor.dtype for tensor in self.tensors]
        return [*dtypes, tf.int32] if self.collective == ALLTOALL else dtypes

    def result_shapes(self) -> list[tf.TensorShape]:
        """Return the shapes of the results as far as they are known in advance."""
        shapes = [tensor.shape for tensor in self.tensors]
        if self.collective in (ALLREDUCE, BROADCAST):
            return shapes
        rank, size = rank_and_size(self.process_set)
        changes = membership.is_elastic()  # the number of ranks may change while a graph lives
        return [
            *(self._rows(shape, rank, 0 if changes else size) for shape in shapes),
            *([tf.TensorShape([None if changes else size])] if self.collective == ALLTOALL else []),
        ]

    def _rows(self, shape: tf.TensorShape, rank: int, size: int) -> tf.TensorShape:
        if not shape.rank:  # unknown, or wrong, which the core reports
            return tf.TensorShape(None)
        known = size and self.collective == REDUCESCATTER and shape[0] is not None
        return tf.TensorShape([rows_of(shape[0], size, rank) if known else None]) + shape[1:]


def carry_out(requests: Sequence[Request]) -> list[list[tf.Tensor]]:
    """Submit all requests, wait for all, and return the results of each.

    In a graph this adds the operations that do it. Not differentiable. ValueError if an operation
    is not defined for complex numbers.
    """
    whole, requests = requests, [_in_parts(each) for each in requests]
    eager = tf.executing_eagerly()
    if not eager:
        _refuse_xla(requests[0].name)
        requests = [
            each._replace(name=unique_in_graph(each.name, each.process_set)) for each in requests
        ]
    flat = _convert_error(lambda: _eagerly(requests)) if eager else _in_graph(requests)
    return [
        [from_parts(*pair) for pair in zip(results, request.result_dtypes, strict=True)]
        for request, results in zip(whole, _regrouped(requests, iter(flat)), strict=True)
    ]


def _in_parts(request: Request) -> Request:
    """Return the request as the core takes it, which has no complex numbers."""
    if request.op not in (Average, Sum):
        for tensor in request.tensors:
            if tensor.dtype in PARTS:
                raise ValueError(
                    f"'{request.name}': op={arguments.op_name(request.op)} is not defined for "
                    f"{tensor.dtype.name}; use Average or Sum"
                )
    return request._replace(tensors=[as_parts(tensor) for tensor in request.tensors])


def _regrouped(requests: Sequence[Request], flat: Iterator[tf.Tensor]) -> list[list[tf.Tensor]]:
    results = []
    for request in requests:
        mine = list(islice(flat, len(request.result_dtypes)))
        for tensor, shape in zip(mine, request.result_shapes(), strict=True):
            if not tf.executing_eagerly():
                tensor.set_shape(shape)
        results.append(mine)
    return results


def _in_graph(requests: Sequence[Request]) -> list[tf.Tensor]:
    token = _token()
    sets = {id(each.process_set): each for each in requests}
    numbers = {key: _number_in_graph(token, each) for key, each in sets.items()}
    handles = [_submit(token, each, numbers[id(each.process_set)]) for each in requests]
    # Waits of a graph run one after the other, in program order. TensorFlow ensures that, except in
    # functions that a tape makes. (Calls of functions: hororing/tensorflow/_tensor/ordering.py.)
    graph = tf.compat.v1.get_default_graph()
    name = getattr(graph, "name", "")  # graphs of sessions have none
    if not name.startswith("__backward_") or graph._add_control_dependencies:
        return _wait(requests, handles)
    with tf.control_dependencies(graph.control_outputs[-1:]):
        results = _wait(requests, handles)
    graph.control_outputs.append(results[0].op)
    return results


def _number_in_graph(token: tf.Tensor, request: Request) -> tf.Tensor:
    """The number of the request's process set, which may change during the life of a graph."""
    process_set, name = request.process_set, request.name
    number = check_member(process_set, name)
    changes = membership.is_elastic() or state.process_sets_are_dynamic()
    if process_set is global_process_set or not changes:
        return tf.constant(number, tf.int64)
    # A stateful operation would wait for earlier ones, and ranks for each other. The token is an
    # input because TensorFlow evaluates stateless operations of constants in advance.
    current = tf.numpy_function(
        lambda _: np.int64(check_member(process_set, name)), [token], tf.int64, stateful=False
    )
    return tf.ensure_shape(current, [])


def _token() -> tf.Tensor:
    """The token that all requests of this graph share.

    Steps and waits run one after the other, like stateful operations. With a step each, requests
    would wait for earlier ones, and so would ranks for each other if their orders differ.
    """
    graph = tf.compat.v1.get_default_graph()
    # A branch or a loop of TensorFlow 1 is part of its graph, but its tensors stay within it.
    context = graph._get_control_flow_context()
    for token in graph.get_collection("hororing_step"):
        if token.graph is graph and token.op._get_control_flow_context() is context:
            return token
    # XLA, which cannot compile it, names it in its error.
    token = operations.hororing_step(name="HororingStep_needs_jit_compile_False")
    graph.add_to_collection("hororing_step", token)
    return token


def _eagerly(requests: Sequence[Request]) -> list[tf.Tensor]:
    token = _constant(0, tf.int64)
    alone = len(requests) == 1
    handles = []
    for each in requests:
        number = _constant(check_member(each.process_set, each.name), tf.int64)
        handles.append(_submit(token, each, number, blocking=alone))
        note_submitted(each.name)
    for handle in handles:
        request_handles.block_until_complete(int(handle))
    return _wait(requests, handles)


def _submit(
    token: tf.Tensor, request: Request, set_number: tf.Tensor, *, blocking: bool = False
) -> tf.Tensor:
    root = request.root
    if not -(2**31) <= root < 2**31:  # the core's integers
        raise ValueError(f"'{request.name}': root rank {root} is out of range")
    dtypes = [tensor.dtype for tensor in request.tensors]
    preallocated = request.collective not in (ALLGATHER, ALLTOALL)
    splits = request.splits
    with tf.device("CPU:0"):
        return operations.hororing_submit(
            token=token,
            process_set=set_number,
            factors=_factors(request),
            splits=_constant((), tf.int64) if splits is None else splits,
            request_name=tf.constant(np.frombuffer(encode_name(request.name), np.uint8)),
            tensors=request.tensors,
            P=dtypes if preallocated else [],
            collective=request.collective,
            op=request.op,
            root=root,
            has_splits=splits is not None,
            blocking=blocking,
            awaits_abandoned=not tf.executing_eagerly(),
        ).handle


def _factors(request: Request) -> tf.Tensor:
    factors = _constant(request.factors, tf.float64)
    if request.weight is None:
        return factors
    return tf.concat([factors, request.weight], 0)


def _constant(value: Any, dtype: tf.DType) -> tf.Tensor:
    return _kept(value, dtype) if tf.executing_eagerly() else tf.constant(value, dtype)


@functools.lru_cache(maxsize=64)
def _kept(value: Any, dtype: tf.DType) -> tf.Tensor:
    """Return an eager constant; making one would cost a large part of a call."""
    with tf.device("CPU:0"):
        return tf.constant(value, dtype)


def _wait(requests: Sequence[Request], handles: list[tf.Tensor]) -> list[tf.Tensor]:
    dtypes = [dtype for request in requests for dtype in request.result_dtypes]
    with tf.device("CPU:0"):
        return list(operations.hororing_wait(handles=handles, R=dtypes))


_FAILURE: Final = re.compile(r"\w+Error: (.*?) \[hororing (\d+) (-?\d+)\]", re.DOTALL)


def convert_error(error: Exception) -> Exception | None:
    """Convert an error of TensorFlow to ours; None if it is not from the core.

    csrc/tensorflow/kernels.cc writes the text; graphs add the location.
    """
    if not isinstance(error, tf.errors.OpError) or isinstance(error, errors.HororingInternalError):
        return error
    failure = _FAILURE.search(error.message)
    if failure is None:
        return None
    text, code, rank = failure.groups()
    return error_for(int(code), text, int(rank))


def _convert_error(call: Callable[[], T]) -> T:
    """Raise the core's failure as our exception."""
    try:
        return call()
    except (tf.errors.OpError, ValueError) as error:  # the latter of the wait
        ours = convert_error(error)
        if ours is None:
            raise
    raise as_both(ours)


def _refuse_xla(name: str) -> None:
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        context = graph._get_control_flow_context()
        while context is not None:
            if context.IsXLAContext():
                raise ValueError(
                    f"'{name}': XLA cannot compile communication between processes; use "
                    "jit_compile=False (in model.compile, in tf.function), and tf.function("
                    "jit_compile=True) around the computation only"
                )
            context = context.outer_context
        graph = getattr(graph, "outer_graph", None)
