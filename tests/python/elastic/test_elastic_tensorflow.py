"""Elastic training with a custom TensorFlow loop: eager, tf.function, and states. Full tier."""

from __future__ import annotations

import subprocess
import sys

import pytest
import tiers
from elastic_ranks import ElasticJob

pytest.importorskip("tensorflow")
pytestmark = [tiers.full, pytest.mark.timeout(300)]

# Sums ones in a compiled step until the newcomer has taken part in 20 steps. The gradient of an
# embedding is IndexedSlices, and the graph divides the sum. The gradients of verbs depend on rank
# and size. With two ranks, the set of rank 2 does not exist, and the pair gets its number.
SCRIPT = """
import os, time
import tensorflow as tf
import hororing.tensorflow as hvd

last, pair = hvd.ProcessSet([2]), hvd.ProcessSet([0, 1])
hvd.init(process_sets=[last, pair])
table = tf.Variable(tf.ones((4, 2)))
weight = tf.Variable(float(os.getpid()))
state = hvd.elastic.TensorFlowState([table, weight], step=0, last=10**9)


@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(table, [0, 2])) + weight
    return hvd.DistributedGradientTape(tape).gradient(loss, [table, weight])


@tf.function(input_signature=[tf.TensorSpec([None]), tf.TensorSpec([None])])
def gradients(x, factors):
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        gathered = tf.reduce_sum(hvd.allgather(x) * factors)
        sent = tf.reduce_sum(hvd.broadcast(x, 0))
        scattered = tf.reduce_sum(hvd.reducescatter(tf.repeat(x, 6), op=hvd.Sum))
    return [tape.gradient(each, x)[0] for each in (gathered, sent, scattered)]


@tf.function
def total(x):
    return hvd.allreduce(x, op=hvd.Sum, process_set=pair)


@hvd.elastic.run
def train(state):
    print("world", hvd.elastic.history()[-1].generation, hvd.rank(), hvd.size(), flush=True)
    rank, size = hvd.rank(), hvd.size()
    while state.step < state.last:
        found = [float(each) for each in gradients(tf.ones([1]), tf.range(1.0, size + 1.0))]
        assert found == [rank + 1, float(rank == 0), 6 * size], found
        assert rank == 2 or float(total(tf.ones([]))) == 2
        slices, one = step()
        assert float(one) == 1.0, one
        dense = tf.convert_to_tensor(slices).numpy().tolist()
        assert dense == [[1.0, 1.0], [0.0, 0.0], [1.0, 1.0], [0.0, 0.0]], dense
        weight.assign_sub(0.5 * one)
        table.assign_sub(0.5 * tf.convert_to_tensor(slices))
        state.step += 1
        if hvd.elastic.history()[-1].generation == 3 and state.last == 10**9:
            state.last = state.step + 20
        state.commit()
        time.sleep(0.002)


train(state)
print("end", state.step, float(weight), table.numpy().sum(), flush=True)
"""


def test_a_compiled_step_goes_on_with_other_ranks():
    with ElasticJob(np=3, min_np=2, max_np=3) as job:
        job.begin(3, script=SCRIPT)
        rest = job.kill(0)
        new = job.start(script=SCRIPT)
        ends = job.ends(*rest, new)
        assert len(set(ends)) == 1, ends


# The first process traces the layer alone.
GROWS = """
import time
import tensorflow as tf
import hororing.tensorflow as hvd

hvd.init()
layer = hvd.SyncBatchNormalization(momentum=0.0)
layer.build((None, 1))
state = hvd.elastic.TensorFlowState(layer.variables, together=0)


@tf.function
def step(x):
    return layer(x, training=True)


@hvd.elastic.run
def train(state):
    print("world", hvd.elastic.history()[-1].generation, flush=True)
    rank, size = hvd.rank(), hvd.size()
    while state.together < 3:
        step(tf.constant([[float(rank)], [float(rank)]]))
        mean = float(layer.moving_mean[0])
        assert mean == (size - 1) / 2, mean
        state.together += size == 2
        state.commit()
        time.sleep(0.02)


train(state)
print("end", flush=True)
"""


def test_a_layer_that_one_rank_has_traced_synchronizes_with_a_second():
    with ElasticJob(np=1, max_np=2) as job:
        job.begin(1, script=GROWS)
        job.ends(0, job.start(script=GROWS))


STATES = """
import numpy as np, tensorflow as tf
import hororing.tensorflow as hvd

hvd.init()
if {eager}:
    first, second = tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)
    state = hvd.elastic.TensorFlowState([first, second], batch=4)
    read = lambda: (first.numpy().tolist(), int(second.numpy()))
    write = lambda: (first.assign([7.0, 7.0]), second.assign(7))
else:
    tf.compat.v1.disable_eager_execution()
    first, second = tf.compat.v1.get_variable("a", initializer=[1.0, 2.0]), tf.Variable(3)
    session = tf.compat.v1.Session()
    session.run(tf.compat.v1.global_variables_initializer())
    state = hvd.elastic.TensorFlowState(session=session, batch=4)
    read = lambda: tuple(np.array(each).tolist() for each in session.run([first, second]))
    write = lambda: (first.load([7.0, 7.0], session), second.load(7, session))
write()
state.batch = 5
state.restore()
assert (read(), state.batch) == (([1.0, 2.0], 3), 4), read()
write()
state.save()
state.sync()
assert read() == ([7.0, 7.0], 7), read()
class Unbuilt(tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.layer = tf.keras.layers.Dense(2)
marked = Unbuilt()
marked.build((None, 3))  # builds no layers in Keras 3
for model in (tf.keras.Sequential([tf.keras.layers.Dense(2)]), marked):
    try:
        hvd.elastic.TensorFlowKerasState(model)
    except ValueError as error:
        assert "no variables yet" in str(error), error
    else:
        raise AssertionError
"""


@pytest.mark.parametrize("eager", [True, False])
def test_a_state_of_variables_goes_back(eager: bool):
    program = STATES.format(eager=eager)
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
