"""Cases for hororing.keras on every backend of Keras, for test_keras_*.py.

Only ranks import this file, with KERAS_BACKEND set. Every rank knows the data of all ranks.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import keras
import mpirun
import numpy as np
import pytest
from asked import asked_during
from keras import ops

import hororing.keras as hvd
from hororing import errors
from hororing._requests.names import default_name
from hororing.keras.distributed import Distributed
from hororing.toolkit.data.sharding import Shard, permutation
from hororing.toolkit.keras.data import ShardedArrays

BACKEND = keras.backend.backend()
# On torch, Keras computes losses in float32, whatever floatx is; on JAX, it rounds their divisor.
TOLERANCE = {"rtol": 1e-6, "atol": {"torch": 1e-6, "jax": 1e-7, "tensorflow": 1e-9}[BACKEND]}
STEPS, BATCH = 20, 12
FEATURES, OUTPUTS = 5, 2
Broadcast = hvd.callbacks.BroadcastGlobalVariablesCallback

hvd.init()
keras.config.set_floatx("float64")
RANDOM = np.random.default_rng(mpirun.seed())
X = RANDOM.normal(size=(STEPS * BATCH, FEATURES))
Y = RANDOM.normal(size=(STEPS * BATCH, OUTPUTS))


def mine(data: np.ndarray, steps: int = STEPS) -> np.ndarray:
    """Return this rank's part of every batch."""
    rank, size = hvd.rank(), hvd.size()
    batches = data[: steps * BATCH].reshape(steps, size, BATCH // size, *data.shape[1:])
    return batches[:, rank].reshape(-1, *data.shape[1:])


def network(seed: int = 0, built: bool = True) -> keras.Model:
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(7, activation="tanh"), keras.layers.Dense(OUTPUTS)]
    return keras.Sequential([*([keras.Input((FEATURES,))] if built else []), *layers])


def fit(model, optimizer, steps=STEPS, parts=1, callbacks=(), alone=False, **options):
    """Train on this rank's part of every batch, in `parts` pieces; with `alone`, on all of it."""
    model.compile(optimizer, "mse")
    x, y, size = (X[: steps * BATCH], Y[: steps * BATCH], 1) if alone else (
        mine(X, steps), mine(Y, steps), hvd.size()
    )  # fmt: skip
    return model.fit(
        x, y, batch_size=BATCH // size // parts, shuffle=False, verbose=0,
        callbacks=list(callbacks), **options,
    )  # fmt: skip


def assert_same_weights(model, expected) -> None:
    for weight, other in zip(model.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, **TOLERANCE)


def assert_equal_on_all_ranks(model) -> None:
    for weights in hvd.allgather_object(model.get_weights()):
        for weight, other in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(weight, other)


def sgd(**options):
    return keras.optimizers.SGD(0.1, momentum=0.9, **options)


@contextlib.contextmanager
def folder():
    """Return a new folder, the same on all ranks."""
    with tempfile.TemporaryDirectory() as own:
        yield Path(hvd.broadcast_object(own))
        hvd.barrier()


