"""hororing.toolkit.keras.optim on every backend of Keras: optimizers, schedules, loss scales."""

from __future__ import annotations

import os
import sys
import tempfile

import layerwise_oracle as oracle
import mpirun
import numpy as np
import pytest
import rounding_oracle
import session
import tiers

if __name__ == "cases":  # on the ranks
    if os.environ.setdefault("KERAS_BACKEND", "torch") == "torch":
        sys.modules["tensorflow"] = None  # if it is installed, Keras imports it, which is slow
    import keras
    from keras import ops

    import hororing.keras as hvd
    from hororing._requests.process_sets import find
    from hororing.toolkit.large_batch import schedules

    hvd.init(process_sets=[[0], [1]])
    from hororing.toolkit.keras.optim import (
        LAMB,
        LARS,
        LossScaleOptimizer,
        ScheduleCallback,
        StochasticCast,
        StochasticRounding,
        WarmupPolynomial,
        round_stochastically,
    )

    BACKEND = keras.backend.backend()
    COUNT = 40 if BACKEND == "torch" else 15

SEED = 5
FLOAT64 = ("tensorflow", "torch")  # JAX has no float64 by default


def follow(make, options, dtype, count=oracle.STEPS):
    """Solve the oracle's problem with Keras' variables. Rates are set from outside."""
    variables = [
        keras.Variable(w, dtype=dtype, name=f"w{at}") for at, w in enumerate(oracle.beginning(SEED))
    ]
    optimizer = make(learning_rate=1.0, **options)
    optimizer.build(variables)
    for step, noise in zip(range(count), oracle.noises(SEED), strict=False):
        optimizer.learning_rate = oracle.rate(step)
        grads = [
            ops.convert_to_tensor(
                oracle.gradient(ops.convert_to_numpy(v), each.astype(dtype)), dtype=dtype
            )
            for v, each in zip(variables, noise, strict=True)
        ]
        optimizer.apply(grads, variables)
    return [ops.convert_to_numpy(variable) for variable in variables]


def in_words_of_keras(options):
    betas = options.get("betas")
    renamed = {"epsilon" if key == "eps" else key: v for key, v in options.items()}
    renamed.pop("betas", None)
    return {**renamed, **({"beta_1": betas[0], "beta_2": betas[1]} if betas else {})}


def case_optimizers_follow_their_papers_as_those_of_torch_do():
    for make, step, defaults, variants in (
        (LARS, oracle.lars, oracle.LARS_DEFAULTS, oracle.LARS_VARIANTS),
        (LAMB, oracle.lamb, oracle.LAMB_DEFAULTS, oracle.LAMB_VARIANTS),
    ):
        # Ranks share the variants. Only one backend runs all, because the others are slow.
        few = [variants[0], variants[-2]]
        mine = variants[hvd.rank() :: hvd.size()] if BACKEND == "torch" else [few[hvd.rank()]]
        for variant in mine:
            options = {**defaults, **variant}
            expected = oracle.trajectory(step, options, SEED, COUNT)
            found = follow(make, in_words_of_keras(options), "float32", COUNT)
            oracle.assert_close(found, expected, 3e-6)
            if BACKEND in FLOAT64 and variant in few:
                found = follow(make, in_words_of_keras(options), "float64", COUNT)
                # Keras stores the rate in float32.
                oracle.assert_close(found, expected, 1e-6)
    hvd.allgather_object(None)


def case_16_bit_variables_have_float32_masters():
    variable = keras.Variable(np.full((64, 64), 1.0), dtype="bfloat16", name="kernel")
    optimizer = LARS(1e-3, momentum=0.0, no_adaptation=["kernel"])
    optimizer.build([variable])
    for _ in range(100):
        optimizer.apply([ops.ones((64, 64), dtype="bfloat16") * -1.0], [variable])
    # Rounding to nearest would lose every step.
    np.testing.assert_allclose(ops.convert_to_numpy(ops.cast(variable, "float32")), 1.1, rtol=4e-3)
    variable.assign(ops.ones((64, 64), dtype="bfloat16") * 5)  # like a broadcast or a checkpoint
    optimizer.apply([ops.zeros((64, 64), dtype="bfloat16")], [variable])
    assert (ops.convert_to_numpy(ops.cast(variable, "float32")) == 5).all()


# -- stochastic rounding --------------------------------------------------------------------------


