"""Tests on ranks with TensorFlow and Keras; test_ranks_frameworks.py lets pytest run a copy."""

from __future__ import annotations

import keras
import pytest
import tensorflow as tf

import hororing.keras
import hororing.tensorflow as hvd
import hororing.testing


@pytest.fixture
def model():
    made = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    made.compile(hororing.keras.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse")
    return made


@pytest.mark.ranks(2)
def test_verbs():
    assert hvd.allreduce(tf.ones(3), op=hvd.Sum)[0] == 2
    hororing.testing.assert_same(tf.ones(3))
    with pytest.raises(AssertionError, match="rank 1 has 1"):
        hororing.testing.assert_same(tf.constant(float(hvd.rank())))
    hvd.allreduce(tf.ones(1))  # no rank ends while another one compares


@pytest.mark.ranks(2, limit_s=60)
def test_a_model_stays_the_same_on_all_ranks(model):
    keras.utils.set_random_seed(hvd.rank())
    callbacks = [hororing.keras.callbacks.BroadcastGlobalVariablesCallback(0)]
    x = keras.random.normal((8, 4), seed=hvd.rank())
    model.fit(x, x[:, :1], epochs=1, verbose=0, callbacks=callbacks)
    hororing.testing.assert_same(model.get_weights())
