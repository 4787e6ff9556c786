"""SyncBatchNormalization on 1 to 4 ranks against Keras' layer over all batches in one process."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import mpirun
import numpy as np
import pytest
import session
import tensorflow as tf
import tiers

import hororing.tensorflow as hvd
from hororing import errors
from hororing._requests.process_sets import ProcessSet, add_process_set, global_process_set
from hororing.tensorflow import sync_batch_norm

CHANNELS = 3
EXACT = 1e-10

Step = Callable[..., Any]


def batches(
    rows: Sequence[int], tail: tuple[int, ...], *key: int, axis: int = -1
) -> list[np.ndarray]:
    """Return a batch per rank; means and scales differ between ranks and channels."""
    rng = np.random.default_rng([mpirun.seed(), *key])
    scale = np.arange(1, CHANNELS + 1)
    parts = [
        rng.normal(rank, 1 + rank, (n, *tail, CHANNELS)) * scale + scale
        for rank, n in enumerate(rows)
    ]
    return [np.moveaxis(part, -1, axis) for part in parts]


def uneven_rows() -> list[int]:
    return [2 + 3 * rank % 5 for rank in range(hvd.size())]


def pair(
    shape: tuple[int | None, ...] = (None, CHANNELS), **options: Any
) -> tuple[hvd.SyncBatchNormalization, keras.layers.BatchNormalization]:
    """Return a layer and its oracle, with equal weights other than 1 and 0."""
    options = {"dtype": "float64", **options}
    layer = hvd.SyncBatchNormalization(**options)
    for name in ("group_size", "process_set", "name"):
        options.pop(name, None)
    whole = keras.layers.BatchNormalization(**options)
    for model in (layer, whole):
        model.build(shape)
        model.set_weights([np.linspace(1, 2, CHANNELS) + at for at in range(len(model.weights))])
    return layer, whole


def close(actual: Any, wanted: Any, tolerance: float = EXACT) -> None:
    actual, wanted = (np.asarray(each).astype(np.float64) for each in (actual, wanted))
    np.testing.assert_allclose(actual, wanted, tolerance, tolerance)


def step(layer: Any, input: tf.Tensor, weights: tf.Tensor, mask: Any = None) -> Any:
    """Return the output of a training step, and the gradients of the input and of the weights."""
    with tf.GradientTape() as tape:
        tape.watch(input)
        options = {} if mask is None else {"mask": mask}
        output = layer(input, training=True, **options)
        loss = tf.reduce_sum(output * tf.cast(weights, output.dtype))
    return output, tape.gradient(loss, [input, *layer.trainable_variables])


def in_graph(layer: Any, dimensions: int, axis: int = -1) -> Step:
    """Return the same step as a graph that knows only the channels of the shapes."""
    shape: list[int | None] = [None] * dimensions
    shape[axis] = CHANNELS
    return tf.function(
        lambda *given: step(layer, *given),
        input_signature=[
            tf.TensorSpec(shape, tf.float64),
            tf.TensorSpec([None] * dimensions, tf.float64),
        ],
    )


def agree(
    layer: Any,
    whole: Any,
    parts: list[np.ndarray],
    tolerance: float = EXACT,
    *,
    masks: list[np.ndarray] | None = None,
    members: Sequence[int] | None = None,
    process_set: ProcessSet = global_process_set,
    graph: Step | None = None,
) -> None:
    """Compare all results and effects of a training step.

    `parts` are the members' batches; `whole` gets them joined. `graph` is the step of `layer`.
    """
    members = range(hvd.size()) if members is None else members
    position = list(members).index(hvd.rank())
    joined = np.concatenate(parts)
    weights = np.cos(3 * joined)
    bounds = np.cumsum([0, *map(len, parts)])
    mine = slice(bounds[position], bounds[position + 1])
    mask = None if masks is None else tf.constant(np.concatenate(masks))
    wanted, (input_gradient, *wanted_gradients) = step(
        whole, tf.constant(joined), tf.constant(weights), mask
    )
    given = [tf.constant(parts[position]), tf.constant(weights[mine])]
    if masks is not None:
        given.append(tf.constant(masks[position]))
    output, (gradient, *gradients) = step(layer, *given) if graph is None else graph(*given)
    close(output, wanted[mine], tolerance)
    close(gradient, input_gradient[mine], tolerance)
    assert len(gradients) == len(wanted_gradients)
    for ours, theirs in zip(gradients, wanted_gradients, strict=True):
        total = hvd.allreduce(ours, op=hvd.Sum, process_set=process_set)
        close(total, theirs, tolerance * max(1, len(joined)))
    close_weights(layer, whole, tolerance)


def close_weights(layer: Any, whole: Any, tolerance: float = EXACT) -> None:
    for ours, theirs in zip(layer.weights, whole.weights, strict=True):
        assert ours.dtype == theirs.dtype
        close(ours, theirs, tolerance)


@contextmanager
def requests() -> Iterator[list[str]]:
    """Yield the names of requests that are sent, or added to a graph, during the block."""
    names: list[str] = []

    def recording(sent: Any) -> Any:
        names.extend(request.name for request in sent)
        return carry_out(sent)

    carry_out = sync_batch_norm.carry_out
    with mock.patch.object(sync_batch_norm, "carry_out", recording):
        yield names


# ---------------------------------------------------------------------------------------------
# Cases, on every rank


def case_before_init() -> None:
    layer = hvd.SyncBatchNormalization()
    with pytest.raises(errors.NotInitializedError, match=r"use hvd\.init\(\)"):
        layer(tf.ones((4, CHANNELS)), training=True)
    layer(tf.ones((4, CHANNELS)))
    with pytest.raises(errors.NotInitializedError):
        hvd.SyncBatchNormalization(group_size=1)
    hvd.init(process_sets="dynamic")
    keras.config.set_dtype_policy("float64")
    agree(*pair(), batches(uneven_rows(), ()))


def case_equals_one_large_batch() -> None:
    options: list[dict[str, Any]] = [
        {},
        {"center": False, "momentum": 0.5},
        {"scale": False, "momentum": 0.0, "epsilon": 0.5},
        {"center": False, "scale": False, "momentum": 1.0},
        {"renorm": True, "renorm_clipping": {"rmax": 1.5, "dmax": 0.5}},
    ]
    for key, chosen in enumerate(options):
        for tail, axis in [((), -1), ((5,), -1), ((2, 3), 1)] if key == 0 else [((5,), 1)]:
            input = batches([4], tail, key, axis=axis)[0]
            layer, whole = pair((None, *input.shape[1:]), axis=axis, **chosen)
            for number in range(2):
                rows = uneven_rows()[number:] + uneven_rows()[:number]
                agree(layer, whole, batches(rows, tail, key, number, axis=axis))
            close(layer(input), whole(input))


def case_graphs_with_unknown_shapes() -> None:
    for axis in (-1, 1):
        layer, whole = pair((None, CHANNELS, CHANNELS), axis=axis)
        graph = in_graph(layer, 3, axis)
        for number in range(3):
            rows = uneven_rows()[number:] + uneven_rows()[:number]
            tail = (CHANNELS + number,)
            agree(layer, whole, batches(rows, tail, 1, number, axis=axis), graph=graph)
        assert graph.experimental_get_tracing_count() == 1


def case_masks() -> None:
    rng = np.random.default_rng([mpirun.seed(), 2])
    for axis, tail in ((-1, (2, 3)), (1, (4,))):
        layer, whole = pair((None, *batches([1], tail, axis=axis)[0].shape[1:]), axis=axis)
        for number in range(2):
            parts = batches(uneven_rows(), tail, 2, number, axis=axis)
            masks = [rng.random(part.shape[:-1]) < 0.6 for part in parts]
            masks[number % len(masks)][...] = number == 1  # masks nothing or everything of a rank
            masks[-1].flat[:2] = True
            if axis == 1:
                masks[-1][:2] = True  # every channel has values
            for part, mask in zip(parts, masks, strict=True):
                part[~mask] = 1e3
            agree(layer, whole, parts, masks=masks)
    # With a mask, Keras accepts batches without values.
    layer, whole = pair((None, 4, CHANNELS))
    parts = batches(uneven_rows(), (4,), 3)
    agree(layer, whole, parts, masks=[np.zeros(part.shape[:-1], bool) for part in parts])


def case_masks_reach_the_layer_in_a_model() -> None:
    def model(norm: Any) -> keras.Model:
        return keras.Sequential([keras.Input((4, CHANNELS)), keras.layers.Masking(0.0), norm])

    layer, whole = (model(norm) for norm in pair((None, 4, CHANNELS)))
    parts = batches(uneven_rows(), (4,), 4)
    for part in parts:
        part[:, 3] = 0
    agree(layer, whole, parts)
    agree(layer, whole, parts, graph=in_graph(layer, 3))


def case_float32_is_exact_far_from_zero() -> None:
    # The variance is 1. Sums of squares would lose all its digits: 1e4^2 * 2^-24 is 6.
    for offset in (1e3, 1e4, 1e6):
        rng = np.random.default_rng([mpirun.seed(), 5])
        joined = (rng.normal(size=(hvd.size(), 50, 4, CHANNELS)) + offset).astype(np.float32)
        layer = hvd.SyncBatchNormalization(momentum=0.0, dtype="float32")
        layer(joined[hvd.rank()], training=True)
        if hvd.size() > 1:  # a single rank uses Keras' computation
            joined = joined.astype(np.float64)
            close(layer.moving_variance, joined.var((0, 1, 2)), 1e-6)
            close(layer.moving_mean / offset, joined.mean((0, 1, 2)) / offset, 1e-6)


def case_mixed_precision_has_float32_statistics() -> None:
    for policy, unit in (("mixed_float16", 2**-10), ("mixed_bfloat16", 2**-7)):
        layer, _ = pair((None, 2, CHANNELS), dtype=policy)
        _, whole = pair((None, 2, CHANNELS))
        dtype = keras.DTypePolicy(policy).compute_dtype
        parts = [tf.cast(part, dtype) for part in batches([300] * hvd.size(), (2,), 6)]
        joined = tf.cast(tf.concat(parts, 0), tf.float64)
        mine = slice(300 * hvd.rank(), 300 * (hvd.rank() + 1))
        weights = tf.cos(3 * joined)
        wanted, (wanted_gradient, *_) = step(whole, joined, weights)
        output, (gradient, gamma_gradient, _) = step(layer, parts[hvd.rank()], weights[mine])
        assert output.dtype == gradient.dtype == tf.as_dtype(dtype)
        assert gamma_gradient.dtype == layer.moving_variance.dtype == tf.float32
        scale = tf.reduce_max(tf.abs(wanted)), tf.reduce_max(tf.abs(wanted_gradient))
        close(tf.cast(output, tf.float64) / scale[0], wanted[mine] / scale[0], 4 * unit)
        close(tf.cast(gradient, tf.float64) / scale[1], wanted_gradient[mine] / scale[1], 4 * unit)
        close(layer.moving_mean, whole.moving_mean, 1e-5)
        close(layer.moving_variance, whole.moving_variance, 1e-5)


def case_some_batches_are_empty() -> None:
    size = hvd.size()
    for tail in ((), (5,)):
        layer, whole = pair((None, *tail, CHANNELS))
        graph = in_graph(layer, len(tail) + 2)
        for empty in range(size):
            one = [0 if rank == empty and size > 1 else 2 + rank for rank in range(size)]
            others = [3 if rank == empty else 0 for rank in range(size)]
            agree(layer, whole, batches(one, tail, 7))
            agree(layer, whole, batches(others, tail, 8), graph=graph)
    # One value is enough for Keras, with a variance of 0.
    agree(*pair(), batches([1] + [0] * (size - 1), (), 10))


def case_no_values_fail_on_every_rank() -> None:
    if hvd.size() == 1:
        return  # the layer is Keras' own here
    layer, whole = pair(name="few")
    graph = in_graph(layer, 2)
    nothing = tf.zeros((0, CHANNELS), tf.float64)
    before = layer.get_weights()
    with pytest.raises(ValueError, match="'few': the batches of all ranks are empty"):
        step(layer, nothing, nothing)
    with pytest.raises(tf.errors.InvalidArgumentError, match=r"few\\*': the batches of all"):
        graph(nothing, nothing)
    close(layer.get_weights(), before)
    agree(layer, whole, batches(uneven_rows(), ()))
    agree(layer, whole, batches(uneven_rows(), ()), graph=graph)


def case_inference_sends_nothing() -> None:
    layer, whole = pair()
    agree(layer, whole, batches(uneven_rows(), (), 11))
    with requests() as names:
        if hvd.rank() == 0:
            input = batches([4], (), 12)[0]
            close(layer(input), whole(input))
            for model in (layer, whole):
                model.trainable = False
            (ours, gradients), (theirs, wanted) = (
                step(model, tf.constant(input), tf.ones((4, CHANNELS))) for model in (layer, whole)
            )
            close(ours, theirs)
            close(gradients[0], wanted[0])
            close_weights(layer, whole)
    assert names == []


def case_one_request_per_pass_under_the_name_of_the_layer() -> None:
    if hvd.size() > 2:
        return  # graphs take seconds to build, and nothing here depends on the size
    layer, other = pair(name="mine")[0], pair(name="mine")[0]
    inner = keras.Sequential([keras.layers.Dense(CHANNELS), other])
    model = keras.Sequential([keras.Input((CHANNELS,)), layer, inner])
    # There are no weights before the first layer, so it has no backward request.
    eager = ["mine.forward", "mine.forward", "mine.backward"]
    input = tf.random.normal((4, CHANNELS), dtype=tf.float64)

    def train(input: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.sin(model(input, training=True)))
        return tape.gradient(loss, model.trainable_variables)

    for _ in range(2):
        with requests() as names:
            train(input)
        assert names == (eager if hvd.size() > 1 else [])
    for _ in range(2):  # traced again: the same names
        with requests() as names:
            tf.function(train)(input)
        wanted = [f"train/{name}.{at}" for name, at in zip(eager, (1, 2, 1), strict=True)]
        assert names == (wanted if hvd.size() > 1 else [])


def case_one_layer_several_times_in_a_model() -> None:
    def model(norm: Any) -> keras.Model:
        input = keras.Input((2, CHANNELS))
        inner = keras.Sequential([norm, keras.layers.Activation("tanh")])
        return keras.Model(input, norm(inner(norm(input)) * 2 + inner(input)))

    layer, whole = (model(norm) for norm in pair((None, 2, CHANNELS)))
    graph = in_graph(layer, 3)
    for number in range(2):
        parts = batches(uneven_rows(), (2,), 13, number)
        agree(layer, whole, parts, 1e-9)
        agree(layer, whole, parts, 1e-9, graph=graph)


def case_traced_functions_called_twice_in_a_graph() -> None:
    layer, whole = pair()

    class Twice(keras.Layer):
        def __init__(self, norm: Any, call: Any) -> None:
            super().__init__()
            self.norm, self.norm_call = norm, call

        def call(self, input: tf.Tensor) -> tf.Tensor:
            return self.norm_call(input) + self.norm_call(tf.sin(input))

    ours = Twice(layer, tf.function(lambda input: layer(input, training=True)))
    theirs = Twice(whole, lambda input: whole(input, training=True))
    parts = batches(uneven_rows(), (), 14)
    agree(ours, theirs, parts)
    graph = in_graph(ours, 2)
    for _ in range(3):
        agree(ours, theirs, parts, graph=graph)


def case_tapes_around_graphs() -> None:
    if hvd.size() > 2:
        return  # graphs take seconds to build, and nothing here depends on the size
    layer, whole = pair()
    forward = tf.function(lambda input: layer(input, training=True))
    part, joined = (
        tf.constant(each)
        for each in (batches(uneven_rows(), (), 15)[hvd.rank()],
                     np.concatenate(batches(uneven_rows(), (), 15)))
    )  # fmt: skip
    gradients = []
    for input, call in ((part, forward), (joined, lambda input: whole(input, training=True))):
        with tf.GradientTape() as outer:  # computes no gradient
            outer.watch(input)
            with tf.GradientTape(persistent=True) as tape:
                tape.watch(input)
                loss = tf.reduce_sum(tf.sin(call(input)))
            gradients.append(tape.gradient(loss, input))
    before = sum(uneven_rows()[: hvd.rank()])
    close(gradients[0], gradients[1][before : before + len(part)])


def case_no_second_order_gradients() -> None:
    if hvd.size() != 2:
        return  # a single rank uses Keras' own layer
    layer, _ = pair()
    forward = tf.function(lambda input: layer(input, training=True))
    input = tf.constant(batches(uneven_rows(), (), 16)[hvd.rank()])
    for call, error in (
        (lambda input: layer(input, training=True), NotImplementedError),
        (forward, tf.errors.InvalidArgumentError),
    ):
        with tf.GradientTape() as outer:
            outer.watch(input)
            with tf.GradientTape() as tape:
                tape.watch(input)
                loss = tf.reduce_sum(tf.sin(call(input)))
            gradient = tape.gradient(loss, input)
        with pytest.raises(error, match="has no second-order gradients; use keras"):
            outer.gradient(gradient, input)


def case_wrong_arguments() -> None:
    for fused in (True, None):
        with pytest.raises(ValueError, match=f"fused={fused} is not supported"):
            hvd.SyncBatchNormalization(fused=fused)
    with pytest.raises(ValueError, match=r"synchronized=True is for tf\.distribute; leave it out"):
        hvd.SyncBatchNormalization(synchronized=True)
    with pytest.raises(TypeError, match="must be a ProcessSet, not list"):
        hvd.SyncBatchNormalization(process_set=[0])
    for backend, remedy in (("torch", r"hororing\.keras\.batch_norm\."), ("jax", "KERAS_BACKEND")):
        with (
            mock.patch.object(keras.backend, "backend", return_value=backend),
            pytest.raises(ValueError, match=f"{backend}; .*{remedy}"),
        ):
            hvd.SyncBatchNormalization()
    if hvd.size() > 1:
        channels = CHANNELS + (hvd.rank() == 1)
        uneven = hvd.SyncBatchNormalization(name="channels")
        with pytest.raises(errors.MismatchError, match=r"channels\.forward"):
            uneven(tf.ones((2, channels)), training=True)
        xla = tf.function(lambda x: uneven(x, training=True), jit_compile=True)
        with pytest.raises(ValueError, match="use jit_compile=False"):
            xla(tf.ones((2, channels)))
    agree(*pair(), batches(uneven_rows(), ()))


def case_configs_and_files() -> None:
    layer, whole = pair(momentum=0.5, epsilon=0.25)
    model = keras.Sequential([keras.Input((CHANNELS,)), layer, keras.layers.Activation("tanh")])
    plain = keras.Sequential([keras.Input((CHANNELS,)), whole, keras.layers.Activation("tanh")])
    agree(model, plain, batches(uneven_rows(), (), 17))
    config = layer.get_config()
    assert (config["process_set"], config["group_size"]) == (None, None)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "model.keras")
        model.save(file)
        loaded = keras.models.load_model(file)
    cloned = keras.models.clone_model(model)
    cloned.set_weights(model.get_weights())
    for twin in (loaded, cloned):
        again = twin.layers[0]
        assert type(again) is hvd.SyncBatchNormalization
        assert again.get_config() == config
        assert not again.supports_jit
        oracle = keras.models.clone_model(plain)
        oracle.set_weights(plain.get_weights())
        agree(twin, oracle, batches(uneven_rows(), (), 18))

    def plain_layer(each: Any) -> Any:  # the recipe of docs/tensorflow.md
        config = each.get_config()
        if not isinstance(each, hvd.SyncBatchNormalization):
            return type(each).from_config(config)
        del config["process_set"], config["group_size"]
        return keras.layers.BatchNormalization.from_config(config)

    served = keras.models.clone_model(model, clone_function=plain_layer)
    served.set_weights(model.get_weights())
    input = batches([4], (), 19)[0]
    close(served(input), model(input))


def case_fit_equals_one_process() -> None:
    if hvd.size() > 2:
        return  # graphs take seconds to build, and nothing here depends on the size

    class Averaging(keras.optimizers.SGD):
        def apply(self, grads: Any, trainable_variables: Any = None) -> Any:
            return super().apply(hvd.grouped_allreduce(grads), trainable_variables)

    def network(norm: Any, optimizer: Any, **options: Any) -> keras.Model:
        keras.utils.set_random_seed(mpirun.seed() % 2**31)
        model = keras.Sequential(
            [
                keras.Input((6, CHANNELS)),
                keras.layers.Dense(4),
                norm(),
                keras.layers.Activation("relu"),
                keras.layers.Flatten(),
                keras.layers.Dense(4),
                norm(),
                keras.layers.Dense(2),
            ]
        )
        model.compile(optimizer(0.05, momentum=0.9), "mse", **options)
        return model

    ours = network(hvd.SyncBatchNormalization, Averaging, steps_per_execution=2)
    theirs = network(keras.layers.BatchNormalization, keras.optimizers.SGD, run_eagerly=True)
    assert not ours.jit_compile
    steps = [batches([4] * hvd.size(), (6,), 20, number) for number in range(4)]
    inputs = np.concatenate([parts[hvd.rank()] for parts in steps])
    everything = np.concatenate([part for parts in steps for part in parts])
    inputs, everything = inputs.astype(np.float32), everything.astype(np.float32)
    for model, data in ((ours, inputs), (theirs, everything)):
        history = model.fit(
            data, np.sin(data[:, :2, 0]), batch_size=len(data) // 4, epochs=1, shuffle=False,
            verbose=0,
        )  # fmt: skip
        assert np.isfinite(history.history["loss"]).all()
    close_weights(ours, theirs, 1e-8)
    close(ours.predict(everything, verbose=0), theirs(everything), 1e-8)


def agree_in_groups(ranks: Sequence[int], group_size: int, **options: Any) -> None:
    layer, whole = pair((None, 2, CHANNELS), group_size=group_size, **options)
    if hvd.rank() not in ranks:
        return
    place = list(ranks).index(hvd.rank()) // group_size * group_size
    members = ranks[place : place + group_size]
    graph = in_graph(layer, 3)
    for number in range(2):
        parts = [batches(uneven_rows(), (2,), 21, number)[rank] for rank in members]
        if group_size > 1:
            chosen: dict[str, Any] = {"members": members, "process_set": layer._group}
            agree(layer, whole, parts, **chosen)
            agree(layer, whole, parts, graph=graph, **chosen)
            continue
        with requests() as names:
            ours, theirs = (step(each, *map(tf.constant, parts * 2)) for each in (layer, whole))
        assert names == []
        close(ours[0], theirs[0])
        close_weights(layer, whole)


def case_groups() -> None:
    size = hvd.size()
    for group_size in {1, size}:
        agree_in_groups(range(size), group_size)
    for bad in (0, -1, size + 1, 1.0, "2"):
        with pytest.raises(ValueError, match=f"group_size={bad!r} does not divide the {size} "):
            hvd.SyncBatchNormalization(group_size=bad)


def case_process_sets() -> None:
    size = hvd.size()
    if size == 1:
        return
    low, high = ProcessSet(range(size - 1)), ProcessSet(range(1, size))
    stranger = hvd.SyncBatchNormalization(process_set=low)
    with pytest.raises(TypeError, match="is not registered"):
        stranger(tf.ones((2, CHANNELS)), training=True)
    config = stranger.get_config()
    assert config["process_set"] == low.ranks
    early = hvd.SyncBatchNormalization.from_config(config)
    for process_set in (low, high):
        add_process_set(process_set)
    layers = [(each, *pair(process_set=each)) for each in (low, high)]
    for number in range(2):
        for process_set, layer, whole in layers:
            parts = batches(uneven_rows(), (), 22, number)
            if process_set.included():
                chosen = [parts[rank] for rank in process_set.ranks]
                members = {"members": process_set.ranks, "process_set": process_set}
                agree(layer, whole, chosen, **members)
            else:
                with pytest.raises(ValueError, match=f"rank {hvd.rank()} is not a member"):
                    layer(parts[0], training=True)
                layer(parts[0])
    # Layers from configurations made before and after the registration of the set.
    for twin in (early, hvd.SyncBatchNormalization.from_config(layers[0][1].get_config())):
        if low.included():
            parts = [batches(uneven_rows(), (), 23)[rank] for rank in low.ranks]
            whole = keras.layers.BatchNormalization()
            agree(twin, whole, parts, members=low.ranks, process_set=low)
        twin = hvd.SyncBatchNormalization.from_config(twin.get_config())
        assert twin.process_set is low
    hvd.allreduce(tf.zeros([]))


def case_init_again() -> None:
    size = hvd.size()
    layer, whole = pair(group_size=size)
    config = layer.get_config()
    hvd.shutdown()
    with pytest.raises(errors.NotInitializedError):
        layer(tf.ones((2, CHANNELS)), training=True)
    fresh = hvd.SyncBatchNormalization.from_config(config)
    hvd.init()
    fresh.build((None, CHANNELS))
    fresh.set_weights(layer.get_weights())
    parts = batches(uneven_rows(), (), 24)
    for each in (fresh, layer):
        each.set_weights(whole.get_weights())
        agree(each, whole, parts)


def groups_of_some_ranks() -> None:
    chosen = ProcessSet([0, 1, 3])
    hvd.init(process_sets=[chosen])
    keras.config.set_dtype_policy("float64")
    agree_in_groups(range(4), 2)
    agree_in_groups([0, 1, 3], 3, process_set=chosen)
    agree_in_groups([0, 1, 3], 1, process_set=chosen)
    with pytest.raises(ValueError, match="group_size=2 does not divide the 3 ranks"):
        hvd.SyncBatchNormalization(process_set=chosen, group_size=2)
    # Only the group without values fails.
    layer, _ = pair(group_size=2)
    if hvd.rank() < 2:
        layer(tf.ones((2, CHANNELS)), training=True)
    else:
        with pytest.raises(ValueError, match="the batches of all ranks are empty"):
            layer(tf.ones((0, CHANNELS)), training=True)
    hvd.allreduce(tf.zeros([]))


@tiers.full
def test_groups_of_some_ranks() -> None:
    job = mpirun.run(__file__, 4)
    assert job.returncode == 0, job.report()


test_case = session.on_ranks(globals(), 1, 2, 3, push=[2], session="tensorflow")


if __name__ == "__main__":
    groups_of_some_ranks()
