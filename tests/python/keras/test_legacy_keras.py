"""hororing.tensorflow.keras if tf.keras is Keras 2: tf_keras, with TF_USE_LEGACY_KERAS=1.

Push tier, one separate job of 2 ranks: the variable must be set before TensorFlow is imported.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import mpirun
import numpy as np
import pytest

if __name__ == "cases":  # on the ranks
    import keras
    import tensorflow as tf

    import hororing.keras
    import hororing.tensorflow
    import hororing.tensorflow.keras as hvd

BATCH = 8


def case_start() -> None:
    hvd.init()
    assert tf.keras.Model.__module__.startswith("tf_keras.")
    assert hvd.callbacks.__name__ == "hororing.tensorflow.keras.callbacks"


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(mpirun.seed())
    return (
        rng.normal(size=(8 * BATCH, 3)).astype("float32"),
        rng.normal(size=(8 * BATCH, 1)).astype("float32"),
    )


def network(seed: int = 0) -> Any:
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,))])


def trained(model: Any, optimizer: Any, ranks: int, batch: int = BATCH, **options: Any) -> Any:
    """Return the model, trained as one of `ranks` ranks: on this rank's rows, or on all rows."""
    x, y = data()
    mine = slice(hvd.rank(), None, hvd.size()) if ranks > 1 else slice(None)
    # Scripts for Horovod pass experimental_run_tf_function.
    model.compile(optimizer, "mse", metrics=["mae"], experimental_run_tf_function=False)
    model.history = model.fit(
        x[mine], y[mine], batch_size=batch // ranks, shuffle=False, verbose=0, **options
    ).history
    return model


def same_weights(model: Any, expected: Any) -> None:
    for value, wanted in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


def optimizers() -> list[Any]:
    legacy = tf.keras.optimizers.legacy
    return [
        lambda: tf.keras.optimizers.SGD(0.1, momentum=0.9),
        lambda: tf.keras.optimizers.Adam(0.1),
        lambda: legacy.SGD(0.1, momentum=0.9),
        lambda: legacy.Adam(0.1),
    ]


def case_training_is_that_of_one_process_with_all_rows() -> None:
    for make in optimizers():
        expected = trained(network(), make(), 1, epochs=2)
        optimizer = make()
        assert hvd.DistributedOptimizer(optimizer, compression=hvd.Compression.none) is optimizer
        assert type(optimizer) is not type(make())
        assert isinstance(optimizer, type(make()))
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
        model = trained(network(), optimizer, hvd.size(), epochs=2, callbacks=callbacks)
        same_weights(model, expected)


def case_gradients_add_up_over_several_batches() -> None:
    for make in optimizers()[::2]:
        expected = trained(network(), make(), 1, batch=2 * BATCH, epochs=2)
        optimizer = hvd.DistributedOptimizer(
            make(), backward_passes_per_step=2, average_aggregated_gradients=True
        )
        model = trained(network(), optimizer, hvd.size(), epochs=2)
        same_weights(model, expected)
        assert int(optimizer.iterations) == 8  # updates: 2 epochs of 8 batches
        scaled = tf.keras.mixed_precision.LossScaleOptimizer(make())
        hvd.DistributedOptimizer(
            scaled, backward_passes_per_step=2, average_aggregated_gradients=True
        )
        same_weights(trained(network(), scaled, hvd.size(), epochs=2), expected)
    # Batch by batch in Python, where the first batch reduces nothing.
    model = network()
    model.compile(hvd.DistributedOptimizer(make(), backward_passes_per_step=2), "mse",
                  run_eagerly=True)  # fmt: skip
    callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0)]
    model.fit(*data(), BATCH, callbacks=callbacks, verbose=0)


def case_a_copy_of_an_optimizer_counts_its_own_passes() -> None:
    for make in optimizers()[::2]:
        first = hvd.DistributedOptimizer(make(), backward_passes_per_step=2)
        for optimizer in (first, first.from_config(first.get_config())):
            variable = tf.Variable(1.0)
            optimizer.apply_gradients([(tf.constant(1.0), variable)])
            assert float(variable) == 1.0


