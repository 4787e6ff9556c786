"""hororing.keras on JAX: the cases of keras_cases.py, and those only for this backend."""
# ruff: noqa: F405  # cases use names of keras_cases.py

from __future__ import annotations

import importlib.util
import os
import sys

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
