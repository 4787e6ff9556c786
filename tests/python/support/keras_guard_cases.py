"""Cases for the guard of hororing.keras, on every backend of Keras, for test_keras_*.py."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
from keras import ops
from keras_cases import BACKEND, Broadcast, X, Y, mine, network, sgd

import hororing.keras as hvd


class Assign(keras.callbacks.Callback):
    """Adds 0.5 to an element of the first kernel, on one rank, before a batch."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._here = rank == hvd.rank()

    def on_train_batch_begin(self, batch: int, logs: object = None) -> None:
        if batch == 4 and self._here:
            kernel = self.model.layers[0].kernel
            value = np.array(ops.convert_to_numpy(kernel))
            value[1, 2] += 0.5
            kernel.assign(value)


def guarded(guard, *others, inputs=X, optimizer=None) -> keras.Model:
    model = network()
    model.compile(hvd.DistributedOptimizer(optimizer or sgd()), loss="mse")
    callbacks = [Broadcast(0), *others, guard]
    x, y = mine(inputs), mine(Y)
    model.fit(x, y, batch_size=12 // hvd.size(), verbose=0, shuffle=False, callbacks=callbacks)
    return model


def case_a_guard_names_a_variable_that_differs():
    last = hvd.size() - 1
    guard = hvd.callbacks.GuardCallback(every=3, on_divergence="error")
    guarded(guard)
    report = guard.report()
    assert report["findings"] == []
    if hvd.size() == 1:
        return
    assert report["comparisons"] == 7  # after 1, 3, ... 18 of 20
    assert report["last_equal"] == 18
    guard = hvd.callbacks.GuardCallback(every=3, on_divergence="error")
    with pytest.raises(hvd.MismatchError) as got:
        guarded(guard, Assign(last))
    assert re.search(r"at step 6 \(last equal at 3\): .*dense/kernel", str(got.value))
    (finding,) = guard.report()["findings"]
    assert finding["largest"] == pytest.approx(0.5)
    assert finding["at"] == [1, 2]
    assert finding["ranks"] == ([last] if hvd.size() > 2 else [])
    if hvd.size() > 2:
        guard = hvd.callbacks.GuardCallback(every=3, on_divergence="repair")
        guarded(guard, Assign(last))  # at the end of fit, the optimizer finds no difference
        assert [each["repaired"] for each in guard.report()["findings"]] == [True]


def case_a_guard_names_gradients_that_are_not_finite():
    if BACKEND == "jax":
        with pytest.raises(ValueError, match='on_nonfinite="skip" is not for JAX'):
            hvd.callbacks.GuardCallback(on_nonfinite="skip")
        return
    culprit = hvd.size() - 1
    bad = X.copy()
    bad[2 * 12 + 11] = np.nan  # of the last rank, in the third batch
    text = rf"of .*kernel is not finite on rank {culprit} \(.* at step 3: \d+ of \d+ elements"
    guard = hvd.callbacks.GuardCallback(on_nonfinite="skip")
    model = guarded(guard, inputs=bad)
    assert guard.report()["skipped"] == 1
    assert all(np.isfinite(ops.convert_to_numpy(each)).all() for each in model.weights)
    guard = hvd.callbacks.GuardCallback(on_nonfinite="error")
    with pytest.raises(FloatingPointError, match=text):
        guarded(guard, inputs=bad)
    guard = hvd.callbacks.GuardCallback(on_nonfinite="warn", every=0)
    guarded(guard, inputs=bad)
    assert guard.report()["findings"][0]["ranks"] == [culprit]
