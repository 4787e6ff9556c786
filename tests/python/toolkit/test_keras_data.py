"""Exact evaluation and sharded arrays of toolkit.keras.data, and tf.data's, in one process.

test_data.py tests the communication between ranks.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import numpy as np
import pytest
import tensorflow as tf

import hororing.numpy as hvd
from hororing.toolkit.data.evaluation import masked_arrays
from hororing.toolkit.data.sharding import Shard, permutation
from hororing.toolkit.keras.data import ShardedArrays, evaluate
from hororing.toolkit.tensorflow.data import shard_indices

N = 201


@pytest.fixture(autouse=True)
def _engine():
    hvd.init()
    yield
    hvd.shutdown()


def test_evaluation_equals_one_process() -> None:
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(N, 5)).astype(np.float32), rng.integers(4, size=N)
    model = keras.Sequential(
        [keras.Input((5,)), keras.layers.Dropout(0.5), keras.layers.Dense(4, "softmax")]
    )
    metrics = {
        "correct": lambda y, p: y == np.argmax(p, -1),
        "accuracy": keras.metrics.sparse_categorical_accuracy,
        "loss": keras.losses.sparse_categorical_crossentropy,
    }
    # Three ranks, one after the other. Neither N nor the ranks' parts are divisible.
    parts = [evaluate(model, masked_arrays((x, y), 16, rank, 3), metrics) for rank in range(3)]
    outputs = np.asarray(model(x))
    hits = int((outputs.argmax(-1) == y).sum())
    for name in ("correct", "accuracy"):
        assert sum(part[name].total for part in parts) == hits
        assert sum(part[name].count for part in parts) == N
    loss = -np.log(outputs[np.arange(N), y]).sum()
    assert abs(sum(part["loss"].total for part in parts) - loss) < 1e-5 * loss
    with pytest.raises(ValueError, match="'mean' is one number for a batch"):
        evaluate(model, [(x, y)], {"mean": lambda y, p: np.mean(p)})


def test_fit_sees_a_new_order_every_epoch() -> None:
    seen: list[list[int]] = [[]]

    class Recorder(keras.Model):
        def train_step(self, data):
            seen[-1] += np.asarray(data[0]).tolist()
            return {"loss": tf.constant(0.0)}

    class Ends(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append([])

    arrays = np.arange(N), np.arange(N)
    model = Recorder()
    model.compile(keras.optimizers.SGD(), "mse", run_eagerly=True)
    shard = Shard(N, 1, 2, seed=4)
    data = ShardedArrays(arrays, 32, shard)
    options = {"verbose": 0, "shuffle": False}
    model.fit(data, epochs=3, callbacks=[Ends(), data.callback()], **options)
    orders = [permutation(N, seed=4, epoch=epoch)[1 : N // 2 * 2 : 2] for epoch in range(3)]
    assert seen == [*(order.tolist() for order in orders), []]
    # Resume in the middle of epoch 1.
    shard.set_epoch(1)
    shard.record_batch(0, 32)
    seen[:] = [[]]
    data = ShardedArrays(arrays, 32, shard)
    with pytest.warns(UserWarning, match="ran out of data"):
        model.fit(data, initial_epoch=1, epochs=3, callbacks=[Ends(), data.callback()], **options)
    assert seen == [orders[1][32:].tolist(), orders[2].tolist(), []]
    data = ShardedArrays(arrays, 32, shard)
    with pytest.warns(UserWarning, match=r"pass callbacks=\[data\.callback"):
        model.fit(data, epochs=3, **options)


def test_sharded_arrays_refuse_what_would_hang() -> None:
    with pytest.raises(ValueError, match=r"arrays of \[5, 6\] samples"):
        ShardedArrays((np.zeros(5), np.zeros(6)), 2, Shard(5, 0, 1))
    with pytest.raises(ValueError, match="different numbers of steps"):
        ShardedArrays((np.zeros(5),), 2, Shard(5, 0, 2, remainder="uneven"))


def test_indices_as_a_tf_data_set() -> None:
    shard = Shard(N, 0, 2, seed=6)
    dataset = shard_indices(shard).batch(10)
    for epoch in range(2):
        got = np.concatenate([batch.numpy() for batch in dataset])
        np.testing.assert_array_equal(got, permutation(N, seed=6, epoch=epoch)[: N // 2 * 2 : 2])
    stays = shard_indices(shard, advance=False)
    assert len(list(stays)) == len(list(stays)) == N // 2
    assert shard.epoch == 2
    assert tf.data.experimental.cardinality(stays) < 0
