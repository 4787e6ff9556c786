"""The overhead of communication in a Keras training step, on one host.

    mpirun -np 2 python benchmarks/keras_step.py

Variants, with the same model and batches, in the same processes:

    plain      no communication: the baseline
    hororing   DistributedOptimizer
    mwms       tf.distribute.MultiWorkerMirroredStrategy with its ring over gRPC

`--loop fit` is model.fit, in which Keras 3 cannot run MultiWorkerMirroredStrategy (compute_loss
raises a ValueError for a PerReplica value). `--loop custom` is the same step in a tf.function, for
all three.

The variants take turns, a series of steps each, which all ranks begin together. A series' time is
that of the slowest rank. Printed are, in ms per step, the median and the 10th to 90th percentile of
the series, and the median of the difference to plain's series of the same round. On a shared
machine, only ratios are meaningful.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import numpy as np
import tensorflow as tf
from record import arguments, save
from turns import summary

import hororing.numpy as hvd_numpy
import hororing.tensorflow as hvd
import hororing.tensorflow.keras as hvd_keras

BATCH = 32


def layers_200(count: int = 200) -> tuple[keras.Model, tuple[int, ...]]:
    """200 small layers: 402 gradients, 3.3 MB."""
    dense = [keras.layers.Dense(64, activation="relu") for _ in range(count)]
    return keras.Sequential([keras.Input((64,)), *dense, keras.layers.Dense(10)]), (64,)


def convolutional() -> tuple[keras.Model, tuple[int, ...]]:
    """A convolutional model of 11 MB."""
    layers: list[Any] = [keras.Input((32, 32, 3))]
    for filters in (32, 64, 128, 256):
        for _ in range(2):
            layers += [
                keras.layers.Conv2D(filters, 3, padding="same", use_bias=False),
                keras.layers.BatchNormalization(),
                keras.layers.ReLU(),
            ]
        layers.append(keras.layers.MaxPooling2D())
    layers += [keras.layers.Flatten(), keras.layers.Dense(384, activation="relu")]
    return keras.Sequential([*layers, keras.layers.Dense(10)]), (32, 32, 3)


MODELS = {"layers": layers_200, "conv": convolutional}
NAMES = {"mwms": "MultiWorkerMirroredStrategy"}


def strategy_of_tensorflow() -> tf.distribute.Strategy:
    """Return TensorFlow's own strategy over the ranks. REQUIRES: TensorFlow is not in use yet."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    os.environ["TF_CONFIG"] = json.dumps(
        {
            "cluster": {"worker": hvd.allgather_object(address)},
            "task": {"type": "worker", "index": hvd.rank()},
        }
    )
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    return tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(implementation=ring)
    )


def compiled(model: keras.Model, optimizer: Any) -> keras.Model:
    loss = keras.losses.SparseCategoricalCrossentropy(
        from_logits=True, reduction="sum_over_batch_size"
    )
    model.compile(optimizer, loss, jit_compile=False)
    return model


def custom_loop(model: keras.Model, strategy: Any, x: Any, y: Any) -> Callable[[int], float]:
    """Return a function that runs the given number of steps, and returns the seconds per step."""

    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = model.compute_loss(images, labels, model(images, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    traced = tf.function(
        step if strategy is None else lambda *batch: strategy.run(step, batch), jit_compile=False
    )
    batch = tf.constant(x[:BATCH]), tf.constant(y[:BATCH])

    def run(steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            traced(*batch)
        return (time.perf_counter() - begin) / steps

    return run


class _Clock(keras.callbacks.Callback):
    """Records the ends of batches: fit spends another 310 to 1270 ms around them, even alone."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.perf_counter())


def fit_loop(model: keras.Model, x: Any, y: Any) -> Callable[[int], float]:
    data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()

    def run(steps: int) -> float:
        clock = _Clock()
        model.fit(data, steps_per_epoch=steps, verbose=0, callbacks=[clock], shuffle=False)
        return (clock.ends[-1] - clock.ends[0]) / (steps - 1)

    return run


def main(argv: list[str] | None = None) -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", choices=MODELS, default="layers")
    parser.add_argument("--loop", choices=["fit", "custom"], default="fit")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="in a series")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.steps = 1, 2
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvd.init()
    strategy = strategy_of_tensorflow() if options.loop == "custom" else None
    make = (lambda: layers_200(2)) if options.quick else MODELS[options.model]
    plain, shape = make()
    ours, _ = make()
    models = {
        "plain": compiled(plain, keras.optimizers.SGD(0.001)),
        "hororing": compiled(ours, hvd_keras.DistributedOptimizer(keras.optimizers.SGD(0.001))),
    }
    rng = np.random.default_rng(hvd.rank())
    x = rng.standard_normal((BATCH * options.steps, *shape)).astype(np.float32)
    y = rng.integers(0, 10, BATCH * options.steps)
    if strategy is None:
        ways = {way: fit_loop(model, x, y) for way, model in models.items()}
    else:
        ways = {way: custom_loop(model, None, x, y) for way, model in models.items()}
        with strategy.scope():
            mirrored = compiled(make()[0], keras.optimizers.SGD(0.001))
        ways["mwms"] = custom_loop(mirrored, strategy, x, y)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(options.rounds + 2):
        for way, run in ways.items():
            hvd_numpy.barrier()
            mine = np.array(1e3 * run(options.steps))
            times[way].append(float(hvd_numpy.allreduce(mine, op=hvd.Max)))
    if hvd.rank() == 0:
        print(f"{options.model}, {options.loop}, {hvd.size()} ranks, ms per step")
        base = np.array(times["plain"][2:])  # without the first two, in which TensorFlow traces
        rows = []
        for way, series in times.items():
            samples = np.array(series[2:])
            low, middle, high = np.percentile(samples, [10, 50, 90])
            over = np.percentile(1e3 * (samples - base), (10, 50, 90))
            rows.append({
                "measure": f"Keras step, {options.loop}", "case": options.model,
                "who": NAMES.get(way, way), **summary(samples / 1e3), "overhead_us": over[1],
                "overhead_p10_us": over[0], "overhead_p90_us": over[2],
            })  # fmt: skip
            print(
                f"  {way:9} {middle:8.2f}  {low:8.2f} .. {high:8.2f}   over plain: "
                f"{np.median(samples - base):8.2f}"
            )
        save(options.json, rows)
    hvd_numpy.barrier()


if __name__ == "__main__":
    main()
