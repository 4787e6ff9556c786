"""hororing.keras on PyTorch: the cases of keras_cases.py, and those only for this backend."""
# ruff: noqa: F405  # cases use names of keras_cases.py

from __future__ import annotations

import os
import sys

import mpirun
import session

if __name__ == "cases":  # on the ranks
    os.environ["KERAS_BACKEND"] = "torch"
    sys.modules["tensorflow"] = None  # if it is installed, Keras imports it, which is slow
    import torch
    from keras_cases import *  # noqa: F403
    from keras_guard_cases import *  # noqa: F403
    from keras_hierarchical_cases import *  # noqa: F403

CASES = mpirun.cases_in(
    "keras_cases.py", "keras_guard_cases.py", "keras_hierarchical_cases.py", __file__
)


test_keras_on_torch = session.on_ranks(
    globals(), 1, 2, 3, push=[2], session="keras on torch", cases=CASES
)


# -- only this backend -----------------------------------------------------------------------------


def case_loops_of_ones_own():
    expected = network()
    fit(expected, sgd(), steps=4, alone=True)
    model = network()
    optimizer = hvd.DistributedOptimizer(sgd())
    part = BATCH // hvd.size()
    x, y = mine(X, 4), mine(Y, 4)
    for begin in range(0, len(x), part):
        model.zero_grad()
        rows = slice(begin, begin + part)
        ((model(x[rows]) - ops.convert_to_tensor(y[rows])) ** 2).mean().backward()
        weights = model.trainable_weights
        gradients = [weight.value.grad for weight in weights]
        before = [gradient.clone() for gradient in gradients]
        with torch.no_grad():
            optimizer.apply(gradients, weights)
        if hvd.size() > 1:  # a plain optimizer of Keras may write into them
            assert all(map(torch.equal, gradients, before))
    assert_same_weights(model, expected)
