"""SyncBatchNormalization: Keras' batch normalisation over the batches of several ranks.

Keras' layer does everything except the moments in training. These are merged and sent as in
hororing/torch/sync_batch_norm.py: one allgather of count, mean and sum of squared deviations (M2)
per channel as float64, and Chan's formula. The backward pass sums the gradients of mean and
variance over the ranks in one allreduce; for an element x of any rank's batch then

    dx = dmean / count + dvariance 2 (x - mean) / count
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from hororing._adapters.batch_norm_groups import GroupedLayer
from hororing._engine import membership
from hororing._requests.arguments import Sum
from hororing._requests.handles import ALLGATHER, ALLREDUCE
from hororing._requests.process_sets import ProcessSet, global_process_set
from hororing.tensorflow._tensor.names import in_graph
from hororing.tensorflow._tensor.requests import Request, carry_out
from hororing.tensorflow.which_keras import is_legacy


@keras.saving.register_keras_serializable(package="hororing")
class SyncBatchNormalization(GroupedLayer, keras.layers.BatchNormalization):  # type: ignore[misc]
    """Batch normalisation with the statistics of several ranks' batches.

    Does what keras.layers.BatchNormalization would do with the batches of all ranks joined, which
    may differ in length; some may be empty. In training every call of the layer sends one request,
    and so does every backward pass through it to what is trained before it: all ranks must make
    them in the same order. In inference, with ``trainable = False``, and where a group is one rank,
    nothing is sent, and the layer is Keras' own.

    Gradients of gamma and beta are this rank's part of the sum: DistributedOptimizer and
    DistributedGradientTape reduce them like any other.

    With `group_size`, ranks share statistics only within their group, so the moving statistics of
    groups differ: average them before evaluation and checkpoints. Groups are process sets, which
    the first layer that needs them registers. Therefore all ranks of the job, members of
    `process_set` or not, must create such layers in the same way, after `init()`. (After another
    `init()`, or in a layer that comes from a file or a config, its next call in training does it.)

    Parameters
    ----------
    fused : bool, optional
        False; Horovod's argument. A fused kernel computes the moments of one rank.
    process_set : ProcessSet, optional
        The ranks that share statistics. A saved layer holds their numbers.
    group_size : int, optional
        Divide `process_set` into groups of this many consecutive ranks. It must divide the size
        of the set; 1 means no communication. See docs/large_batch.md for the choice.
    **kwargs : dict
        Of keras.layers.BatchNormalization. `name` is also that of the requests: equal on all
        ranks.

    Raises
    ------
    ValueError : for `fused` other than False, `synchronized`, which is tf.distribute's, and on
        another backend of Keras than TensorFlow. From calls in training: on every rank of the
        group, when their batches have no values at all (in a graph it is TensorFlow's
        InvalidArgumentError); and on a rank that is not in `process_set`.

    Examples
    --------
    >>> layers = [keras.layers.Dense(4), hvd.SyncBatchNormalization(), keras.layers.Dense(2)]
    >>> scores = keras.Sequential(layers)(x, training=True)
    """

    def __init__(
        self,
        fused: bool = False,
        *,
        process_set: ProcessSet = global_process_set,
        group_size: int | None = None,
        **kwargs: Any,
    ) -> None:
        _check_keras()
        if fused is not False:
            raise ValueError(
                f"SyncBatchNormalization: fused={fused!r} is not supported: a fused kernel "
                "computes the moments of one rank; leave it out"
            )
        self.check_arguments(keras, process_set, kwargs)
        super().__init__(**kwargs)
        self.supports_jit = False  # XLA cannot compile communication
        self.share(process_set, group_size)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def _moments(self, inputs: tf.Tensor, mask: tf.Tensor | None) -> tuple[tf.Tensor, tf.Tensor]:
        # Keras calls this in training, with float32 or float64, and expects biased variances.
        group = self._sharing()
        # A graph lives on when an elastic job gets more ranks.
        grows = membership.is_elastic() and group is global_process_set
        if group is None or (len(group.ranks) == 1 and not grows):
            moments: tuple[tf.Tensor, tf.Tensor] = super()._moments(inputs, mask)
            return moments
        if mask is not None:
            mask = tf.cast(tf.expand_dims(mask, -1), tf.bool)
            mask = tf.broadcast_to(mask, tf.shape(inputs))
        mean, variance, count = self._whole_batch(inputs, mask, group)
        if mask is not None:
            # With a mask, Keras divides by count + epsilon, so the moments of an empty batch are
            # zeros.
            share = count / (count + keras.backend.epsilon())
            mean, variance = share * mean, share * (variance + tf.square((1 - share) * mean))
        return mean, variance

    def _whole_batch(
        self, inputs: tf.Tensor, mask: tf.Tensor | None, group: ProcessSet
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Mean, biased variance and count per channel of all batches; differentiable once."""
        axes, dtype = self._reduction_axes, inputs.dtype
        per_channel = [1] * len(inputs.shape)
        per_channel[self.axis] = inputs.shape[self.axis]

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def moments(values: tf.Tensor) -> Any:
            rows = self._request(ALLGATHER, _local_statistics(values, mask, axes)[None], group)
            counts, means, m2s = rows[:, 0], rows[:, 1], rows[:, 2]
            count = tf.reduce_sum(counts, 0)
            if mask is None:
                count = self._checked(count)
            whole_mean = tf.math.divide_no_nan(tf.reduce_sum(counts * means, 0), count)
            m2 = tf.reduce_sum(m2s + counts * tf.square(means - whole_mean), 0)
            mean, divisor = tf.cast(whole_mean, dtype), tf.cast(count, dtype)
            variance = tf.cast(tf.math.divide_no_nan(m2, count), dtype)

            def gradient(mean_gradient: Any, variance_gradient: Any, _: Any) -> tf.Tensor:
                mine = tf.stack([mean_gradient, variance_gradient])
                total = self._request(ALLREDUCE, mine, group)
                constant, slope = tf.unstack(tf.math.divide_no_nan(total, divisor))
                centred = values - tf.reshape(mean, per_channel)
                result = tf.reshape(constant, per_channel) + (
                    2 * tf.reshape(slope, per_channel) * centred
                )
                return _differentiated(result if mask is None else _masked(result, mask))

            return (mean, variance, divisor), gradient

        return moments(inputs)  # type: ignore[no-any-return]

    def _request(self, collective: int, tensor: tf.Tensor, group: ProcessSet) -> tf.Tensor:
        name = f"{self.path}.{'forward' if collective == ALLGATHER else 'backward'}"
        # Calls of one layer are one after the other in eager mode, but not in a graph.
        name = name if tf.executing_eagerly() else in_graph(name, group.process_set_id)
        ((result,),) = carry_out([Request(collective, name, [tensor], group, Sum)])
        return result

    def _checked(self, count: tf.Tensor) -> tf.Tensor:
        problem = self._empty()
        if not tf.executing_eagerly():
            with tf.control_dependencies([tf.debugging.Assert(count[0] > 0, [problem])]):
                return tf.identity(count)
        if int(count[0]) == 0:
            raise ValueError(problem)
        return count


