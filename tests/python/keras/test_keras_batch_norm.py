"""Grouped batch normalization for Keras on torch and TensorFlow, against NumPy in float64.

hororing.tensorflow's layer also has its own tests; these are the same for both backends.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
if __name__ == "cases":  # on the ranks
    os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import keras
import mpirun
import numpy as np
import pytest
import session
import tiers
from keras import ops

import hororing.numpy as hvd
from hororing._requests import handles
from hororing._requests.process_sets import ProcessSet
from hororing.errors import MismatchError, NotInitializedError
from hororing.keras.batch_norm import SyncBatchNormalization
from hororing.toolkit.keras.batch_norm import AverageMovingStatistics, average_moving_statistics
from hororing.toolkit.large_batch.groups import choose_group_size, group_size_for

BACKEND = keras.backend.backend()
CHANNELS, MOMENTUM, EPSILON = 3, 0.75, 1e-3


def rows() -> list[int]:
    return [(4, 2, 5, 3)[rank % 4] for rank in range(hvd.size())]


def batches(offset: float = 0.0, *key: int) -> list[np.ndarray]:
    rng = np.random.default_rng([mpirun.seed(), *key])
    return [
        (rng.normal(rank, 1 + rank, (n, 5, CHANNELS)) + offset).astype(np.float32)
        for rank, n in enumerate(rows())
    ]


def oracle(
    parts: Sequence[np.ndarray], mine: int, gamma: np.ndarray, masks: Sequence[np.ndarray] | None
) -> dict[str, np.ndarray]:
    """Return batch normalization of the joined batches, and the gradients of sum(cos(3 x) y)."""
    x = np.concatenate(parts).astype(np.float64)
    m = np.ones(x.shape) if masks is None else np.concatenate(masks)[..., None] * np.ones(x.shape)
    dy = np.cos(3 * x)
    count = m.sum((0, 1))
    mean = (m * x).sum((0, 1)) / count
    variance = (m * (x - mean) ** 2).sum((0, 1)) / count
    r = 1 / np.sqrt(variance + EPSILON)
    total, slope = dy.sum((0, 1)), (dy * (x - mean)).sum((0, 1))
    dx = gamma * r * (dy - m * (total / count + (x - mean) * r**2 * slope / count))
    at = sum(map(len, parts[:mine]))
    rows = slice(at, at + len(parts[mine]))
    return {
        "y": gamma * r * (x - mean)[rows],
        "dx": dx[rows],
        "dgamma": (dy * (x - mean) * r)[rows].sum((0, 1)),  # this rank's part
        "mean": (1 - MOMENTUM) * mean,
        "variance": MOMENTUM + (1 - MOMENTUM) * variance,
    }


def step(call: Any, layer: Any, x: np.ndarray, mask: np.ndarray | None) -> dict[str, np.ndarray]:
    """Make a training step of the layer in the backend's framework."""
    options = {} if mask is None else {"mask": ops.convert_to_tensor(mask)}
    if BACKEND == "torch":
        input = ops.convert_to_tensor(x).requires_grad_()
        y = call(input, training=True, **options)
        layer.gamma.value.grad = None
        (y * ops.cos(3 * input.detach())).sum().backward()
        gradients = input.grad, layer.gamma.value.grad
    else:
        import tensorflow as tf

        input = tf.constant(x)
        with tf.GradientTape() as tape:
            tape.watch(input)
            y = call(input, training=True, **options)
            loss = tf.reduce_sum(y * tf.cos(3 * tf.stop_gradient(input)))
        gradients = tape.gradient(loss, [input, layer.gamma])
    values = (y, *gradients, layer.moving_mean, layer.moving_variance)
    names = ("y", "dx", "dgamma", "mean", "variance")
    return dict(zip(names, map(ops.convert_to_numpy, values), strict=True))


def made(**options: Any) -> Any:
    layer = SyncBatchNormalization(momentum=MOMENTUM, epsilon=EPSILON, **options)
    layer.build((None, 5, CHANNELS))
    layer.gamma.assign(np.linspace(1, 2, CHANNELS))
    return layer