class Straight(keras.Model):
    """y = x w, whose gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = keras.layers.Dense(OUTPUTS, use_bias=False, kernel_initializer="zeros")
        self.build((None, FEATURES))

    def build(self, shape) -> None:
        self.layer.build(shape)
        self.built = True

    def call(self, x):
        return self.layer(x)


def gradient_at(w: np.ndarray, step: int) -> np.ndarray:
    x, y = (data[step * BATCH : (step + 1) * BATCH] for data in (X, Y))
    return 2 / (BATCH * OUTPUTS) * x.T @ (x @ w - y)


# -- training ------------------------------------------------------------------------------------


class Counting(keras.Model):
    """Records the number of samples in its loss."""

    count = None

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        self.count = ops.shape(y)[0] if sample_weight is None else ops.sum(sample_weight)
        return super().compute_loss(x, y, y_pred, sample_weight, training)


def case_ranks_with_different_numbers_of_samples_are_weighted():
    rank, size, steps = hvd.rank(), hvd.size(), 4
    part = BATCH // (size + 1)
    begin, end = rank * part, (rank + 1) * part if rank + 1 < size else BATCH
    rows = np.arange(steps * BATCH).reshape(steps, BATCH)[:, begin:end].ravel()
    x, y = X[rows], Y[rows]
    expected = network()
    fit(expected, sgd(), steps=steps, alone=True)
    for by_number in (True, False):
        plain = network()
        model = Counting(plain.inputs, plain.outputs)
        optimizer = hvd.DistributedOptimizer(sgd())
        assert optimizer.weight is None
        optimizer.weight = end - begin if by_number else lambda model=model: model.count
        model.compile(optimizer, "mse")
        average = hvd.callbacks.MetricAverageCallback(weight=end - begin)
        history = model.fit(
            x, y, batch_size=end - begin, shuffle=False, verbose=0, callbacks=[average]
        )
        assert_same_weights(model, expected)
        assert_equal_on_all_ranks(model)
        losses = hvd.allgather_object(history.history["loss"])
        assert all(each == losses[0] for each in losses)
    before = model.get_weights()
    optimizer = hvd.DistributedOptimizer(sgd())
    optimizer.weight = 0
    model.compile(optimizer, "mse")
    model.fit(x, y, batch_size=end - begin, verbose=0)
    for weight, old in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(weight, old)
    for bad in (-1, float("nan")):
        with pytest.raises(ValueError, match="must be finite and not negative"):
            optimizer.weight = bad
    with pytest.raises(RuntimeError, match="before the first batch"):
        optimizer.weight = None
    with pytest.raises(ValueError, match=r"for op=Average only, not op=Sum"):
        hvd.DistributedOptimizer(sgd(), op=hvd.Sum).weight = 1


def case_each_of_several_passes_has_its_weight():
    rng = np.random.default_rng(mpirun.seed())
    steps = 2 if BACKEND == "jax" else 5  # JAX compiles for each number of samples
    for average in (False,) if BACKEND == "jax" else (False, True):
        cuts = np.sort(rng.integers(0, BATCH + 1, (steps, 2 * hvd.size() - 1)))
        cuts = np.hstack([np.zeros((steps, 1), int), cuts, np.full((steps, 1), BATCH)])
        expected, model = network(), network()
        optimizer = hvd.DistributedOptimizer(
            sgd(), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        optimizer.weight = 1
        model.compile(optimizer, "mse", run_eagerly=average)
        expected.compile(sgd(), "mse")
        for step, parts in enumerate(cuts):
            x, y = (each[step * BATCH : (step + 1) * BATCH] for each in (X, Y))
            expected.train_on_batch(x, y)
            for part in range(2):
                begin, end = parts[2 * hvd.rank() + part :][:2]
                optimizer.weight = end - begin
                some = slice(begin, end) if end > begin else slice(0, 1)
                spoilt = np.nan if end == begin else 0
                model.train_on_batch(x[some], y[some] + spoilt)
        assert_same_weights(model, expected)
        assert_equal_on_all_ranks(model)


def case_training_equals_one_process_with_the_large_batch():
    for make in (sgd, lambda: keras.optimizers.Adam(0.01, clipnorm=0.5)):
        model = network(seed=hvd.rank())
        fit(model, hvd.DistributedOptimizer(make()), callbacks=[Broadcast(0)])
        expected = network()
        fit(expected, make(), alone=True)
        assert_same_weights(model, expected)
        assert_equal_on_all_ranks(model)
        assert int(model.optimizer.iterations) == STEPS


def case_a_model_that_is_not_built_is_broadcast_after_its_first_batch():
    model = network(seed=hvd.rank(), built=False)
    callback = Broadcast(hvd.size() - 1)
    fit(model, hvd.DistributedOptimizer(sgd()), steps=3, callbacks=[callback])
    assert callback._done
    assert_equal_on_all_ranks(model)


def case_weights_that_were_not_broadcast_are_an_error_at_the_end_of_fit():
    if hvd.size() == 1:
        return
    model = network(seed=hvd.rank())
    with pytest.raises(
        errors.MismatchError, match=r"kernel.*rank 0: .*BroadcastGlobalVariablesCallback"
    ):
        fit(model, hvd.DistributedOptimizer(sgd()), steps=2)
    fit(model, hvd.DistributedOptimizer(sgd()), steps=2, callbacks=[Broadcast(0)])


class Unbuilt(keras.Model):
    """`build` of such a model builds no layers in Keras 3."""

    def __init__(self, seed: int, parts) -> None:
        super().__init__()
        keras.utils.set_random_seed(seed)
        self.parts = parts()

    def call(self, x):
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.filterwarnings("ignore:`build()`:UserWarning")
def case_layers_that_build_has_not_built_are_broadcast_after_the_first_batch():
    def none_built():
        return [keras.layers.Dense(7), keras.layers.Dense(OUTPUTS)]

    def half_built():  # on a base such as a pretrained one
        return [network(hvd.rank()), keras.layers.Dense(OUTPUTS)]

    for parts in (none_built, half_built):
        model = Unbuilt(hvd.rank(), parts)
        model.build((None, FEATURES))
        # Its averages begin with the weights, which differ until the broadcast.
        optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1, use_ema=True))
        fit(model, optimizer, callbacks=[Broadcast(0)])
        assert len(model.get_weights()) >= 4
        assert_equal_on_all_ranks(model)
        assert int(model.optimizer.iterations) == STEPS


def case_a_rank_that_is_asked_tells_what_it_does():
    model = network()
    model.compile("sgd", "mse")
    told = asked_during(lambda: model.fit(X, Y, epochs=1, verbose=0), "in fit\n")
    assert "in case_a_rank_that_is_asked_tells_what_it_does" in told.stack
    assert {each.kind for each in told.events} >= {"submitted", "agreed", "done"}


def case_a_broadcast_leaves_out_local_variables_and_random_states():
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2), keras.layers.Dropout(0.5)])
    model.set_weights([np.full_like(weight, hvd.rank()) for weight in model.get_weights()])
    seeds = [variable for variable in model.variables if "seed" in variable.path]
    assert seeds
    for seed in seeds:
        seed.assign(np.full(seed.shape, 7 + hvd.rank()))
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    callback = Broadcast(0, local_variables=[model.layers[0].bias])
    callback.set_model(model)
    callback.on_train_begin()
    kernel, bias = model.get_weights()
    assert (kernel == 0).all()
    assert (bias == hvd.rank()).all()
    assert all((ops.convert_to_numpy(seed) == 7 + hvd.rank()).all() for seed in seeds)


def case_normalization_uses_the_statistics_that_it_gets():
    layer = keras.layers.Normalization()
    model = keras.Sequential([keras.Input((FEATURES,)), layer, keras.layers.Dense(OUTPUTS)])
    model.compile(hvd.DistributedOptimizer(sgd()), "mse")
    callback = Broadcast(0)
    callback.set_model(model)
    for send in (callback.on_train_begin, lambda: hvd.elastic.KerasState(model).sync()):
        layer.adapt(X[(hvd.rank() * BATCH) :])
        send()
        np.testing.assert_allclose(ops.convert_to_numpy(layer.mean)[0], X.mean(0), rtol=1e-5)


def case_passes_are_added_up_before_they_are_reduced():
    for averaged in (True, False):
        rate = 0.1 if averaged else 0.05
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(rate, momentum=0.9),
            backward_passes_per_step=2,
            average_aggregated_gradients=averaged,
        )
        model = network()
        fit(model, optimizer, parts=2, callbacks=[Broadcast(0)])
        expected = network()
        fit(expected, sgd(), alone=True)
        assert_same_weights(model, expected)
        assert int(optimizer.iterations) == STEPS


def case_passes_begin_again_where_an_elastic_state_is_sent():
    # A rank that joins has made none; those that were there may be in the middle of a step.
    model = Straight()
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    state = hvd.elastic.KerasState(model, optimizer)
    weights = model.trainable_variables
    one = ops.ones((FEATURES, OUTPUTS))
    if hvd.rank() == 0:
        step(optimizer, [99 * one], weights)
    state.sync()
    for _ in range(2):
        step(optimizer, [one], weights)
    np.testing.assert_allclose(model.get_weights()[0], -2)


def case_schedules_count_updates_and_not_passes():
    schedule = keras.optimizers.schedules.PiecewiseConstantDecay([0], [0.1, 0.0])
    model = network()
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(schedule),
        backward_passes_per_step=3,
        average_aggregated_gradients=True,
    )
    fit(model, optimizer, steps=2, parts=2)  # the second update is still pending
    assert int(optimizer.iterations) == 1
    once = model.get_weights()
    assert_equal_on_all_ranks(model)
    model.fit(mine(X, 2), mine(Y, 2), batch_size=BATCH // hvd.size() // 2, verbose=0)
    assert int(optimizer.iterations) == 2
    for weight, other in zip(model.get_weights(), once, strict=True):
        np.testing.assert_array_equal(weight, other)


def case_the_accumulation_of_keras_works():
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd(gradient_accumulation_steps=2))
    fit(model, optimizer, parts=2, callbacks=[Broadcast(0)])
    expected = network()
    fit(expected, sgd(), alone=True)
    assert_same_weights(model, expected)
    assert int(optimizer.iterations) == STEPS


def case_an_overflow_on_one_rank_makes_all_skip():
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("mixed_float16")
    try:
        model = network()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
        assert isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        model.compile(optimizer, "mse")
        assert model.optimizer is optimizer
        # Small enough for float16, even with the scale of 2^15.
        x, y = mine(X, 3) / 16, mine(Y, 3) / 16
        if hvd.rank() == hvd.size() - 1:
            x[BATCH // hvd.size()] = np.inf  # in the second of three batches
        model.fit(
            x, y, batch_size=BATCH // hvd.size(), shuffle=False, verbose=0,
            callbacks=[Broadcast(0)],
        )  # fmt: skip
        assert int(optimizer.iterations) == 2
        assert float(optimizer.dynamic_scale) == 2.0**14
        assert all(np.isfinite(weight).all() for weight in model.get_weights())
        assert_equal_on_all_ranks(model)
    finally:
        keras.config.set_dtype_policy("float64")
        keras.config.set_floatx("float64")


def case_adasum_combines_what_each_rank_changes():
    if hvd.size() not in (1, 2):
        return
    optimizer = hvd.DistributedOptimizer(keras.optimizers.Adam(0.1), op=hvd.Adasum)
    model = Straight()
    fit(model, optimizer, steps=4, callbacks=[Broadcast(0)])
    twins = [Straight() for _ in range(hvd.size())]
    inner = [keras.optimizers.Adam(0.1) for _ in twins]
    w = np.zeros((FEATURES, OUTPUTS))
    for step in range(4):
        changes = []
        for rank, (twin, each) in enumerate(zip(twins, inner, strict=True)):
            twin.set_weights([w])
            rows = slice(step * BATCH + rank * BATCH // hvd.size(),
                         step * BATCH + (rank + 1) * BATCH // hvd.size())  # fmt: skip
            x, y = X[rows], Y[rows]
            gradient = 2 / y.size * x.T @ (x @ w - y)
            each.apply([ops.convert_to_tensor(gradient)], twin.trainable_variables)
            changes.append(twin.get_weights()[0] - w)
        a, b = changes if len(changes) == 2 else (changes[0], changes[0] * 0)
        dot = (a * b).sum()
        left, right = (1 - dot / (2 * (c * c).sum()) if c.any() else 1.0 for c in (a, b))
        w = w + left * a + right * b
    np.testing.assert_allclose(model.get_weights()[0], w, **TOLERANCE)


# -- single steps ----------------------------------------------------------------------------------


def variables(*shapes):
    return [keras.Variable(np.zeros(shape), dtype="float64") for shape in shapes]


def step(optimizer, gradients, weights) -> None:
    tensors = [None if g is None else ops.convert_to_tensor(g, "float64") for g in gradients]
    optimizer.apply(tensors, weights)


def assert_values(weights, expected) -> None:
    for weight, value in zip(weights, expected, strict=True):
        np.testing.assert_allclose(ops.convert_to_numpy(weight), value, rtol=1e-3, atol=1e-12)


def gradients_of(rank: int) -> list[np.ndarray]:
    return [np.full(3, 1.0 + rank), np.full((2, 2), 10.0 * (rank + 1))]


def case_options_of_the_reduction():
    size = hvd.size()
    average = np.mean([1.0 + rank for rank in range(size)])
    weights = variables(3, (2, 2))
    for options in (
        {},
        {"groups": 1},
        {"groups": 5},
        {"groups": [[weights[1], weights[0]]]},
        {"groups": [[weights[1]]]},
        {"compression": hvd.Compression.fp16},
        {"compression": hvd.Compression.bf16, "groups": 1},
        {"gradient_predivide_factor": 2.0},
        {"name": "mine", "device_dense": "/cpu:0", "device_sparse": "/gpu:0"},
        {"op": hvd.Sum},
        {"op": hvd.Max},
    ):
        factor = {hvd.Sum: average * size, hvd.Max: size}.get(options.get("op"), average)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options)
        for weight in weights:
            weight.assign(np.zeros(weight.shape))
        step(optimizer, gradients_of(hvd.rank()), weights)
        assert_values(weights, [-factor, -10 * factor])
    with pytest.warns(DeprecationWarning, match="num_groups"):
        hvd.DistributedOptimizer(sgd(), num_groups=2)


def case_ranks_outside_of_the_process_set_train_by_themselves():
    if hvd.size() < 2:
        return
    from hororing._requests.process_sets import register

    alone = register([0])
    weights = variables(3)
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), process_set=alone)
    step(optimizer, [np.full(3, 1.0 + hvd.rank())], weights)
    assert_values(weights, [-1.0 - hvd.rank()])


def case_variables_without_gradients_and_those_that_are_replaced():
    weights = variables(3, 2, ())
    weights[2].overwrite_with_gradient = True
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(1.0), compression=hvd.Compression.fp16
    )
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        step(optimizer, [np.full(3, 1.0 + hvd.rank()), None, 5.0 - hvd.rank()], weights)
    average = np.mean([1.0 + rank for rank in range(hvd.size())])
    assert_values(weights, [-average, 0.0, 5.0])


def case_passes_add_up_maxima_as_maxima():
    weights = variables(3, ())
    weights[1].overwrite_with_gradient = True
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    step(optimizer, [np.full(3, 1.0 + hvd.rank()), 8.0], weights)
    assert_values(weights, [0.0, 0.0])
    step(optimizer, [np.full(3, 1.0 + hvd.rank()), 5.0], weights)
    average = np.mean([1.0 + rank for rank in range(hvd.size())])
    assert_values(weights, [-2 * average, 8.0])
    assert int(optimizer.iterations) == 1


def case_local_variables_are_not_reduced():
    for scale in (True, False):
        weights = variables(3, 2)
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), scale_local_gradients=scale)
        optimizer.register_local_var(weights[1])
        gradients = [np.full(3, 1.0 + hvd.rank()), np.full(2, 1.0 + hvd.rank())]
        step(optimizer, gradients, weights)
        average = np.mean([1.0 + rank for rank in range(hvd.size())])
        assert_values(weights, [-average, -(1.0 + hvd.rank()) / (hvd.size() if scale else 1)])


def case_local_layers_are_not_reduced():
    model = network()
    optimizer = hvd.PartialDistributedOptimizer(sgd(), local_layers=model.layers[0])
    fit(model, optimizer, steps=2, callbacks=[Broadcast(0)])
    first = hvd.allgather_object(model.layers[0].get_weights())
    assert hvd.size() == 1 or (first[0][0] != first[1][0]).any()
    with pytest.raises(TypeError, match="local_layers must be Keras layers, not str"):
        hvd.PartialDistributedOptimizer(sgd(), local_layers=["dense"])


def case_a_mismatch_names_the_ranks_and_the_job_goes_on():
    if hvd.size() == 1:
        return
    weights = variables(3 + hvd.rank())
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), name="uneven")
    with pytest.raises(errors.MismatchError, match=r"uneven/0.*rank"):
        step(optimizer, [np.zeros(3 + hvd.rank())], weights)
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


# -- what an optimizer is --------------------------------------------------------------------------


def case_a_multi_optimizer_of_distributed_ones():
    def multi(wrap):
        kernels, biases = wrap(sgd()), wrap(keras.optimizers.Adam(0.01))
        return keras.optimizers.MultiOptimizer(
            lambda variable: kernels if len(variable.shape) > 1 else biases
        )

    def made_while_keras_traces(wrap):
        return keras.optimizers.MultiOptimizer(lambda variable: wrap(sgd()))

    def passes(plain):
        return hvd.DistributedOptimizer(
            plain, backward_passes_per_step=2, average_aggregated_gradients=True
        )

    for kind, wrap in (
        (multi, hvd.DistributedOptimizer), (multi, passes),
        (made_while_keras_traces, hvd.DistributedOptimizer),
    ):  # fmt: skip
        expected, model = network(), network()
        fit(expected, kind(lambda plain: plain), alone=True)
        parts = 2 if wrap is passes else 1
        fit(model, kind(wrap), parts=parts, callbacks=[Broadcast(0)])
        assert_same_weights(model, expected)
        assert_equal_on_all_ranks(model)


def case_the_optimizer_stays_what_it_was():
    plain = keras.optimizers.Adam(0.01)
    optimizer = hvd.DistributedOptimizer(plain)
    assert optimizer is plain
    assert isinstance(optimizer, keras.optimizers.Adam)
    assert isinstance(optimizer, Distributed)
    optimizer.learning_rate = 0.5
    assert float(optimizer.learning_rate) == 0.5
    saved = keras.optimizers.serialize(optimizer)
    assert saved == keras.optimizers.serialize(keras.optimizers.Adam(0.5, name=optimizer.name))


def case_a_copy_of_the_optimizer_is_distributed():
    for options in ({}, {"backward_passes_per_step": 2}):
        twin = copy.deepcopy(hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), **options))
        weights = variables(3)
        for _ in range(options.get("backward_passes_per_step", 1)):
            step(twin, [np.full(3, 1.0 + hvd.rank())], weights)
        average = np.mean([1.0 + rank for rank in range(hvd.size())])
        assert_values(weights, [-average * options.get("backward_passes_per_step", 1)])


LOAD_WITHOUT_US = """
import sys
sys.modules["hororing"] = None
if sys.argv[2] != "tensorflow":
    sys.modules["tensorflow"] = None  # for speed
