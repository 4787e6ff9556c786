"""The indices of `hororing.toolkit.data.sharding.Shard` as a tf.data.Dataset."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from hororing.toolkit.data.sharding import Shard


def shard_indices(shard: Shard, *, advance: bool = True) -> tf.data.Dataset:
    """Return a data set of this process's indices (int64 scalars) in an epoch.

    Every iteration over it yields those that are left in the shard's epoch when it begins. Map them
    to samples: ``shard_indices(shard).map(read).batch(32)``, or
    ``shard_indices(shard).batch(32).map(lambda at: (tf.gather(x, at), tf.gather(y, at)))``.

    Parameters
    ----------
    advance : bool, optional
        Begin the shard's next epoch where an iteration has ended (not where it is left early),
        as ``model.fit(dataset, epochs=...)`` needs it. False: call `set_epoch`. tf.data reads
        ahead: the epoch may end before the last samples are trained on. To build a new model,
        ``fit`` on JAX and torch iterates once more. If a short epoch is read ahead to its end
        there, training begins with the next epoch, maybe on this rank only: use False then,
        with ``LambdaCallback(on_epoch_begin=lambda epoch, logs: shard.set_epoch(epoch))``.

    Examples
    --------
    >>> data = shard_indices(Shard(8)).map(lambda at: (tf.gather(x, at), tf.gather(y, at))).batch(4)
    >>> model.fit(data)
    """

    def indices() -> Iterator[int]:
        yield from shard
        if advance:
            shard.set_epoch(shard.epoch + 1)

    return tf.data.Dataset.from_generator(indices, output_signature=tf.TensorSpec([], tf.int64))
