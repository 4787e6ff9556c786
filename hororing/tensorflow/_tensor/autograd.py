"""The gradients of the verbs, like those for torch (hororing/torch/_tensor/autograd.py).

The gradient of an allreduce is reduced like it; that of a weighted one is the sum times the rank's
share. That of an allgather is averaged, and each rank takes its own rows. That of a broadcast is
averaged on the root and zero elsewhere. Rows of an alltoall go back to their senders; those of a
reducescatter are gathered.

Arguments have been checked, and tensors are as they are sent, for example compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.eager.record import stop_recording
from tensorflow.python.ops.gradients_util import PossibleTapeGradientTypes

from hororing._engine import membership
from hororing._requests.arguments import Average, Sum
from hororing._requests.handles import ALLGATHER, ALLREDUCE, ALLTOALL, BROADCAST, REDUCESCATTER
from hororing._requests.names import naming
from hororing._requests.process_sets import ProcessSet, global_process_set, rank_and_size
from hororing.tensorflow._tensor.requests import Request, carry_out
from hororing.tensorflow.topology import at_run_time


class Call(NamedTuple):
    """The arguments of a verb, besides the tensors."""

    name: str
    process_set: ProcessSet
    op: int = Average
    factors: tuple[float, float] = (1.0, 1.0)
    root: int = 0
    weight: tf.Tensor | None = None

    def request(
        self, collective: int, tensors: Sequence[tf.Tensor], splits: Any = None
    ) -> tuple[tf.Tensor, ...]:
        """Carry it out for these tensors."""
        name, process_set, op, factors, root, weight = self
        (results,) = carry_out(
            [Request(collective, name, tensors, process_set, op, factors, root, splits, weight)]
        )
        return tuple(results)

    def backward(self, **changes: Any) -> Call:
        """Return the same call for the gradients."""
        return self._replace(name=f"{self.name}.grad", **changes)


Forward = Callable[[Sequence[tf.Tensor]], tuple[tf.Tensor, ...]]
# Gradients of the differentiable results in, gradients of the differentiable tensors out.
Backward = Callable[[list[tf.Tensor]], Sequence[tf.Tensor]]


def _recorded(
    call: Call, forward: Forward, backward: Backward, tensors: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    """Return `forward(tensors)`, differentiable where the tensors are numbers with gradients."""
    smooth = [index for index, tensor in enumerate(tensors) if _is_smooth(tensor)]
    with naming(call.name):
        if not smooth or not _may_need_gradients(tensors):
            return forward(tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def recorded(*given: tf.Tensor) -> Any:
            together = list(tensors)
            for index, tensor in zip(smooth, given, strict=True):
                together[index] = tensor
            # In eager mode a ForwardAccumulator would also record the operations within.
            with stop_recording() if tf.executing_eagerly() else nullcontext():
                results = forward(together)
            recorded_results = [at for at, result in enumerate(results) if _is_smooth(result)]

            def gradient(*upstream: tf.Tensor) -> Any:
                return list(
                    backward([tf.convert_to_tensor(upstream[at]) for at in recorded_results])
                )

            return results, gradient

        return tuple(recorded(*(tensors[index] for index in smooth)))


def _may_need_gradients(tensors: Sequence[tf.Tensor]) -> bool:
    """Whether a tape may want gradients. If none is active, an eager call takes half the time."""
    return not tf.executing_eagerly() or bool(PossibleTapeGradientTypes(tensors))


def _rank(process_set: ProcessSet) -> Any:
    return _current(lambda: rank_and_size(process_set)[0])


def _size(process_set: ProcessSet) -> Any:
    return _current(lambda: rank_and_size(process_set)[1])


def _current(answer: Callable[[], int]) -> Any:
    """Return `answer()`; in an elastic job, as of when a graph runs, whose ranks change."""
    return at_run_time(answer) if membership.is_elastic() else answer()


def _is_smooth(tensor: tf.Tensor) -> bool:
    return bool(tensor.dtype.is_floating or tensor.dtype.is_complex)


def allreduce(call: Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Combine tensors over the ranks."""
    backward: Backward = partial(allreduce, call.backward())
    if call.weight is not None:
        backward = partial(_weighted_backward, call)
    return _recorded(call, partial(call.request, ALLREDUCE), backward, tensors)


def _weighted_backward(call: Call, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
    """Return the sum, times this rank's share of the weights."""
    whole = Call(f"{call.name}.weight", call.process_set, Sum)
    (total,) = whole.request(ALLREDUCE, [call.weight])
    share = tf.math.divide_no_nan(call.weight, total)[0]
    sums = allreduce(call.backward(op=Sum, weight=None), gradients)
    return [each * tf.cast(share, each.dtype) for each in sums]


def allgather(call: Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Concatenate the tensors of all ranks."""
    smooth = [tensor for tensor in tensors if _is_smooth(tensor)]

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        whole = allreduce(call.backward(op=Average), gradients)
        mine = tf.stack([tf.shape(tensor, tf.int64)[0] for tensor in smooth])
        # rows[r][i]: rows of tensor i on rank r
        (rows,) = Call(f"{call.name}.rows", call.process_set).request(ALLGATHER, [mine[None]])
        rank = _rank(call.process_set)
        before = tf.reduce_sum(rows[:rank], 0)
        return [
            gradient[before[index] : before[index] + mine[index]]
            for index, gradient in enumerate(whole)
        ]

    return _recorded(call, partial(call.request, ALLGATHER), backward, tensors)


def broadcast(call: Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Return the root's tensor."""

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        (averaged,) = allreduce(call.backward(op=Average), gradients)
        # A session runs only what a result depends on.
        rank = _rank(global_process_set)
        with tf.control_dependencies([averaged]):
            return [tf.where(tf.equal(rank, call.root), averaged, tf.zeros_like(averaged))]

    return _recorded(call, partial(call.request, BROADCAST), backward, tensors)


def alltoall(
    call: Call, splits: tf.Tensor | None, tensors: Sequence[tf.Tensor]
) -> tuple[tf.Tensor, ...]:
    """Exchange rows; also return the number of rows from each rank."""
    (tensor,) = tensors
    received_splits: list[tf.Tensor] = []

    def forward(given: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        results = call.request(ALLTOALL, given, splits)
        received_splits[:] = results[1:]
        return results

    def backward(gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        back = tf.cast(received_splits[0], tf.int64)
        returned, _ = alltoall(call.backward(), back, gradients)
        not_sent = tf.shape(tensor)[0] - tf.shape(returned)[0]
        zeros = tf.zeros(tf.concat([[not_sent], tf.shape(returned)[1:]], 0), returned.dtype)
        return [tf.ensure_shape(tf.concat([returned, zeros], 0), tensor.shape)]

    return _recorded(call, forward, backward, tensors)


def reducescatter(call: Call, tensors: Sequence[tf.Tensor]) -> tuple[tf.Tensor, ...]:
    """Combine tensors, and return this rank's rows."""

    def backward(gradients: list[tf.Tensor]) -> tuple[tf.Tensor, ...]:
        factor = call.factors[0] * call.factors[1]
        if call.op == Sum:
            factor *= tf.cast(_size(call.process_set), tf.float64)
        mine = [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
        return allgather(call.backward(factors=(1.0, 1.0)), mine)

    return _recorded(call, partial(call.request, REDUCESCATTER), backward, tensors)