def agree(layer: Any, members: Sequence[int], offset: float = 0.0, masked: bool = False) -> None:
    parts = [batches(offset, 1)[rank] for rank in members]
    rng = np.random.default_rng(mpirun.seed())
    masks = [rng.random(part.shape[:2]) < 0.6 for part in batches()] if masked else None
    masks = [masks[rank] for rank in members] if masks else None
    mine = list(members).index(hvd.rank())
    wanted = oracle(parts, mine, np.linspace(1, 2, CHANNELS), masks)
    got = step(layer, layer, parts[mine], masks[mine] if masks else None)
    np.testing.assert_allclose(got["variance"], wanted["variance"], 1e-5)
    np.testing.assert_allclose(got["mean"], wanted["mean"], 1e-6, 1e-6)
    if offset:
        return  # float32 near 1000 has steps of 6e-5, which also bound the outputs
    masked_too = 3e-6 if masked else 1e-6
    np.testing.assert_allclose(
        got["dx"], wanted["dx"], 0, masked_too * max(1, abs(wanted["dx"]).max())
    )
    np.testing.assert_allclose(got["y"], wanted["y"], 1e-5, 2e-6)
    np.testing.assert_allclose(got["dgamma"], wanted["dgamma"], 1e-5, 2e-5)


def case_before_init() -> None:
    layer = SyncBatchNormalization()
    with pytest.raises(NotInitializedError, match=r"use hvd\.init\(\)"):
        layer(np.ones((4, CHANNELS), np.float32), training=True)
    layer(np.ones((4, CHANNELS), np.float32))
    hvd.init()


def case_groups_equal_one_large_batch() -> None:
    for size in {1, 2, hvd.size()}:
        first = hvd.rank() // size * size
        members = range(first, first + size)
        agree(made(group_size=size), members)
        agree(made(group_size=size), members, offset=1000)
    agree(made(), range(hvd.size()), masked=True)
    for batch_size in (1, 16, 32):
        layer = made(group_size=choose_group_size(batch_size))
        assert layer.group_size == group_size_for(batch_size, ["here"] * hvd.size())
    with pytest.raises(ValueError, match="group_size=3 does not divide"):
        made(group_size=3)


def case_ranks_without_values() -> None:
    layer = made()
    x = batches()[0] if hvd.rank() == 0 else np.zeros((0, 5, CHANNELS), np.float32)
    wanted = oracle(batches()[:1], 0, np.linspace(1, 2, CHANNELS), None)
    got = step(layer, layer, x, None)
    np.testing.assert_allclose(got["variance"], wanted["variance"], 1e-5)
    with pytest.raises(ValueError, match="the batches of all ranks are empty; training needs"):
        layer(np.zeros((0, 5, CHANNELS), np.float32), training=True)


def case_recomputation() -> None:
    """Recomputation gives the same gradients, and all ranks make the same requests."""
    if hvd.size() > 2:
        return  # nothing here depends on the size
    part = batches(0, 2)[hvd.rank()]
    results, counts = [], []
    for recomputed in (False, True):
        layer = made(name="recomputed")
        call = layer
        if recomputed:

            def call(x: Any, training: bool, layer: Any = layer) -> Any:
                return keras.remat(lambda x: layer(x, training=True))(x)

        before = handles.submitted()
        results.append(step(call, layer, part, None))
        counts.append(handles.submitted() - before)
    for name in ("y", "dx", "dgamma"):
        np.testing.assert_allclose(results[1][name], results[0][name], 1e-6, 1e-6)
    assert hvd.allgather_object(counts) == [counts] * hvd.size()
    assert counts == [2, 3]


def case_stored_statistics() -> None:
    if hvd.size() > 2:
        return  # nothing here depends on the size
    if BACKEND != "torch":
        return
    from torch.utils.checkpoint import checkpoint

    from hororing.torch.recomputation import stored_statistics

    layer, part = made(), batches(0, 3)[hvd.rank()]

    def call(x: Any, training: bool) -> Any:
        return checkpoint(
            lambda x: layer(x, training=True), x, use_reentrant=False, context_fn=stored_statistics
        )

    before = handles.submitted()
    got = step(call, layer, part, None)
    assert handles.submitted() - before == 2
    wanted = oracle(batches(0, 3), hvd.rank(), np.linspace(1, 2, CHANNELS), None)
    np.testing.assert_allclose(got["dx"], wanted["dx"], 0, 1e-6 * max(1, abs(wanted["dx"]).max()))


def network(**options: Any) -> Any:
    keras.utils.set_random_seed(5)
    inner = keras.Sequential([keras.layers.Dense(4), SyncBatchNormalization(**options)])
    model = keras.Sequential(
        [keras.Input((6,)), inner, keras.layers.ReLU(), keras.layers.BatchNormalization(),
         keras.layers.Dense(2)]
    )  # fmt: skip
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model


