"""Steps of Keras and TensorFlow as transactions: in whatever moment a rank dies. Full tier."""

from __future__ import annotations

from pathlib import Path

import elastic_ranks
import pytest
import tiers
from elastic_ranks import ElasticJob

pytest.importorskip("tensorflow")
pytestmark = [tiers.full, pytest.mark.timeout(600)]

# As in test_elastic_steps: each time a sample is in a step, its parameter is one less, and a rank
# dies in steps 3, 6 and 9, when nobody, some or all have applied the step and nobody has marked it.
# What is beside the weights counts, too: a layer its calls, and the optimizer its steps.
SCRIPT = """
import os, sys, time
from pathlib import Path

kind, applied = sys.argv[1], Path(sys.argv[2])
os.environ["KERAS_BACKEND"] = "torch" if kind == "torch" else "tensorflow"
import keras
import numpy as np
import hororing.numpy

if kind == "tape":
    import hororing.tensorflow as hvd
else:
    import hororing.keras as hvd
if kind != "torch":
    import tensorflow as tf
    import hororing.tensorflow as of_tensorflow
    from hororing.tensorflow.steps import CountedSteps as Stepper
else:
    from hororing.keras.backends.torch import Stepper
from hororing.elastic.partition import share_of

DEATHS = {3: ("nobody", 4), 6: ("some", 3), 9: ("all", 2)}  # and of how many ranks
COUNT, BATCH = 240, 2
taken = Stepper.take
stuck = False if kind == "torch" else tf.Variable(False)


def take(self, apply, gradients):
    if kind != "torch":
        wait = tf.cond(stuck, lambda: of_tensorflow.allreduce(0.0, name="never"), lambda: 0.0)
        gradients = [*gradients, wait]
    elif due("some") and hvd.rank() == 0:
        hororing.numpy.allreduce(np.zeros(1), name="never")
    taken(self, apply, gradients)


Stepper.take = take


class Counting(keras.layers.Layer):
    def build(self, shape):
        self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, inputs, training=False):
        if training:
            self.calls.assign_add(1.0)
        return inputs


class Total(keras.losses.Loss):
    def call(self, labels, outputs):
        return outputs


hvd.init()
model = keras.Sequential([keras.layers.Embedding(COUNT, 1, "zeros"), Counting()])
model.build((None, 1))
optimizer = keras.optimizers.SGD(1.0)
if kind == "tensorflow":
    from hororing.toolkit.keras.optim import HierarchicalSGD

    try:
        HierarchicalSGD(keras.optimizers.SGD(1.0), period_group_size_dict={2: "world"})
    except ValueError as error:
        assert "not in an elastic job" in str(error), error
    else:
        raise AssertionError
if kind == "tape":
    state = hvd.elastic.TensorFlowKerasState(model, optimizer, epoch=0, done=0, began=0, steps=0)
else:
    optimizer = hvd.DistributedOptimizer(optimizer, op=hvd.Sum)
    model.compile(optimizer, Total(reduction="sum"))
    state = hvd.elastic.KerasState(model, epoch=0, done=0, began=0, steps=0)
sync = state.sync


def told_sync():
    print("sent", hvd.elastic.history()[-1].generation, flush=True)
    sync()


state.sync = told_sync


def due(what):
    return DEATHS.get(state.steps + 1) == (what, hvd.size())


def die_once(there):
    while not there.exists():
        time.sleep(0.001)
    os.kill(os.getpid(), 9)


class Account(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        if due("nobody") and hvd.rank() == 3:
            os.kill(os.getpid(), 9)
        if kind != "torch":
            stuck.assign(due("some") and hvd.rank() == 0)

    def on_train_batch_end(self, batch, logs=None):
        if due("some") and hvd.rank() == 2:
            die_once(applied / "some")
        if due("some"):
            (applied / "some").touch()
        if due("all") and hvd.rank() == 1:
            (applied / "all").touch()
        if due("all") and hvd.rank() == 0:
            die_once(applied / "all")
        hororing.numpy.allreduce(np.zeros(1), name="loss")
        state.steps += 1
        state.done = min(state.done + BATCH * state.ranks_in_step, COUNT)


if kind == "tape":

    @tf.function
    def step(batch):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch, training=True))
        tape = hvd.DistributedGradientTape(tape, op=hvd.Sum)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))


def steps_with(mine):
    if kind != "tape":
        commit = hvd.elastic.CommitStateCallback(state, batches_per_commit=10**6)
        model.fit(
            mine[:, None], np.zeros((len(mine), 1)), batch_size=BATCH, epochs=1, shuffle=False,
            verbose=0, callbacks=[Account(), commit],
        )
        return
    account = Account()
    for at in range(0, len(mine), BATCH):
        account.on_train_batch_begin(at)
        step(tf.constant(mine[at : at + BATCH, None]))
        account.on_train_batch_end(at)
        state.check_host_updates()


@hvd.elastic.run
def train(state):
    print("world", hvd.elastic.history()[-1].generation, hvd.rank(), hvd.size(), flush=True)
    assert state.keeps_steps
    while True:
        if state.done == 0:
            state.began = len(hvd.elastic.history()[-1].members)
        if state.done < COUNT:
            steps_with(np.array(share_of(range(state.done, COUNT), hvd.rank(), hvd.size())))
        state.epoch += 1
        state.done = 0
        if state.began == 2:
            return


train(state)
times = sorted(set(np.rint(-model.get_weights()[0]).astype(int).ravel().tolist()))
print("steps", [(each.step, len(each.members)) for each in hvd.elastic.history()], flush=True)
print("end", times == [state.epoch], state.steps, int(model.layers[1].calls),
      int(optimizer.iterations), flush=True)
"""


@pytest.mark.parametrize("kind", ["tensorflow", "torch", "tape"])
def test_no_step_is_lost_or_taken_twice_whenever_a_rank_dies(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    pytest.importorskip({"tape": "tensorflow"}.get(kind, kind))
    # On a busy machine four processes take a minute to import TensorFlow.
    monkeypatch.setattr(elastic_ranks, "DEADLINE_S", 240.0)
    with ElasticJob(np=4, min_np=1, max_np=4) as job:
        for _ in range(4):
            job.start(kind, str(tmp_path), script=SCRIPT)
        job.wait(lambda: len(job.worlds()) == 4)
        last = job.process_of(0)
        new = job.start(kind, str(tmp_path), script=SCRIPT)
        ends = job.ends(last, new)
        assert ends[0] == ends[1], job.lines
        _, once, *steps = ends[0].split()
        assert once == "True", job.lines
        assert len(set(steps)) == 1, steps
        told = [(each.step, len(each.members)) for each in job.worlds()]
        # The step that nobody has applied is done again; the others are not.
        assert told[:4] == [(0, 4), (2, 3), (6, 2), (9, 1)]
        # A model was sent only where a rank lacked a step, and to the newcomer.
        sent = {int(line.split()[1]) for line in job.lines[last] if line.startswith("sent")}
        assert sent == {1, 3, len(told)}, job.lines