def as_array(tensor, dtype):
    """Return the NumPy array of a 16-bit tensor."""
    wide = ops.convert_to_numpy(ops.cast(tensor, "float32"))
    return wide.astype(rounding_oracle.TYPES[dtype])


def case_rounding_is_that_of_the_oracle_to_the_last_bit():
    where = {"seed": 2**60 + 5, "tensor": 3, "step": 2**33 + 1, "stream": 2}
    for dtype in ("float16", "bfloat16"):
        for shape in ((4999,), (3, 5, 7)):
            count = int(np.prod(shape))
            values = rounding_oracle.patterns(count, count).reshape(shape)
            random = rounding_oracle.random_numbers(count, **where)
            result = as_array(round_stochastically(values, dtype, **where), dtype)
            rounding_oracle.assert_rounded(result, values, dtype, random)
        values, patterns = rounding_oracle.kept(dtype)
        result = as_array(round_stochastically(values, dtype, seed=7), dtype)
        np.testing.assert_array_equal(result.view(np.uint16), patterns)
    with pytest.raises(TypeError, match="not to float32"):
        round_stochastically(values, "float32", seed=1)
    with pytest.raises(TypeError, match="takes float32 tensors, not"):
        round_stochastically(ops.ones(3, dtype="int32"), seed=1)


def case_16_bit_variables_add_up_small_updates_without_masters():
    variable = keras.Variable(np.ones((64, 64)), dtype="bfloat16", name="kernel")
    optimizer = LARS(1e-3, momentum=0.0, no_adaptation=[""], rounding=StochasticRounding(3))
    optimizer.build([variable])
    assert not any("float32_weight" in each.path for each in optimizer.variables)
    steps = 200
    for _ in range(steps):
        optimizer.apply([ops.ones((64, 64), dtype="bfloat16") * -1.0], [variable])
    # A step is 0.128 of a unit, 2**-7; sigma is the deviation of this sum of binomial numbers.
    sigma = 2.0**-7 * (steps * 0.128 * 0.872 / 64**2) ** 0.5
    mean = as_array(variable, "bfloat16").astype(np.float64).mean()
    assert abs(mean - 1.2) < 5 * sigma


def short_network(seed, optimizer):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    model = keras.Sequential([
        keras.Input((5,)), layers.Dense(6, dtype="bfloat16"),
        layers.Activation("tanh", dtype="float32"), StochasticCast("bfloat16", seed=8, tensor=1),
        layers.Dense(2, dtype="bfloat16"), layers.Activation("linear", dtype="float32"),
    ])  # fmt: skip
    model.compile(hvd.DistributedOptimizer(optimizer), "mse")
    return model


def short_weights(model):
    return [as_array(v, "bfloat16").view(np.uint16) for v in model.trainable_variables]


def case_replicas_stay_identical_with_stochastic_rounding_also_when_resumed():
    x, y = data()
    x = x + hvd.rank()
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    ends = []
    for seed in (100 + hvd.rank(), 101):  # rank 0's seed counts
        model = short_network(1, LARS(0.2, weight_decay=0.01, rounding=StochasticRounding(seed)))
        model.fit(x[:24], y[:24], **options)
        with tempfile.TemporaryDirectory() as folder:
            model.save(file := os.path.join(folder, "model.keras"))
            loaded = keras.models.load_model(file)
        loaded.compile(hvd.DistributedOptimizer(loaded.optimizer), "mse")
        for each in (model, loaded):
            each.fit(x[24:], y[24:], **options)
            ends.append(short_weights(each))
    everywhere = hvd.allgather_object(ends)
    pairs = [*zip(*everywhere, strict=True), (ends[0], ends[1]), (ends[2], ends[3])]
    for one, other in pairs:
        for these, those in zip(one, other, strict=True):
            np.testing.assert_array_equal(these, those)
    assert any((one != other).any() for one, other in zip(ends[0], ends[2], strict=True))


def case_activations_are_rounded_differently_on_each_rank():
    values = np.full(2000, 1.003, np.float32)
    layer = StochasticCast("bfloat16", seed=1)
    first, second = (as_array(layer(values, training=True), "bfloat16") for _ in range(2))
    assert (first != second).any()
    rounding_oracle.assert_mean(first, 1.003)
    assert len({each.tobytes() for each in hvd.allgather_object(first)}) == hvd.size()
    nearest = as_array(layer(values), "bfloat16")
    np.testing.assert_array_equal(nearest, values.astype(nearest.dtype))
    resumed = StochasticCast.from_config(layer.get_config())
    resumed.set_weights(layer.get_weights())
    again = [as_array(each(values, training=True), "bfloat16") for each in (layer, resumed)]
    np.testing.assert_array_equal(*again)


