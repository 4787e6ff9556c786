"""The callbacks of hororing.tensorflow.keras for tf_keras, which is Keras 2."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from hororing import arguments, collectives, fit_callbacks, membership
from hororing.elastic import fit
from hororing.keras.distributed import NOTHING_REDUCED
from hororing.runtime import size
from hororing.tensorflow.gradients import variable_key
from hororing.tensorflow.keras.legacy import Distributed, inner_optimizer
from hororing.tensorflow.state import broadcast_variables


class BroadcastGlobalVariablesCallback(tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts weights and optimizer variables of one rank; checks that gradients are reduced.

    As the one of hororing.keras.callbacks, with its arguments and errors.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        arguments.check_text("device", device)
        self.root_rank = arguments.check_root(root_rank, type(self).__name__)
        self._local = {variable_key(variable) for variable in local_variables or ()}
        self._done = False
        self._before: set[Any] = set()  # what was broadcast before the first batch
        self._sent: Any = None  # the model, optimizer and generation of the latest broadcast
        self._checked = False
        self._submitted = 0

    def register_local_var(self, var: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local.add(variable_key(var))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables of a new model, and of each generation of an elastic job."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{type(self).__name__}: tf_keras in sessions of TensorFlow 1 is not supported; "
                "leave out tf.compat.v1.disable_eager_execution()"
            )
        outer = getattr(self.model, "optimizer", None)
        self._done = self._sent == (self.model, outer, membership.generation())
        self._checked = False
        if not self._done:
            self._before = set()
            count = 0 if outer is None else len(outer.variables())
            built, alike = fit_callbacks.built_on_all(self.model, count, type(self).__name__)
            if built:
                if outer is not None and not alike:  # a rank has loaded its optimizer's state
                    optimizer = inner_optimizer(outer)
                    build = getattr(optimizer, "_create_all_weights", None) or optimizer.build
                    build(self.model.trainable_variables)
                self._broadcast()
        self._submitted = collectives.submitted()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check that gradients were reduced; broadcast, unless it was done before."""
        if not self._checked:
            self._checked = True
            self._check()
        if not self._done:
            self._broadcast()
            self._done = True

    def _check(self) -> None:
        optimizer = inner_optimizer(getattr(self.model, "optimizer", None))
        if size() == 1 or optimizer is None:
            return
        if isinstance(optimizer, Distributed):
            if optimizer._settings.reduces and not optimizer._state.was_called:
                raise RuntimeError(NOTHING_REDUCED)
        elif collectives.submitted() == self._submitted or fit_callbacks.only_keras(
            self.model, optimizer
        ):  # a train step may reduce by itself
            raise RuntimeError(NOTHING_REDUCED)

    def _broadcast(self) -> None:
        """Broadcast, before the first batch. After it, what has come: an optimizer's is equal."""
        optimizer = getattr(self.model, "optimizer", None)
        states = () if optimizer is None or self._before else optimizer.variables()
        # A variable may be in both.
        unique = {variable_key(each): each for each in (*self.model.weights, *states)}
        left_out = self._local | self._before
        variables = [variable for key, variable in unique.items() if key not in left_out]
        if variables:
            broadcast_variables(variables, self.root_rank)
        self._before = set(unique)
        self._sent = (self.model, optimizer, membership.generation())


class MetricAverageCallback(fit_callbacks.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics over the ranks: hororing.fit_callbacks.MetricAverage."""


class LearningRateScheduleCallback(
    fit_callbacks.LearningRateSchedule,
    tf.keras.callbacks.Callback,  # type: ignore[misc]
):
    """Sets the learning rate: hororing.fit_callbacks.LearningRateSchedule."""

    def _rate(self) -> float:
        return float(tf.keras.backend.get_value(self.model.optimizer.learning_rate))

    def _scale_velocities(self, factor: float) -> None:
        for velocity in _velocities(self.model):
            velocity.assign(velocity * tf.cast(factor, velocity.dtype))


class LearningRateWarmupCallback(fit_callbacks.LearningRateWarmup, LearningRateScheduleCallback):
    """Raises the learning rate: hororing.fit_callbacks.LearningRateWarmup."""


def _velocities(model: Any) -> list[Any]:
    """Variables of optimizers with `momentum` that contain the learning rate: SGD, RMSprop."""
    optimizer = inner_optimizer(model.optimizer)
    if not hasattr(optimizer, "momentum"):
        return []
    if hasattr(optimizer, "get_slot"):  # a legacy one
        if "momentum" not in optimizer.get_slot_names():
            return []
        return [optimizer.get_slot(each, "momentum") for each in model.trainable_variables]
    found = getattr(optimizer, "momentums", None) or getattr(optimizer, "_momentums", None)
    return list(found or ())


class BestModelCheckpoint(fit_callbacks.BestModel, tf.keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the best model so far, on rank 0 only. As the one for Keras 3."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(
            "later" if filepath is None else filepath,
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None


class CommitStateCallback(fit.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state: hororing.elastic.fit.CommitState."""


class UpdateBatchStateCallback(fit.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts batches in ``state.batch``: hororing.elastic.fit.UpdateBatchState."""


class UpdateEpochStateCallback(fit.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the epoch in ``state.epoch``: hororing.elastic.fit.UpdateEpochState."""


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "CommitStateCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]