def case_moving_statistics_become_one() -> None:
    if hvd.size() > 2:
        return  # nothing here depends on the size
    model, rng = network(group_size=1), np.random.default_rng(hvd.rank())
    x, y = rng.normal(hvd.rank(), 2, (16, 6)), np.zeros((16, 2))
    seen = []

    class Checkpoint(keras.callbacks.Callback):
        def on_test_begin(self, logs: Any = None) -> None:
            seen.append(model.non_trainable_weights)
            seen[-1] = [ops.convert_to_numpy(each.value) for each in seen[-1]]

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.on_test_begin()

    callbacks = [AverageMovingStatistics(), Checkpoint()]
    model.fit(x, y, 8, 2, verbose=0, callbacks=callbacks, validation_data=(x, y))
    assert len(seen) == 4
    for everybody in zip(*hvd.allgather_object(seen), strict=True):
        for weights in everybody:
            for ours, theirs in zip(weights, everybody[0], strict=True):
                np.testing.assert_array_equal(ours, theirs)
    layer = model.layers[-2]
    layer.moving_mean.assign(np.full(4, hvd.rank()))
    average_moving_statistics(model, samples=hvd.rank())
    mean = sum(r * r for r in range(hvd.size())) / sum(range(hvd.size()))
    np.testing.assert_allclose(ops.convert_to_numpy(layer.moving_mean), np.full(4, mean), 1e-6)


def case_fit_equals_the_layer_alone() -> None:
    """Through Keras' own train step, which some backends trace."""
    if hvd.size() > 2:
        return  # nothing here depends on the size
    model = network(group_size=hvd.size())
    rng = np.random.default_rng(mpirun.seed())
    x = rng.normal(2, 3, (8 * hvd.size(), 6)).astype(np.float32)
    model.fit(x[hvd.rank() :: hvd.size()], np.zeros((8, 2)), 8, 1, verbose=0)
    keras.utils.set_random_seed(5)
    dense = keras.layers.Dense(4)
    hidden = ops.convert_to_numpy(dense(x)).astype(np.float64)
    layer = model.layers[0].layers[1]
    wanted = 0.99 + 0.01 * hidden.var(0)
    np.testing.assert_allclose(ops.convert_to_numpy(layer.moving_variance), wanted, 1e-5)


def case_files_and_configs() -> None:
    if hvd.size() > 2:
        return  # nothing here depends on the size
    model = network(group_size=2 if hvd.size() % 2 == 0 else 1)
    with tempfile.TemporaryDirectory() as folder:
        model.save(Path(folder, "model.keras"))
        loaded = keras.models.load_model(Path(folder, "model.keras"))
    again, layer = loaded.layers[0].layers[1], model.layers[0].layers[1]
    assert type(again) is SyncBatchNormalization
    assert again.get_config() == layer.get_config()
    agree_again = SyncBatchNormalization.from_config(made(group_size=hvd.size()).get_config())
    agree_again.build((None, 5, CHANNELS))
    agree_again.gamma.assign(np.linspace(1, 2, CHANNELS))
    agree(agree_again, range(hvd.size()))


def case_wrong_arguments() -> None:
    if hvd.size() > 2:
        return  # nothing here depends on the size
    with pytest.raises(ValueError, match=r"synchronized=True is for tf\.distribute"):
        SyncBatchNormalization(synchronized=True)
    with pytest.raises(TypeError, match="must be a ProcessSet, not list"):
        SyncBatchNormalization(process_set=[0])
    with pytest.raises(TypeError, match="is not registered"):
        made(process_set=ProcessSet([0]))(batches()[0], training=True)
    layer = SyncBatchNormalization(name="channels")
    with pytest.raises(MismatchError, match=r"channels\.forward"):
        layer(np.ones((2, CHANNELS + (hvd.rank() == 1)), np.float32), training=True)


test_on_tensorflow = session.on_ranks(globals(), 2, push=[2], session="tensorflow")


@tiers.full
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("size", [2, 4])
def test_on_torch(case: str, size: int) -> None:
    mpirun.cases_of(__file__, size, KERAS_BACKEND="torch").check(case)


def test_other_backends_are_told_a_way_out() -> None:
    from hororing.keras import batch_norm

    layer = batch_norm._NoSyncBatchNormalization
    with (
        mock.patch.object(keras.backend, "backend", return_value="jax"),
        pytest.raises(ValueError, match=r"SyncBatchNormalization 'bn3': .* is jax.*KERAS_BACKEND"),
    ):
        layer(name="bn3")
    with (
        mock.patch.object(keras.backend, "backend", return_value="jax"),
        pytest.raises(ValueError, match=r"on JAX .* after fit"),
    ):
        AverageMovingStatistics().on_train_begin()
