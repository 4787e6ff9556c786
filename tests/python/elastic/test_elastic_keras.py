"""Elastic training with model.fit: compiled train steps work on with other ranks. Full tier."""

from __future__ import annotations

import pytest
import tiers
from elastic_ranks import ElasticJob

pytest.importorskip("tensorflow")
pytestmark = [tiers.full, pytest.mark.timeout(300)]

# Fits until the end of an epoch that began with the newcomer.
SCRIPT = """
import os, sys, time
kind = sys.argv[1]
if kind == "legacy":
    os.environ["TF_USE_LEGACY_KERAS"] = "1"
    import tensorflow as tf
    keras = tf.keras
    import hororing.tensorflow.keras as hvd
else:
    os.environ["KERAS_BACKEND"] = kind
    import keras
    import hororing.keras as hvd
import numpy as np
import hororing.numpy

hvd.init()
keras.utils.set_random_seed(os.getpid())
model = keras.Sequential([keras.layers.Dense(8), keras.layers.Dropout(0.1), keras.layers.Dense(1)])
model.build((None, 4))
rate = 0.01
optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(rate * hvd.size()))
if kind in ("tensorflow", "torch"):
    optimizer.weight = 1.0 + os.getpid() % 3
model.compile(optimizer, loss="mse")
inputs = np.random.RandomState(0).rand(48, 4).astype("float32")
state = hvd.elastic.KerasState(model, epoch=0, batch=0, last=-1)
steps = []


def scale():
    optimizer.learning_rate = rate * hvd.size()


state.register_reset_callbacks([scale])


class End(keras.callbacks.Callback):
    # Ends two epochs after the newcomer has come, with equal steps on all ranks.
    def on_train_batch_end(self, batch, logs=None):
        steps.append((state.epoch, state.batch))
        time.sleep(0.01)

    def on_epoch_end(self, epoch, logs=None):
        if hvd.elastic.history()[-1].generation >= 3 and state.last < 0:
            state.last = epoch + 2
        self.model.stop_training = epoch == state.last


@hvd.elastic.run
def train(state):
    print("world", hvd.elastic.history()[-1].generation, hvd.rank(), hvd.size(), flush=True)
    model.fit(
        inputs, inputs.sum(1, keepdims=True), batch_size=12, epochs=10000, verbose=0,
        initial_epoch=state.epoch,
        callbacks=[
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.elastic.CommitStateCallback(state, batches_per_commit=2),
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state), End(),
        ],
    )


train(state)
last = [(state.epoch - more, batch) for more in (2, 1) for batch in range(1, 5)]
assert steps[-8:] == last, steps
values = [float(np.sum(each)) for each in model.get_weights()]
print("end", state.epoch, state.batch, sum(values), float(np.array(optimizer.learning_rate)),
      flush=True)
"""


@pytest.mark.parametrize("kind", ["tensorflow", "torch", "jax", "legacy"])
def test_fit_goes_on_without_a_rank_and_with_a_new_one(kind: str):
    pytest.importorskip({"legacy": "tf_keras"}.get(kind, kind))
    with ElasticJob(np=3, min_np=2, max_np=3) as job:
        job.begin(3, kind, script=SCRIPT)
        rest = job.kill(0)
        new = job.start(kind, script=SCRIPT)
        ends = job.ends(*rest, new)
        assert len(set(ends)) == 1, ends
        assert float(ends[0].split()[-1]) == pytest.approx(0.03)
        assert [len(world.members) for world in job.worlds()] == [3, 2, 3]
