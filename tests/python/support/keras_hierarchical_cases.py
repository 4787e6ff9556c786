"""HierarchicalSGD for Keras against a NumPy oracle: cases for test_keras_*.py."""

from __future__ import annotations

import pickle

import keras
import mpirun
import numpy as np
import pytest
from hierarchical_oracle import INPUTS, OUTPUTS, ROWS, Oracle, batch, configurations, first_weights
from keras_cases import BACKEND, folder, sgd

import hororing.keras as hvd
from hororing.toolkit.keras.optim import LAMB, LARS, HierarchicalSGD, HierarchicalSGDCallback
from hororing.toolkit.large_batch.outer import OuterSGD, SlowMo

# See TOLERANCE in keras_cases.py; here errors add up over steps.
CLOSE = {"rtol": 1e-6, "atol": 1e-5 if BACKEND == "torch" else 1e-6}
STEPS_TAKEN = 9
SHOWN = [
    "gradients of groups", "uneven groups", "momentum averaged", "momentum reset", "weighted",
    "delayed", "outer, delayed, reset", "outer nesterov",
]  # fmt: skip


class Look(keras.callbacks.Callback):
    """Calls a function with the model after every batch. Comes after the averaging callback."""

    def __init__(self, look) -> None:
        super().__init__()
        self.look = look

    def on_train_batch_end(self, step, logs=None):
        self.look(self.model)


def linear(seed: int) -> keras.Model:
    dense = keras.layers.Dense(OUTPUTS, use_bias=False)
    model = keras.Sequential([keras.Input((INPUTS,)), dense])
    model.set_weights([first_weights(seed)])
    return model


def train(model, seed, steps=STEPS_TAKEN, first=1, look=None, callback=None, passes=1, **fit):
    numbers = [step for step in range(first, steps + 1) for _ in range(passes)]
    given = [batch(seed, step, hvd.rank()) for step in numbers]
    x, y = (np.concatenate(each) for each in zip(*given, strict=True))
    callbacks = [callback or HierarchicalSGDCallback(every_epoch=False)]
    callbacks += [Look(look)] if look else []
    model.fit(x, y, batch_size=ROWS, shuffle=False, verbose=0, callbacks=callbacks, **fit)


def arguments_for(options: dict) -> dict:
    made = {key: value for key, value in options.items() if key not in ("levels", "weights")}
    made["period_group_size_dict"] = {
        period: [list(group) for group in groups] for period, groups in options["levels"]
    }
    made.setdefault("gradient_groups", None)
    if "weights" in options:
        made["weight"] = options["weights"][hvd.rank()]
    if "outer" in options:
        kind, first, second = options["outer"]
        made["outer"] = SlowMo(first, second) if kind == "slowmo" else OuterSGD(first, second)
    return made


@pytest.mark.filterwarnings("ignore")
def case_hierarchical_sgd_has_the_oracles_weights():
    seed = mpirun.seed()
    for name in SHOWN:
        options = configurations(hvd.size())[name]
        oracle = Oracle(hvd.size(), seed, **options)
        model = linear(seed)
        model.compile(HierarchicalSGD(sgd(), **arguments_for(options)), "mse")

        def compare(model, oracle=oracle, name=name) -> None:
            period = oracle.next()
            step = oracle.step
            np.testing.assert_allclose(
                model.get_weights()[0], oracle.w[hvd.rank()], err_msg=f"{name}, step {step}",
                **CLOSE,
            )  # fmt: skip
            assert model.optimizer.steps_done == step
            if period is not None:
                assert model.optimizer.last_average == (step, period)

        train(model, seed, look=compare)
        assert oracle.step == STEPS_TAKEN
        everybody = hvd.allgather(model.get_weights()[0][None])
        assert (everybody == everybody[0]).all()  # training ends with an average
        if not name.startswith("momentum"):
            continue
        again = linear(seed)  # the same gradients in two passes: their sums are not momenta
        two_passes = sgd(gradient_accumulation_steps=2)
        again.compile(HierarchicalSGD(two_passes, **arguments_for(options)), "mse")
        train(again, seed, passes=2)
        np.testing.assert_allclose(again.get_weights()[0], everybody[0], err_msg=name, **CLOSE)