def _check_keras() -> None:
    if is_legacy():
        raise ValueError(
            "SyncBatchNormalization is a layer of Keras 3, and tf.keras is tf_keras, since "
            "TF_USE_LEGACY_KERAS is set; unset that, or use "
            "tf.keras.layers.BatchNormalization, with statistics of each rank's own batches"
        )
    backend = keras.backend.backend()
    if backend == "torch":
        raise ValueError(
            "SyncBatchNormalization is for the TensorFlow backend of Keras, and this is torch; "
            "use hororing.keras.batch_norm.SyncBatchNormalization"
        )
    if backend != "tensorflow":
        raise ValueError(
            f"SyncBatchNormalization is for the TensorFlow backend of Keras, and this is "
            f"{backend}; set KERAS_BACKEND=tensorflow before importing keras, or use "
            "keras.layers.BatchNormalization, with statistics of each rank's own batches"
        )


def _local_statistics(values: tf.Tensor, mask: tf.Tensor | None, axes: Sequence[int]) -> tf.Tensor:
    """Rows of count, mean and M2 of one batch, as float64. All are 0 for an empty one."""
    total = partial(tf.reduce_sum, axis=axes, keepdims=True)
    sums = total(_masked(values, mask))
    if mask is None:
        count = tf.fill(tf.shape(sums), tf.size(values, tf.int64) // tf.size(sums, tf.int64))
    else:
        count = total(tf.cast(mask, tf.int64))
    divisor = tf.maximum(count, 1)
    mean = sums / tf.cast(divisor, values.dtype)
    deviations = _masked(values - mean, mask)
    # The mean was rounded. The sum of the deviations corrects both (the corrected two-pass
    # algorithm of the same authors).
    squares = tf.cast(total(tf.square(deviations)), tf.float64)
    rest, divisor = tf.cast(total(deviations), tf.float64), tf.cast(divisor, tf.float64)
    mean = tf.cast(mean, tf.float64) + rest / divisor
    m2 = tf.maximum(squares - tf.square(rest) / divisor, 0)
    return tf.reshape(tf.stack([tf.cast(count, tf.float64), mean, m2]), [3, -1])


def _masked(tensor: tf.Tensor, mask: tf.Tensor | None) -> tf.Tensor:
    return tensor if mask is None else tf.where(mask, tensor, tf.zeros([], tensor.dtype))


@tf.custom_gradient  # type: ignore[untyped-decorator]
def _differentiated(tensor: tf.Tensor) -> Any:
    """Return a gradient without second-order gradients, which would need communication, too."""

    def gradient(upstream: tf.Tensor) -> tf.Tensor:
        problem = (
            "SyncBatchNormalization has no second-order gradients; use "
            "keras.layers.BatchNormalization where you differentiate twice"
        )
        if tf.executing_eagerly():
            raise NotImplementedError(problem)
        # Graphs of gradients are built even if they are not used.
        with tf.control_dependencies([tf.debugging.Assert(False, [problem])]):
            return tf.identity(upstream)

    return tf.identity(tensor), gradient
