"""Ranks that share a batch take the same steps as one process with all of it, in tf.function.

For model.fit: keras_cases.py, case_training_equals_one_process_with_the_large_batch.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import mpirun
import numpy as np
import session
import tensorflow as tf
from sklearn.datasets import load_digits

import hororing.tensorflow as hvd

STEPS, BATCH = 20, 48
PIECES = 3  # per rank and batch, if gradients are accumulated
# Other orders of summation differ by about 1e-16 per step, and training amplifies this.
RTOL = 1e-6
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "SGD": lambda: keras.optimizers.SGD(0.2, momentum=0.9),
    "Adam": lambda: keras.optimizers.Adam(0.005),
}
Gradients = Callable[[Any, tf.Tensor, tf.Tensor], tuple[tf.Tensor, list[tf.Tensor]]]


def batches() -> tuple[np.ndarray, np.ndarray]:
    """Return digits as (step, image of the batch, ...)."""
    digits = load_digits()
    chosen = np.random.default_rng(mpirun.seed()).permutation(1797)[: STEPS * BATCH]
    images = (digits.images[chosen] / 16).reshape(STEPS, BATCH, 8, 8, 1)
    return images, digits.target[chosen].reshape(STEPS, BATCH)


def network() -> keras.Model:
    keras.utils.set_random_seed(mpirun.seed() % 2**32)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((8, 8, 1)), layers.Conv2D(6, 3, activation="tanh"), layers.Flatten(),
        layers.Dense(12, activation="tanh"), layers.Dense(10),
    ])  # fmt: skip


def train(
    optimizer: Any, images: np.ndarray, labels: np.ndarray, gradients_of: Gradients
) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return the loss of every step, and the final weights."""
    model = network()

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = gradients_of(model, images, labels)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    pairs = zip(images, labels, strict=True)
    losses = [float(step(tf.constant(x), tf.constant(y))) for x, y in pairs]
    return np.array(losses), model.get_weights()


def loss_of(model: Any, images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    logits = model(images, training=True)
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))


def alone(model: Any, images: tf.Tensor, labels: tf.Tensor) -> Any:
    with tf.GradientTape() as tape:
        loss = loss_of(model, images, labels)
    return loss, tape.gradient(loss, model.trainable_variables)


def by_the_tape(**options: Any) -> Gradients:
    def gradients_of(model: Any, images: tf.Tensor, labels: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(model, images, labels)
        tape = hvd.DistributedGradientTape(tape, **options)
        return hvd.allreduce(loss, name="loss"), tape.gradient(loss, model.trainable_variables)

    return gradients_of


def accumulated(model: Any, images: tf.Tensor, labels: tf.Tensor) -> Any:
    """Sum the gradients of the pieces, then reduce the sums."""
    parts = [
        alone(model, *piece)
        for piece in zip(tf.split(images, PIECES), tf.split(labels, PIECES), strict=True)
    ]
    loss = tf.add_n([loss for loss, _ in parts]) / PIECES
    sums = [tf.add_n(each) / PIECES for each in zip(*(g for _, g in parts), strict=True)]
    return hvd.allreduce(loss, name="loss"), hvd.grouped_allreduce(sums, name="gradients")


@functools.cache
def expected(name: str) -> tuple[np.ndarray, list[np.ndarray]]:
    return train(OPTIMIZERS[name](), *batches(), alone)


def check(name: str, gradients_of: Gradients) -> None:
    images, labels = batches()
    expected_losses, expected_weights = expected(name)
    rank, size = hvd.rank(), hvd.size()
    losses, weights = train(
        OPTIMIZERS[name](), images[:, rank::size], labels[:, rank::size], gradients_of
    )
    np.testing.assert_allclose(losses, expected_losses, rtol=RTOL)
    for weight, wanted in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(weight, wanted, rtol=RTOL, atol=1e-9)
    # It learns, so equality is meaningful. Seeds end between 0.17 and 0.73.
    assert losses[-3:].mean() < 0.9 * losses[:3].mean()


def case_init() -> None:
    hvd.init()
    keras.config.set_floatx("float64")


def case_sgd_with_momentum_takes_the_steps_of_the_large_batch() -> None:
    check("SGD", by_the_tape())


def case_adam_takes_the_steps_of_the_large_batch_in_groups_without_compression() -> None:
    check("Adam", by_the_tape(compression=hvd.Compression.none, groups=2))


def case_accumulation_by_hand_changes_nothing() -> None:
    check("SGD", accumulated)


test_large_batch = session.on_ranks(globals(), 2, 4, push=[2], session="tensorflow")