def case_passes_begin_again_where_an_elastic_state_is_sent() -> None:
    for make in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        for wrap in (lambda each: each, tf.keras.mixed_precision.LossScaleOptimizer):
            model = network()
            optimizer = hvd.DistributedOptimizer(make(1.0), backward_passes_per_step=2)
            state = hvd.elastic.KerasState(model, wrap(optimizer))
            before = model.get_weights()
            pairs = [(tf.ones_like(each), each) for each in model.trainable_variables]
            if hvd.rank() == 0:
                optimizer.apply_gradients([(99 * gradient, each) for gradient, each in pairs])
            state.sync()
            for _ in range(2):
                optimizer.apply_gradients(pairs)
            for value, old in zip(model.get_weights(), before, strict=True):
                np.testing.assert_allclose(value, old - 2, rtol=1e-5)


def case_options_reach_the_reduction() -> None:
    for make in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        kernel, local = tf.Variable([1.0, 2.0]), tf.Variable(3.0)
        optimizer = hvd.DistributedOptimizer(make(1.0), op=hvd.Sum, groups=[[kernel]])
        optimizer.register_local_var(local)
        gradient = tf.constant([1.0, 1.0]) * (hvd.rank() + 1.0)
        optimizer.apply_gradients([(gradient, kernel), (tf.constant(2.0), local)])
        np.testing.assert_allclose(kernel, [-2.0, -1.0])
        np.testing.assert_allclose(local, 3.0 - 2.0 / hvd.size())
        # A script that has reduced already asks for no aggregation.
        optimizer.apply_gradients([(gradient, kernel)], experimental_aggregate_gradients=False)
        np.testing.assert_allclose(kernel, [-2.0 - hvd.rank() - 1, -1.0 - hvd.rank() - 1])
        with pytest.raises(ValueError, match="more than once"):
            hvd.DistributedOptimizer(make(1.0), groups=[[kernel, local], [kernel]])


def case_layers_of_each_rank() -> None:
    layer = tf.keras.layers.Dense(1, input_shape=(3,))
    model = tf.keras.Sequential([layer])
    optimizer = hvd.PartialDistributedOptimizer(
        tf.keras.optimizers.SGD(1.0), local_layers=layer, scale_local_gradients=False
    )
    before = layer.kernel.numpy()
    optimizer.apply_gradients([(tf.fill([3, 1], float(hvd.rank())), layer.kernel)])
    np.testing.assert_allclose(layer.kernel, before - hvd.rank(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="layers"):
        hvd.PartialDistributedOptimizer(tf.keras.optimizers.SGD(), local_layers=[model, 3])


def case_an_overflow_on_one_rank_skips_the_step_on_all() -> None:
    scaled = tf.keras.mixed_precision.LossScaleOptimizer
    for make in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        for optimizer in (
            scaled(hvd.DistributedOptimizer(make(1.0))),
            hvd.DistributedOptimizer(scaled(make(1.0))),
        ):
            variable = tf.Variable(1.0)

            @tf.function
            def step(g: Any, optimizer: Any = optimizer, variable: Any = variable) -> None:
                optimizer.apply_gradients([(g, variable)])

            step(tf.constant(np.inf if hvd.rank() == 0 else 1.0))
            assert float(variable) == 1.0
            step(tf.constant(float(hvd.rank())))
            np.testing.assert_allclose(variable, 1.0 - (hvd.size() - 1) / 2)


def case_callbacks() -> None:
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp()))
    best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
    best.filepath = str(folder / f"{hvd.rank()}.keras")
    for make in optimizers():
        optimizer = hvd.DistributedOptimizer(make())
        rate = 0.1 * hvd.size()
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.MetricAverageCallback(),
            hvd.callbacks.LearningRateWarmupCallback(initial_lr=rate, warmup_epochs=2),
            hvd.callbacks.LearningRateScheduleCallback(rate, 0.1, start_epoch=2),
            best,
        ]
        model = trained(network(hvd.rank()), optimizer, 2, epochs=3, callbacks=callbacks)
        for value in (*model.get_weights(), *(each.numpy() for each in optimizer.variables())):
            everywhere = hvd.allgather(np.asarray(value)[None])
            np.testing.assert_array_equal(everywhere, [value] * hvd.size())
        losses = hvd.allgather(np.array([model.history["loss"]]))
        np.testing.assert_array_equal(losses[0], losses[1])
        np.testing.assert_allclose(model.history["lr"][1:], [rate, 0.1 * rate], rtol=1e-5)
    hvd.barrier()
    assert [each.name for each in folder.iterdir()] == ["0.keras"]