def case_gradients_pass_through_rounded_activations():
    for to in ("bfloat16", "float16"):
        model = keras.Sequential([keras.Input((3,)), StochasticCast(to, seed=1),
                                  keras.layers.Dense(1, use_bias=False, dtype=to)])  # fmt: skip
        before = keras.layers.Dense(3, use_bias=False, kernel_initializer="identity")
        whole = keras.Sequential([keras.Input((3,)), before, model])
        model.layers[-1].kernel.assign(ops.ones((3, 1)))
        model.layers[-1].trainable = False
        whole.compile(keras.optimizers.SGD(1.0), lambda true, found: ops.mean(found))
        whole.fit(np.ones((4, 3)), np.ones((4, 1)), batch_size=4, verbose=0)
        np.testing.assert_allclose(ops.convert_to_numpy(before.kernel), np.eye(3) - 1)


def network(seed=0):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((5,)), layers.Dense(6), layers.BatchNormalization(), layers.Activation("tanh"),
        layers.Dense(2),
    ])  # fmt: skip


def data():
    random = np.random.default_rng(7)
    return random.normal(size=(48, 5)).astype("float32"), random.normal(size=(48, 2)).astype(
        "float32"
    )


def case_models_train_are_saved_and_go_on():
    plan = schedules.WarmupPolynomial(peak=2.0, total_steps=12, warmup_steps=4, end=0.1)
    x, y = data()
    for make in (LARS, LAMB) if BACKEND != "jax" else (LARS,):
        optimizer = make(WarmupPolynomial.of(plan), weight_decay=0.01, no_decay=["bias", "beta"])
        model = network()
        model.compile(hvd.DistributedOptimizer(optimizer), "mse")
        begin = hvd.callbacks.BroadcastGlobalVariablesCallback(0)
        options = {"batch_size": 8, "shuffle": False, "verbose": 0}
        model.fit(x[:24], y[:24], callbacks=[begin], **options)
        with tempfile.TemporaryDirectory() as folder:
            file = os.path.join(folder, "model.keras")
            model.save(file)
            loaded = keras.models.load_model(file)
        assert type(loaded.optimizer) is make
        assert loaded.optimizer.get_config() == optimizer.get_config()
        loaded.compile(hvd.DistributedOptimizer(loaded.optimizer), "mse")
        for each in (model, loaded):
            each.fit(x[24:], y[24:], **options)
        for one, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
            np.testing.assert_array_equal(one, other)
        assert int(ops.convert_to_numpy(loaded.optimizer.iterations)) == 6


def case_schedules_agree_with_their_formula():
    for form in ("shift", "mask"):
        plan = schedules.WarmupPolynomial(2.0, 30, 7, start=0.2, end=0.1, power=1.5, form=form)
        inside = WarmupPolynomial.of(plan)
        assert WarmupPolynomial.from_config(inside.get_config()).plan == plan
        for step in range(35):
            assert float(ops.convert_to_numpy(inside(step))) == pytest.approx(plan(step), rel=1e-5)


