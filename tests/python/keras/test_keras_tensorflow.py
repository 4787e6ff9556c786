"""hororing.keras on TensorFlow: the cases of keras_cases.py, and those only for this backend."""
# ruff: noqa: F405  # cases use names of keras_cases.py

from __future__ import annotations

import os
import re
import warnings
from types import SimpleNamespace

import mpirun
import pytest
import session

if __name__ == "cases":  # on the ranks
    os.environ["KERAS_BACKEND"] = "tensorflow"
    import tensorflow as tf
    from keras_cases import *  # noqa: F403
    from keras_guard_cases import *  # noqa: F403
    from keras_hierarchical_cases import *  # noqa: F403

CASES = mpirun.cases_in(
    "keras_cases.py", "keras_guard_cases.py", "keras_hierarchical_cases.py", __file__
)


test_keras_on_tensorflow = session.on_ranks(
    globals(), 2, push=[2], session="tensorflow", cases=CASES
)


# -- only this backend -----------------------------------------------------------------------------


def case_gradients_of_embeddings_are_sparse():
    rows = np.random.default_rng(mpirun.seed()).integers(0, 9, size=(4 * BATCH, 2))
    targets = RANDOM.normal(size=(4 * BATCH, 2, 3))

    def embedding(optimizer, data, labels, size):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Embedding(9, 3)])
        model.compile(optimizer, "mse")
        model.fit(data, labels, batch_size=BATCH // size, shuffle=False, verbose=0)
        return model

    expected = embedding(sgd(), rows, targets, 1)
    for options in ({}, {"sparse_as_dense": True}, {"backward_passes_per_step": 1}):
        optimizer = hvd.DistributedOptimizer(sgd(), **options)
        model = embedding(optimizer, mine(rows, 4), mine(targets, 4), hvd.size())
        assert_same_weights(model, expected)


def case_xla_is_refused_and_names_the_remedy():
    for callbacks in ([Broadcast(0)], []):
        model = network()
        model.compile(hvd.DistributedOptimizer(sgd()), "mse", jit_compile=True)
        with pytest.raises(ValueError, match="jit_compile=False"):
            model.fit(X, Y, verbose=0, callbacks=callbacks)
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


def case_xla_is_turned_off_where_keras_has_chosen_it():
    model = network()
    with pytest.MonkeyPatch.context() as patch:
        devices = [SimpleNamespace(device_type="GPU"), SimpleNamespace(device_type="CPU")]
        patch.setattr(tf.config, "list_physical_devices", lambda *_: devices)
        model.compile(hvd.DistributedOptimizer(sgd()), "mse", jit_compile="auto")
        assert model.jit_compile
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model.fit(mine(X), mine(Y), verbose=0, callbacks=[Broadcast(0)])
    assert not model.jit_compile
    told = [str(each.message) for each in caught if "XLA" in str(each.message)]
    assert len(told) == (hvd.rank() == 0)
    assert_equal_on_all_ranks(model)


def case_several_steps_per_execution_and_eager_steps():
    expected = network()
    fit(expected, sgd(), steps=4, alone=True)
    for options in ({"steps_per_execution": 2}, {"run_eagerly": True}):
        for passes in (1, 2):
            model = network()
            optimizer = hvd.DistributedOptimizer(
                sgd(), backward_passes_per_step=passes, average_aggregated_gradients=True
            )
            model.compile(optimizer, "mse", **options)
            model.fit(
                mine(X, 4), mine(Y, 4), batch_size=BATCH // hvd.size() // passes, shuffle=False,
                verbose=0, callbacks=[Broadcast(0)],
            )  # fmt: skip
            assert_same_weights(model, expected)
    model.compile(sgd(), "mse", steps_per_execution=2)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.25, warmup_epochs=1.5)
    history = model.fit(X, Y, batch_size=len(X) // 4, epochs=2, verbose=0, callbacks=[warmup])
    rates = [0.25 * (done * (hvd.size() - 1) / 1.5 + 1) / hvd.size() for done in (1, 1.5)]
    np.testing.assert_allclose(history.history["lr"], rates)


def case_a_model_that_only_some_ranks_have_built_is_an_error_on_all():
    if hvd.size() == 1:
        return
    others = list(range(1, hvd.size()))
    text = f"has variables on ranks [0] and none yet on ranks {others}"
    with pytest.raises(RuntimeError, match=re.escape(text)):
        fit(
            network(built=hvd.rank() == 0), hvd.DistributedOptimizer(sgd()), steps=2,
            callbacks=[Broadcast(0)],
        )  # fmt: skip


def case_an_optimizer_may_update_what_the_model_does_not_list():
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.inner, self.scale = network(), tf.Variable(1.0, dtype="float64")
            self.built = True

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((self.inner(x) * self.scale - y) ** 2)
            weights = [*self.inner.trainable_variables, self.scale]
            gradients = tape.gradient(loss, weights)
            self.optimizer.apply_gradients(zip(gradients, weights, strict=True))
            return {"loss": loss}

    model, expected = Scaled(), Scaled()
    fit(model, hvd.DistributedOptimizer(sgd()), callbacks=[Broadcast(0)])
    fit(expected, sgd(), alone=True)
    assert_same_weights(model, expected)
    np.testing.assert_allclose(model.scale, expected.scale, rtol=1e-6)


def case_loops_of_ones_own():
    expected = network()
    fit(expected, sgd(), steps=4, alone=True)
    for passes in (1, 2):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            sgd(), backward_passes_per_step=passes, average_aggregated_gradients=True
        )

        @tf.function
        def train(x, y, model=model, optimizer=optimizer):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x) - y) ** 2)
            weights = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

        part = BATCH // hvd.size() // passes
        x, y = mine(X, 4), mine(Y, 4)
        for begin in range(0, len(x), part):
            train(tf.constant(x[begin : begin + part]), tf.constant(y[begin : begin + part]))
        assert_same_weights(model, expected)


def case_a_mismatch_in_a_train_step_tells_what_hororing_says():
    model = keras.Sequential([keras.Input((2 + hvd.rank(),)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(sgd(), name="differ"), "mse")
    with pytest.raises(tf.errors.OpError, match=r"differ/0.kernel"):
        model.fit(np.ones((4, 2 + hvd.rank())), np.ones((4, 1)), verbose=0)
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


def case_its_other_name_has_another_order_of_arguments():
    import hororing.tensorflow.keras as other

    arguments = [sgd(), None, "", "", other.Compression.none, False, 1.0, other.Sum, 3, False]
    optimizer = other.DistributedOptimizer(*arguments)
    assert optimizer._settings.passes == 3
    assert optimizer._settings.op == other.Sum
    best = other.callbacks.BestModelCheckpoint("loss", 0, True, filepath="a.weights.h5")
    assert best.save_weights_only
    assert set(other.__all__) == set(hvd.__all__)
    assert all(hasattr(other, name) for name in other.__all__)