def case_hierarchical_sgd_of_lars_and_lamb_averages_what_they_do_alone():
    for make in (LARS, LAMB):
        model, alone = linear(7), linear(7)
        levels = {"period_group_size_dict": {2: "world"}, "gradient_groups": None}
        model.compile(HierarchicalSGD(make(0.1), **levels), "mse")
        train(model, 7, steps=2)
        alone.compile(make(0.1), "mse")
        for step in (1, 2):
            alone.train_on_batch(*batch(7, step, hvd.rank()))
        mean = np.mean(hvd.allgather(alone.get_weights()[0][None]), axis=0)
        np.testing.assert_allclose(model.get_weights()[0], mean, **CLOSE)


def normed() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = keras.layers
    return keras.Sequential([
        keras.Input((INPUTS,)), layers.Dense(4), layers.BatchNormalization(), layers.Dense(OUTPUTS),
    ])  # fmt: skip


def case_hierarchical_sgd_resumes_a_saved_model():
    levels = {"period_group_size_dict": {2: 1, 4: "world"}, "gradient_groups": None}
    for options in ({"warmup_steps": 2}, {"outer": SlowMo(), "delay_steps": 2}):
        saved = {}
        model = normed()
        model.compile(HierarchicalSGD(sgd(), **levels, **options), "mse")
        with folder() as path:

            def save(model, path=path, saved=saved) -> None:
                done = model.optimizer.steps_done
                if done == 5:
                    file = str(path / f"{hvd.rank()}.{done}.keras")
                    model.save(file)
                    saved[done] = file, pickle.dumps(model.optimizer.averaging_state())

            train(model, 5, look=save)
            for done, (file, state) in saved.items():
                again = keras.models.load_model(file)
                optimizer = HierarchicalSGD(again.optimizer, **levels, **options)
                optimizer.load_averaging_state(pickle.loads(state))
                again.compile(optimizer, "mse")
                train(again, 5, first=done + 1)
                assert optimizer.steps_done == STEPS_TAKEN
                for mine, theirs in zip(again.get_weights(), model.get_weights(), strict=True):
                    np.testing.assert_array_equal(mine, theirs)


def case_hierarchical_sgd_validates_what_all_ranks_have():
    model = normed()
    optimizer = HierarchicalSGD(
        keras.optimizers.Adam(0.01), period_group_size_dict={2: "world"}, gradient_groups=None
    )
    model.compile(optimizer, "mse")
    random = np.random.default_rng(3)
    validation = random.normal(size=(4, INPUTS)), random.normal(size=(4, OUTPUTS))
    seen = []

    class AtTheEndOfEpochs(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen.append((epoch, float(logs["val_loss"])))

    given = [batch(2, step, hvd.rank()) for step in range(1, 6)]
    x, y = (np.concatenate(each) for each in zip(*given, strict=True))
    callbacks = [HierarchicalSGDCallback(), AtTheEndOfEpochs()]
    model.fit(
        x, y, batch_size=ROWS, epochs=2, verbose=0, callbacks=callbacks, validation_data=validation
    )
    assert hvd.allgather_object(seen) == [seen] * hvd.size()
    for weights in hvd.allgather_object(model.get_weights()):
        for mine, theirs in zip(weights, model.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, theirs)


def case_hierarchical_sgd_refuses_what_it_cannot_do():
    levels = {"period_group_size_dict": {2: "world"}, "gradient_groups": None}
    scaled = keras.optimizers.LossScaleOptimizer(sgd())
    with pytest.raises(ValueError, match="mixed_bfloat16"):
        HierarchicalSGD(scaled, **levels)
    last = hvd.size() - 1
    with pytest.raises(ValueError, match="delay_steps=9"):
        HierarchicalSGD(sgd(), delay_steps=9 if hvd.rank() == last else 0, **levels)
    model = linear(0)
    model.compile(sgd(), "mse")
    with pytest.raises(TypeError, match="optimizer is SGD"):
        train(model, 0)
    model.compile(HierarchicalSGD(sgd(), **levels), "mse", steps_per_execution=2)
    with pytest.raises(ValueError, match="steps_per_execution"):
        train(model, 0)
    if hvd.size() > 1:
        model.compile(HierarchicalSGD(sgd(), **levels), "mse")
        with pytest.warns(
            UserWarning, match="nothing averages the weights: pass HierarchicalSGDCall"
        ):
            model.fit(*batch(0, 1, hvd.rank()), verbose=0)
    adam = HierarchicalSGD(keras.optimizers.Adam(), momentum="reset", **levels)
    model.compile(adam, "mse")
    with pytest.raises(ValueError, match="'keep' or 'average'"):
        train(model, 0)