def case_momentum_correction_makes_sgd_the_unscaled_form():
    if BACKEND == "jax":  # compiles slowly, and the backend does not matter here
        return
    plan = schedules.WarmupPolynomial(peak=0.5, total_steps=12, warmup_steps=4, start=0.01)
    x, y = data()
    ends = []
    for optimizer, callback in (
        (keras.optimizers.SGD(1.0, momentum=0.9), ScheduleCallback(plan)),
        (LARS(1.0, no_adaptation=[""], momentum_form="unscaled"), ScheduleCallback(plan)),
        (keras.optimizers.SGD(1.0, momentum=0.9), ScheduleCallback(plan, False)),
    ):
        model = network()
        model.compile(optimizer, "mse")
        history = model.fit(x, y, 8, 2, shuffle=False, verbose=0, callbacks=[callback])
        assert history.history["lr"] == pytest.approx([plan(5), plan(11)])
        ends.append(np.concatenate([weight.ravel() for weight in model.get_weights()]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4, atol=1e-5)
    assert np.abs(ends[0] - ends[2]).max() > 1e-2
    model.compile(keras.optimizers.SGD(1.0), "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution=2"):
        model.fit(x, y, verbose=0, callbacks=[ScheduleCallback(plan)])


def case_muons_momentum_has_no_rate_in_it():
    if BACKEND == "jax":
        return
    x, y = data()
    ends = []
    for corrected in (False, True):
        keras.utils.set_random_seed(SEED)
        model = network()
        model.compile(keras.optimizers.Muon(0.01, exclude_layers=[]), "mse")
        schedule = hvd.callbacks.LearningRateScheduleCallback(
            0.01, lambda epoch: 1 + epoch, staircase=False, momentum_correction=corrected
        )
        model.fit(x, y, 8, shuffle=False, verbose=0, callbacks=[schedule])
        ends.append(model.get_weights())
    for one, other in zip(*ends, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


# -- V12: infinities ------------------------------------------------------------------------------


def train_with_infinity(optimizer):
    """Return in which steps this rank's weights changed; rank 1 has an infinity in the third."""
    model = network()
    model.compile(optimizer, "mse")
    x, y = data()
    if hvd.rank() == 1:
        x[17] = np.inf
    changed = []
    for step in range(5):
        part = slice(8 * step, 8 * step + 8)
        before = [ops.convert_to_numpy(v).copy() for v in model.trainable_variables]
        model.fit(x[part], y[part], batch_size=8, shuffle=False, verbose=0)
        after = [ops.convert_to_numpy(v) for v in model.trainable_variables]
        changed.append(any((a != b).any() for a, b in zip(before, after, strict=True)))
    return changed


def case_an_infinity_on_one_rank_makes_all_ranks_skip_the_step():
    own = next(s for s in (find([0]), find([1])) if s.included())
    sgd = keras.optimizers.SGD
    wraps = [
        lambda scaled: hvd.DistributedOptimizer(scaled, process_set=own),
        lambda scaled: hvd.DistributedOptimizer(scaled),
        lambda scaled: scaled,  # no reduction
    ]
    for wrap in wraps[2:] if BACKEND == "jax" else wraps:
        scaled = LossScaleOptimizer(sgd(0.1), initial_scale=64.0)
        assert train_with_infinity(wrap(scaled)) == [True, True, False, True, True]
        assert float(ops.convert_to_numpy(scaled.dynamic_scale)) == 32.0
    # Keras' own optimizer decides on each rank alone, which is why hororing has another one.
    changed = train_with_infinity(keras.optimizers.LossScaleOptimizer(sgd(0.1)))
    assert changed[2] == (hvd.rank() == 0)
    again = keras.optimizers.deserialize(keras.optimizers.serialize(scaled))
    assert type(again) is LossScaleOptimizer
    with pytest.raises(ValueError, match="no process set of these ranks"):
        LossScaleOptimizer(sgd(0.1), process_set=[0, 7])


def case_wrong_options_are_refused_by_name():
    for make, options in (
        (LARS, {"momentum": 1.0}), (LARS, {"weight_decay": -1.0}), (LARS, {"denominator": "all"}),
        (LARS, {"momentum_form": "none"}), (LARS, {"epsilon": -1}), (LAMB, {"beta_1": 1.0}),
        (LAMB, {"phi": (2, 1)}), (LAMB, {"phi": abs}), (LAMB, {"epsilon": -1}),
        (LARS, {"no_decay": ["("]}),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=next(iter(options))):
            make(**options)
    with pytest.raises(TypeError, match="rounding=3 must be None"):
        LARS(rounding=3)
    with pytest.raises(TypeError, match="inner_optimizer must be an optimizer of Keras 3"):
        LossScaleOptimizer("sgd")
    with pytest.raises(ValueError, match="'kernels' matches no variable"):
        LARS(no_decay=["kernels"]).build([keras.Variable(np.ones(3), name="kernel")])


test_on_torch = session.on_ranks(globals(), 2, push=[2], session="keras on torch")


@tiers.full
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test(case: str, backend: str):
    pytest.importorskip(backend)
    mpirun.cases_of(__file__, 2, KERAS_BACKEND=backend, TF_CPP_MIN_LOG_LEVEL="2").check(case)
