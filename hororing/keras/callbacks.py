"""Callbacks for ``model.fit`` on many ranks. Every rank needs the same ones, in the same order."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import keras
from keras import ops

from hororing import arguments, collectives, fit_callbacks, membership
from hororing.keras.backends import backend
from hororing.keras.distributed import NOTHING_REDUCED, WRONG_ORDER, Distributed
from hororing.keras.values import broadcast_variables
from hororing.runtime import size


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts one rank's weights and optimizer variables, and checks that gradients are reduced.

    A model that is already built is broadcast before the first batch. What that batch builds is
    broadcast after it: ranks start with different weights, but continue with the same ones. `build`
    of a sub-class of keras.Model may leave its layers to the first batch. Each rank keeps the
    states of its random generators (for example of dropout layers).

    Parameters
    ----------
    root_rank : the rank whose values are sent.
    device : accepted for Horovod's sake; no effect.
    local_variables : variables to leave out, as `register_local_var` does.

    Raises
    ------
    RuntimeError : after the first batch, if no gradient was reduced; before it, if only some ranks
        have built the model.
    ValueError : for a LossScaleOptimizer around a distributed optimizer, and for XLA
        (``jit_compile=True``) on TensorFlow.

    Examples
    --------
    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    >>> model.compile(optimizer, loss="mse")
    >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        arguments.check_text("device", device)
        self.root_rank = arguments.check_root(root_rank, type(self).__name__)
        self._local = {_key(variable) for variable in local_variables or ()}
        self._done = False
        self._before: set[int] = set()  # what was broadcast before the first batch
        self._sent: Any = None  # the model, optimizer and generation of the latest broadcast
        self._checked = False
        self._submitted = 0

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        self._local.add(_key(var))

    def set_model(self, model: Any) -> None:
        """Check how the model was compiled."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, Distributed) and not isinstance(optimizer, Distributed):
            raise ValueError(WRONG_ORDER)
        if size() > 1:
            backend().prepare(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if the model is built and new, or an elastic job was formed again."""
        model, optimizer = self.model, getattr(self.model, "optimizer", None)
        self._done = self._sent == (model, optimizer, membership.generation())
        self._checked = False
        if not self._done:
            self._before = set()
            count = 0 if optimizer is None else len(optimizer.variables)
            built, alike = fit_callbacks.built_on_all(model, count, type(self).__name__)
            if built:
                # Its first step would build it, perhaps with variables that the model does not
                # list. But a rank may have loaded its state.
                if optimizer is not None and not alike and not optimizer.built:
                    optimizer.build(model.trainable_variables)
                self._broadcast()
        self._submitted = collectives.submitted()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check that gradients were reduced; broadcast, if the model was not built before."""
        if not self._checked:
            self._checked = True
            self._check()
        if not self._done:
            self._broadcast()
            self._done = True

    def _check(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if size() == 1 or optimizer is None:
            return
        if isinstance(optimizer, Distributed):
            if optimizer._settings.reduces and not optimizer._hororing.was_called:
                raise RuntimeError(NOTHING_REDUCED)
        elif collectives.submitted() == self._submitted or fit_callbacks.only_keras(
            self.model, optimizer
        ):  # a train step may reduce gradients itself
            raise RuntimeError(NOTHING_REDUCED)

    def _broadcast(self) -> None:
        """Broadcast, before the first batch. After it, what has come: an optimizer's is equal."""
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        states = () if optimizer is None or self._before else optimizer.variables
        # A variable may be in both.
        unique = {_key(variable): variable for variable in (*model.weights, *states)}
        left_out = self._local | self._before
        variables = [variable for key, variable in unique.items() if key not in left_out]
        if variables:
            broadcast_variables(variables, self.root_rank)
        self._before = set(unique)
        self._sent = (model, optimizer, membership.generation())


def _key(variable: Any) -> int:
    return id(variable)


class MetricAverageCallback(fit_callbacks.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics over the ranks: hororing.fit_callbacks.MetricAverage.

    >>> model.fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback()])
    """


class LearningRateScheduleCallback(
    fit_callbacks.LearningRateSchedule,
    keras.callbacks.Callback,  # type: ignore[misc]
):
    """Sets the learning rate: hororing.fit_callbacks.LearningRateSchedule.

    >>> decay = hvd.callbacks.LearningRateScheduleCallback(0.1, lambda epoch: 0.9**epoch)
    >>> model.fit(x, y, callbacks=[decay])
    """

    def _rate(self) -> float:
        return float(ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _scale_velocities(self, factor: float) -> None:
        for velocity in velocities(self.model.optimizer):
            velocity.assign(ops.multiply(velocity, factor))


def velocities(optimizer: Any) -> list[Any]:
    """Variables of optimizers with `momentum` that contain the learning rate: SGD, RMSprop."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not optimizer.built or not getattr(optimizer, "momentum", 0):
        return []
    name = "momentums" if hasattr(optimizer, "momentums") else "_momentums"
    return [velocity for velocity in getattr(optimizer, name, []) if velocity is not None]


class LearningRateWarmupCallback(fit_callbacks.LearningRateWarmup, LearningRateScheduleCallback):
    """Raises the learning rate: hororing.fit_callbacks.LearningRateWarmup.

    >>> warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=5)
    >>> model.fit(x, y, callbacks=[warmup])
    """


class BestModelCheckpoint(fit_callbacks.BestModel, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the best model so far, on rank 0 only.

    Put MetricAverageCallback before it, so that the average of all ranks decides.

    Parameters
    ----------
    monitor, verbose, mode, save_freq, save_weights_only : as for keras.callbacks.ModelCheckpoint.
    filepath : the path; may be set later, before training, through the attribute of this name.

    Examples
    --------
    >>> best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath="best.keras")
    >>> model.fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback(), best])
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        unknown = "later.weights.h5" if save_weights_only else "later.keras"
        super().__init__(
            unknown if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
