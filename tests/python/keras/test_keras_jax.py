"""hororing.keras on JAX: the cases of keras_cases.py, and those only for this backend."""
# ruff: noqa: F405  # cases use names of keras_cases.py

from __future__ import annotations

import importlib.util
import os
import sys
import warnings

import mpirun
import pytest
import tiers

if __name__ == "cases":  # on the ranks
    os.environ["KERAS_BACKEND"] = "jax"
    os.environ["JAX_ENABLE_X64"] = "1"
    sys.modules["tensorflow"] = None  # if it is installed, Keras imports it, which is slow
    from keras_cases import *  # noqa: F403
    from keras_guard_cases import *  # noqa: F403
    from keras_hierarchical_cases import *  # noqa: F403

CASES = mpirun.cases_in(
    "keras_cases.py", "keras_guard_cases.py", "keras_hierarchical_cases.py", __file__
)


@tiers.full
@pytest.mark.skipif(not importlib.util.find_spec("jax"), reason="jax is not installed")
@pytest.mark.parametrize("case", CASES)
def test_keras_on_jax(case: str):
    mpirun.cases_of(__file__, 2).check(case)


# -- only this backend -----------------------------------------------------------------------------


def case_eager_steps():
    expected = network()
    fit(expected, sgd(), steps=2, alone=True)
    model = network()
    optimizer = hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True
    )
    model.compile(optimizer, "mse", run_eagerly=True)
    model.fit(
        mine(X, 2), mine(Y, 2), batch_size=BATCH // hvd.size() // 2, shuffle=False, verbose=0,
        callbacks=[Broadcast(0)],
    )  # fmt: skip
    assert_same_weights(model, expected)


def case_one_computation_over_several_processes_is_refused():
    model = network()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jax.process_count", lambda: 2)
        with pytest.raises(ValueError, match=r"JAX spans 2 processes.* leave out keras\.dist"):
            fit(model, hvd.DistributedOptimizer(sgd()), steps=1)


def case_a_mismatch_in_a_train_step_tells_what_hororing_says():
    model = keras.Sequential([keras.Input((2 + hvd.rank(),)), keras.layers.Dense(1)])
    model.compile(hvd.DistributedOptimizer(sgd(), name="differ"), "mse")
    with pytest.raises(Exception, match=r"differ/0.kernel"):
        model.fit(np.ones((4, 2 + hvd.rank())), np.ones((4, 1)), verbose=0)
    assert hvd.allreduce(1.0, op=hvd.Sum) == hvd.size()


def passes(**options):
    return hvd.DistributedOptimizer(
        sgd(), backward_passes_per_step=2, average_aggregated_gradients=True, **options
    )


def case_several_steps_in_one_scan():
    # As Keras does for steps_per_execution, from the version after 3.15 on.
    import jax

    expected = network()
    fit(expected, sgd(), steps=4, alone=True)
    for weighted in (False, True):
        model = network()
        optimizer = passes()
        if weighted:
            optimizer.weight = 3
        model.compile(optimizer, "mse")
        x, y = (mine(each, 4).reshape(8, -1, each.shape[-1]) for each in (X, Y))
        model._symbolic_build(data_batch=(x[0], y[0]))

        def step(state, data, model=model):
            logs, state = model.train_step(state, data)
            return tuple(map(list, state)), logs["loss"]

        parts = ("trainable", "non_trainable", "optimizer", "metrics")
        state = model._get_jax_state(**{f"{each}_variables": True for each in parts})
        state, losses = jax.jit(lambda state, data, step=step: jax.lax.scan(step, state, data))(
            tuple(map(list, state)), (x, y)
        )
        assert losses.shape == (8,)
        for variable, value in zip(model.trainable_variables, state[0], strict=True):
            variable.assign(value)
        assert_same_weights(model, expected)


def case_what_a_rank_has_of_its_own_stays_its_own():
    model = network()
    optimizer = passes()
    optimizer.weight = 1 + hvd.rank()
    with folder() as where:
        fit(
            model, optimizer, steps=2, parts=2,
            callbacks=[Broadcast(0), hvd.callbacks.GuardCallback(every=1)],
        )  # fmt: skip
        model.fit(mine(X, 1), mine(Y, 1), batch_size=BATCH, verbose=0)  # half of a step
        assert optimizer.weight == 1 + hvd.rank()
        state = hvd.elastic.KerasState(model)
        state.sync()
        assert optimizer.weight == 1 + hvd.rank()
        path = where / f"{hvd.rank()}.keras"
        model.save(path)
        plain = keras.models.load_model(path).optimizer
        assert len(plain.variables) < len(optimizer.variables)
        saved = {str(at): each.numpy() for at, each in enumerate(plain.variables)}
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "Skipping variable loading")
            hvd.DistributedOptimizer(plain, backward_passes_per_step=2).load_own_variables(saved)


def case_a_weight_is_set_through_the_model_of_a_callback():
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd())
    optimizer.weight = 1
    model.compile(optimizer, "mse")
    seen = []

    class Weigh(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            with pytest.raises(RuntimeError, match=r"self.model.optimizer.weight"):
                optimizer.weight = 2
            with pytest.raises(RuntimeError, match=r"self.model.optimizer.weight"):
                _ = optimizer.weight
            self.model.optimizer.weight = 3 + hvd.rank()
            seen.append(batch)

    model.fit(mine(X, 2), mine(Y, 2), batch_size=BATCH, verbose=0, callbacks=[Weigh()])
    assert seen
    assert optimizer.weight == 3 + hvd.rank()


def case_the_error_that_ended_fit_is_told():
    model = network(seed=hvd.rank())  # not broadcast

    class Fail(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            raise KeyError("the first error")

    for handled in (False, True):
        try:
            if handled:
                raise OSError("of an attempt before")
            with pytest.raises(KeyError, match="the first error"):
                fit(model, hvd.DistributedOptimizer(sgd()), steps=1, callbacks=[Fail()])
        except OSError:
            with pytest.raises(errors.MismatchError, match="different values"):
                fit(model, hvd.DistributedOptimizer(sgd()), steps=1)