def case_callbacks_serve_several_trainings() -> None:
    broadcast, sgd = hvd.callbacks.BroadcastGlobalVariablesCallback(0), tf.keras.optimizers.SGD
    for seed in (hvd.rank(), 10 + hvd.rank()):
        model = trained(network(seed), hvd.DistributedOptimizer(sgd(0.1)), 2, callbacks=[broadcast])
        for weights in hvd.allgather_object(model.get_weights()):
            for value, wanted in zip(weights, model.get_weights(), strict=True):
                np.testing.assert_array_equal(value, wanted)

    class Asking(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            hvd.allreduce(1.0, name="asking")

    for callbacks in ([broadcast], [Asking(), broadcast]):
        with pytest.raises(RuntimeError, match="no gradient went through"):
            trained(model, sgd(0.1), 2, callbacks=callbacks)
    model = network() if hvd.rank() == 0 else tf.keras.Sequential([tf.keras.layers.Dense(1)])
    with pytest.raises(RuntimeError, match=r"on ranks \[0\] and none yet on ranks \[1\]"):
        trained(model, hvd.DistributedOptimizer(sgd(0.1)), 2, callbacks=[broadcast])


def case_momentum_follows_the_rate() -> None:
    for make in optimizers()[::2]:
        optimizer = hvd.DistributedOptimizer(make())
        model = trained(network(), optimizer, 2)
        callback = hvd.callbacks.LearningRateScheduleCallback(0.1, 0.5)
        callback.set_model(model)
        legacy = hasattr(optimizer, "get_slot")
        kernel = model.trainable_variables[0]
        velocity = optimizer.get_slot(kernel, "momentum") if legacy else optimizer.momentums[0]
        before = velocity.numpy()
        callback.on_epoch_begin(0)
        callback.on_train_batch_begin(0)
        np.testing.assert_allclose(velocity, before / 2, rtol=1e-5)
        assert np.any(before != 0)


def case_files_hold_plain_optimizers_and_their_state() -> None:
    for make in optimizers()[::2]:
        model = trained(network(), hvd.DistributedOptimizer(make()), 2)
        path = os.path.join(tempfile.mkdtemp(), "model.h5")  # .keras lacks legacy state
        model.save(path)
        loaded = tf.keras.models.load_model(path)
        assert type(loaded.optimizer) is type(make())
        loaded = hvd.load_model(path)
        assert int(loaded.optimizer.iterations) == 8
        with pytest.raises(ValueError, match="distributed already"):
            hvd.DistributedOptimizer(loaded.optimizer)


def case_what_cannot_work_says_so() -> None:
    x, y = data()
    model = network()
    model.compile(tf.keras.optimizers.SGD(), "mse")
    with pytest.raises(RuntimeError, match="no gradient went through"):
        model.fit(x, y, verbose=0, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    with pytest.raises(TypeError, match="unset TF_USE_LEGACY_KERAS"):
        hvd.DistributedOptimizer(keras.optimizers.SGD())
    with pytest.raises(ValueError, match="op=Adasum is not available for tf_keras"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(), op=hvd.Adasum)
    with pytest.raises(NotImplementedError, match=r"DistributedGradientTape\(tape, weight=\)"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD()).weight = 2
    with pytest.raises(ValueError, match="Keras 3"):
        hororing.tensorflow.SyncBatchNormalization()
    with pytest.raises(TypeError, match=r"hororing.tensorflow.keras.*TF_USE_LEGACY_KERAS=1"):
        hororing.keras.DistributedOptimizer(tf.keras.optimizers.SGD())


def case_the_optimizer_of_tensorflow_and_its_variables() -> None:
    optimizer = hororing.tensorflow.DistributedOptimizer(tf.keras.optimizers.SGD(1.0))
    variable = tf.Variable(float(hvd.rank()))
    optimizer.apply_gradients([(tf.constant(0.0), variable)])
    hororing.tensorflow.broadcast_variables([variable], root_rank=1)
    hororing.tensorflow.broadcast_variables(optimizer.variables(), root_rank=1)
    assert float(variable) == 1.0


@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_legacy_keras(case: str):
    pytest.importorskip("tf_keras")
    mpirun.cases_of(__file__, 2, TF_USE_LEGACY_KERAS="1").check(case)