import keras, numpy as np
model = keras.models.load_model(sys.argv[1])
print("loaded", type(model.optimizer).__name__, int(model.optimizer.iterations), sum(
    float(abs(keras.ops.convert_to_numpy(v)).sum()) for v in model.optimizer.variables))
"""


LOADING: list[tuple[subprocess.Popen, tempfile.TemporaryDirectory, float]] = []


def case_a_saved_model_goes_on_with_us():
    straight = network()
    fit(straight, hvd.DistributedOptimizer(sgd()), steps=6)
    model = network()
    fit(model, hvd.DistributedOptimizer(sgd()), steps=3)
    with folder() as where:
        path = where / "model.keras"
        if hvd.rank() == 0:
            model.save(path)
            load_without_us(path, model.optimizer)
        hvd.barrier()
        loaded = hvd.load_model(path)
    assert isinstance(loaded.optimizer, Distributed)
    assert int(loaded.optimizer.iterations) == 3
    rest = slice(3 * BATCH // hvd.size(), None)
    loaded.fit(
        mine(X, 6)[rest], mine(Y, 6)[rest], batch_size=BATCH // hvd.size(), shuffle=False,
        verbose=0, callbacks=[Broadcast(0)],
    )  # fmt: skip
    assert_same_weights(loaded, straight)
    with pytest.raises(ValueError, match="legacy"):
        hvd.load_model("model.keras", legacy_opts=True)


def load_without_us(path: Path, optimizer) -> None:
    """Load a file in a process without hororing; other ranks do not wait for its slow start."""
    with zipfile.ZipFile(path) as archive:
        assert b"hororing" not in archive.read("config.json")
    own = tempfile.TemporaryDirectory()
    shutil.copy(path, own.name)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI", "PMI"))}
    environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # an entry point of hororing
    process = subprocess.Popen(
        [sys.executable, "-c", LOAD_WITHOUT_US, str(Path(own.name, path.name)), BACKEND],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    state = sum(float(abs(ops.convert_to_numpy(v)).sum()) for v in optimizer.variables)
    LOADING.append((process, own, state))


# -- training without gradient averaging is an error -----------------------------------------------


def case_a_plain_optimizer_is_an_error_after_the_first_batch():
    if hvd.size() == 1:
        return
    for model in (network(), keras.models.clone_model(network())):
        with pytest.raises(RuntimeError, match="no gradient went through"):
            fit(model, sgd(), steps=2, callbacks=[Broadcast(0)])
        assert int(model.optimizer.iterations) == 1


def case_a_model_without_trainable_weights_is_no_error():
    for optimizer in (sgd(), hvd.DistributedOptimizer(sgd())):
        model = network(hvd.rank())
        model.trainable = False
        fit(model, optimizer, steps=2, callbacks=[Broadcast(0)])
        assert_equal_on_all_ranks(model)


class Asking(keras.callbacks.Callback):
    """Sends a request in each batch, as layers of batch normalisation do."""

    def on_train_batch_end(self, batch, logs=None):
        hvd.allreduce(1.0, name="asking")


def case_callbacks_serve_several_trainings():
    broadcast, rank = Broadcast(0), hvd.rank()
    for seed in (rank, 10 + rank):
        model = network(seed)
        fit(model, hvd.DistributedOptimizer(sgd()), steps=2, callbacks=[broadcast])
        assert_equal_on_all_ranks(model)
    if hvd.size() > 1:
        for callbacks in ([broadcast], [Asking(), broadcast]):
            with pytest.raises(RuntimeError, match="no gradient went through"):
                fit(model, sgd(), steps=2, callbacks=callbacks)
    warmup = hvd.callbacks.LearningRateWarmupCallback(0.5, warmup_epochs=2)
    for epoch, steps in enumerate((2, 4)):
        optimizer = hvd.DistributedOptimizer(sgd())
        fit(
            model, optimizer, steps=steps, initial_epoch=epoch, epochs=epoch + 1,
            callbacks=[broadcast, warmup],
        )  # fmt: skip
    np.testing.assert_allclose(float(optimizer.learning_rate), 0.5)


def case_a_way_around_the_optimizer_is_an_error_at_the_end():
    if hvd.size() == 1:
        return
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    cls = type(optimizer)
    cls.apply, cls.stateless_apply = (
        cls.__mro__[2].apply, cls.__mro__[2].stateless_apply
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="no gradient went through"):
        fit(network(), optimizer, steps=1)
    with pytest.raises(RuntimeError, match="no gradient went through"):
        fit(network(), optimizer.__class__(0.1), steps=1, callbacks=[Broadcast(0)])


def case_wrong_use():
    distributed = hvd.DistributedOptimizer(sgd())
    for error, text, arguments in (
        (TypeError, "not str", {"optimizer": "adam"}),
        (ValueError, "distributed already", {"optimizer": distributed}),
        (ValueError, "must be at least 1", {"backward_passes_per_step": 0}),
        (TypeError, "backward_passes_per_step", {"backward_passes_per_step": 2.5}),
        (ValueError, "op=Average only", {"gradient_predivide_factor": 2.0, "op": hvd.Sum}),
        (ValueError, "must be positive", {"gradient_predivide_factor": -1.0}),
        (TypeError, "predivide_factor must be a number", {"gradient_predivide_factor": "2"}),
        (ValueError, "exclude each other", {"num_groups": 2, "groups": 2}),
        (ValueError, "at least 1", {"groups": 0}),
        (ValueError, "groups=True must be a number", {"groups": True}),
        (TypeError, "sparse_as_dense must be True or False", {"sparse_as_dense": "no"}),
        (TypeError, "gradients must be True or False", {"average_aggregated_gradients": "no"}),
        (ValueError, "non-empty lists of variables", {"groups": [[]]}),
        (TypeError, "device_dense must be a str", {"device_dense": 0}),
        (TypeError, "name must be a str", {"name": 5}),
        (TypeError, "not a compressor", {"compression": 16}),
        (ValueError, "no reduce operation", {"op": 17}),
        (ValueError, "op=Adasum", {"op": hvd.Adasum, "average_aggregated_gradients": True}),
        (ValueError, "use_ema", {"op": hvd.Adasum, "optimizer": sgd(use_ema=True)}),
    ):
        if arguments.get("op") == hvd.Adasum and hvd.size() == 3:
            continue
        with pytest.raises(error, match=text):
            hvd.DistributedOptimizer(**{"optimizer": sgd(), **arguments})
    with pytest.raises(ValueError, match="other way round"):
        keras.optimizers.LossScaleOptimizer(distributed)
    with pytest.raises(RuntimeError, match=r"broadcast_variables\(model.weights"):
        hvd.broadcast_global_variables(0)
    with pytest.raises(TypeError, match="root_rank"):
        Broadcast("0")
    with pytest.raises(TypeError, match="takes variables, not int"):
        hvd.broadcast_variables([3], 0)
    with pytest.raises(TypeError, match=r"\[variable\]"):
        hvd.broadcast_variables(variables(2)[0], 0)
    with pytest.raises(TypeError, match="multiplier must be"):
        hvd.callbacks.LearningRateScheduleCallback(0.1, "half")
    with pytest.raises(ValueError, match="warmup_epochs=-1 is negative"):
        hvd.callbacks.LearningRateWarmupCallback(0.1, warmup_epochs=-1)
    weights = variables(2)
    of_others = hvd.DistributedOptimizer(sgd())
    of_others.build(variables(3))
    with pytest.raises(ValueError, match="originally built with"):  # layers were frozen, or .h5
        step(of_others, [np.zeros(2)], weights)
    in_turns = hvd.DistributedOptimizer(sgd(), backward_passes_per_step=2)
    in_turns.build([*weights, *variables(3)])
    step(in_turns, [np.zeros(2)], weights)
    with pytest.raises(ValueError, match="every call must have the same variables"):
        step(in_turns, [np.zeros(3)], in_turns._trainable_variables[1:])
    for wrong in (keras.layers.Dense(2), "kernel"):
        with pytest.raises(TypeError, match=r"takes variables, not \w+; those of a layer"):
            of_others.register_local_var(wrong)
        with pytest.raises(TypeError, match="takes variables, not"):
            Broadcast(0, local_variables=[wrong])
    stranger = hvd.DistributedOptimizer(sgd(), groups=[variables(3)])
    if hvd.size() > 1:
        with pytest.raises(ValueError, match=r"groups\[0\] holds a variable that is not"):
            step(stranger, [np.zeros(2)], weights)
    # An error on one rank must not change its default names.
    number = default_name("optimizer")
    assert len(set(hvd.allgather_object(str(number)))) == 1


# -- callbacks -------------------------------------------------------------------------------------


def simulated(rates: list[float], momentum: float, corrected: bool) -> np.ndarray:
    """SGD on `Straight`, whose velocity contains the rate."""
    w = np.zeros((FEATURES, OUTPUTS))
    velocity = np.zeros_like(w)
    before = rates[0]
    for number, rate in enumerate(rates):
        if corrected:
            velocity = velocity * (rate / before)
        velocity = momentum * velocity - rate * gradient_at(w, number)
        w, before = w + velocity, rate
    return w


def case_warmup_raises_the_rate_batch_by_batch():
    for corrected in (True, False):
        model = Straight()
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.5, momentum=0.9))
        warmup = hvd.callbacks.LearningRateWarmupCallback(
            0.1, warmup_epochs=2, momentum_correction=corrected, verbose=1
        )
        model.compile(optimizer, "mse")
        printed = io.StringIO()
        rates, weights = [], []

        class Watch(keras.callbacks.Callback):
            def on_train_batch_begin(self, batch, logs=None, rates=rates):
                rates.append(float(self.model.optimizer.learning_rate))

            def on_train_batch_end(self, batch, logs=None):
                pass

        per_epoch = 4
        with contextlib.redirect_stdout(printed):
            for epoch in range(3):  # one epoch at a time: each has other data
                rows = slice(epoch * per_epoch * BATCH // hvd.size(), None)
                model.fit(
                    mine(X)[rows], mine(Y)[rows], batch_size=BATCH // hvd.size(), shuffle=False,
                    verbose=0, initial_epoch=epoch, epochs=epoch + 1, steps_per_epoch=per_epoch,
                    callbacks=[Broadcast(0), warmup, Watch()],
                )  # fmt: skip
        weights = model.get_weights()[0]
        n = hvd.size()
        expected = [
            0.1 / n * (min(batch + 1, 8) / per_epoch * (n - 1) / 2 + 1) for batch in range(12)
        ]
        np.testing.assert_allclose(rates, expected)
        # Keras rounds constants to float32 (momentum on TensorFlow, the loss's divisor on JAX). In
        # one process without hororing, this makes a difference of 3e-8 after these 12 steps.
        close = {**TOLERANCE, "atol": 1e-6}
        np.testing.assert_allclose(weights, simulated(rates, 0.9, corrected), **close)
        assert ("at 0.1" in printed.getvalue()) == (hvd.rank() == 0)


def case_a_schedule_has_a_rate_for_each_epoch():
    model = Straight()
    schedule = hvd.callbacks.LearningRateScheduleCallback(
        0.1, lambda epoch: 0.5**epoch, start_epoch=1, end_epoch=3
    )
    constant = hvd.callbacks.LearningRateScheduleCallback(0.1, 3.0, start_epoch=3)
    history = fit(
        model, hvd.DistributedOptimizer(sgd()), steps=2, epochs=4,
        callbacks=[Broadcast(0), schedule, constant],
    )  # fmt: skip
    np.testing.assert_allclose(history.history["lr"], [0.1, 0.05, 0.025, 0.3])
    unknown = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 1, staircase=False)
    unknown.set_params({"steps": None})
    with pytest.raises(ValueError, match="pass steps_per_epoch"):
        unknown.on_train_begin()


def case_rates_that_other_callbacks_set_reach_the_optimizer():
    model = Straight()
    fit(
        model, hvd.DistributedOptimizer(keras.optimizers.SGD(0.1)), steps=1,
        callbacks=[Broadcast(0), keras.callbacks.LearningRateScheduler(lambda epoch: 0.25)],
    )  # fmt: skip
    w = np.zeros((FEATURES, OUTPUTS))
    np.testing.assert_allclose(model.get_weights()[0], -0.25 * gradient_at(w, 0), **TOLERANCE)


def case_metrics_are_averaged_and_the_best_model_is_saved_by_rank_0():
    with folder() as where:
        average = hvd.callbacks.MetricAverageCallback()
        logs = {"loss": 1.0 + hvd.rank(), "accuracy": np.float32(hvd.rank())}
        logs["f1"] = ops.convert_to_tensor([0.0, hvd.rank()])  # of each class
        average.on_epoch_end(0, logs)
        size = hvd.size()
        assert logs.pop("f1").tolist() == [0.0, (size - 1) / 2]
        assert logs == {"loss": (size + 1) / 2, "accuracy": (size - 1) / 2}
        if size > 1:
            logs = {"loss": 1.0, "f1" if hvd.rank() == 0 else "recall": 1.0}
            with pytest.raises(ValueError, match="rank 0: f1, loss; rank 1: loss, recall"):
                average.on_epoch_end(1, logs)
        logs = {"loss": 1.0, "best": "layer" if hvd.rank() == 0 else 1.0}
        with pytest.raises(ValueError, match=r"no numbers \(rank 0: best='layer'\)"):
            average.on_epoch_end(2, logs)
        best = hvd.callbacks.BestModelCheckpoint(monitor="loss")
        with pytest.raises(ValueError, match="set its filepath"):
            best.on_train_begin()
        best.filepath = where / f"best{hvd.rank()}.keras"
        model = network()
        history = fit(
            model, hvd.DistributedOptimizer(sgd()), steps=2, epochs=2,
            callbacks=[Broadcast(0), average, best],
        )  # fmt: skip
        losses = hvd.allgather_object(history.history["loss"])
        assert all(each == losses[0] for each in losses)
        hvd.barrier()
        assert [path.name for path in where.iterdir()] == ["best0.keras"]


# -- values ----------------------------------------------------------------------------------------


def case_workers_of_sharded_arrays_bring_each_epoch_its_samples():
    x = np.arange(46, dtype=np.float32)[:, None]
    shard = Shard(len(x), seed=5)
    losses: list[float] = []

    def fit(model, first=0):
        shard.set_epoch(first)
        shard.record_batch(0, 4)
        data = ShardedArrays((x, 0 * x), 4, shard, workers=2)
        note = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs: losses.append(float(logs["loss"]))
        )
        model.fit(
            data, epochs=first + 2, initial_epoch=first, shuffle=False, verbose=0,
            callbacks=[data.callback(), note],
        )  # fmt: skip

    model = keras.Sequential(
        [keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="ones", use_bias=False)]
    )
    model.compile(keras.optimizers.SGD(0.0), "mae")  # the loss is the mean of the samples so far
    if BACKEND != "tensorflow":
        with pytest.raises(ValueError, match="Build the model and its metrics before"):
            fit(model)
        assert losses == []
        model.evaluate(x[:1], x[:1], verbose=0)
    for first in (0, 1):
        losses.clear()
        fit(model, first)
        mine = [permutation(len(x), seed=5, epoch=first + each) for each in range(2)]
        size, rank = hvd.size(), hvd.rank()
        mine = [order[: len(order) // size * size][rank::size] for order in mine]
        mine[0] = mine[0][4:]
        expected = [order[: end + 4].mean() for order in mine for end in range(0, len(order), 4)]
        np.testing.assert_allclose(losses, expected, rtol=1e-5)


def case_values_are_numpys():
    rank, size = hvd.rank(), hvd.size()
    total = sum(range(size))
    assert hvd.allreduce(rank + 0.5) == total / size + 0.5
    assert hvd.allreduce(rank, op=hvd.Sum) == total
    assert isinstance(hvd.allreduce(np.ones((2, 2)), name="ones"), np.ndarray)
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(1.0, average=False) == size
    assert hvd.allreduce(1.0, prescale_factor=2, postscale_factor=3, op=hvd.Sum) == 6 * size
    assert hvd.allreduce(np.float32(1.5), compression=hvd.Compression.bf16).dtype == np.float32
    assert hvd.allreduce(ops.ones(3), op=hvd.Sum).tolist() == [size] * 3
    assert hvd.broadcast(rank, size - 1) == size - 1
    assert hvd.allgather(np.full((rank + 1, 2), rank)).shape == (size * (size + 1) // 2, 2)
    assert hvd.reducescatter(np.arange(size, dtype=float)).tolist() == [rank]
    assert hvd.broadcast_object({"a": rank}) == {"a": 0}


def case_a_broadcast_names_the_variable_that_differs():
    rank, size = hvd.rank(), hvd.size()
    layers = [keras.layers.Dense(2) for _ in range(1 + rank)]  # their numbers differ
    layers[-1].build((None, 3 + rank))
    if size > 1:
        with pytest.raises(errors.MismatchError, match=r"dense/kernel'.* shapes differ"):
            hvd.broadcast_variables(layers[-1].weights, 0)


def case_variables_of_all_types_are_broadcast():
    kinds = ["float16", "bfloat16", "float32", "int32", "uint8", "bool", "uint32", "float8_e4m3fn"]
    if BACKEND == "torch":  # Keras has no unsigned types there, and cannot read 8-bit floats
        kinds = kinds[:-2]
    values = [
        keras.Variable(np.ones(3) * hvd.rank(), dtype=kind, trainable=False) for kind in kinds
    ]
    values[2:2] = [keras.Variable(float(hvd.rank()))]
    kinds[2:2] = ["a number"]
    hvd.broadcast_variables(values, hvd.size() - 1)
    for kind, value in zip(kinds, values, strict=True):
        expected = np.ones(value.shape) * (hvd.size() - 1)
        array = ops.convert_to_numpy(value).astype("float64")
        np.testing.assert_array_equal(array, expected.astype(bool) if kind == "bool" else expected)


def case_the_saved_model_has_loaded_without_us():
    for process, own, state in LOADING:
        output, _ = process.communicate()
        own.cleanup()
        loaded = output.rpartition("loaded SGD 3 ")[2]
        assert loaded, output
        np.testing.assert_allclose(float(loaded), state, rtol=1e-6)
