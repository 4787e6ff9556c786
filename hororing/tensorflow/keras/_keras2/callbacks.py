"""The callbacks of hororing.tensorflow.keras for tf_keras, which is Keras 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from hororing._adapters import elastic_callbacks, fit_callbacks
from hororing.tensorflow.gradients import variable_key
from hororing.tensorflow.keras._keras2.optimizer import Distributed, inner_optimizer
from hororing.tensorflow.state import broadcast_variables


class BroadcastGlobalVariablesCallback(fit_callbacks.Broadcast, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts one rank's weights and optimizer variables: _adapters.fit_callbacks.Broadcast."""

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast the variables of a new model, and of each generation of an elastic job."""
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{type(self).__name__}: tf_keras in sessions of TensorFlow 1 is not supported; "
                "leave out tf.compat.v1.disable_eager_execution()"
            )
        super().on_train_begin(logs)

    @staticmethod
    def _key(variable: Any) -> Any:
        return variable_key(variable)

    def _states(self, optimizer: Any) -> Sequence[Any]:
        return () if optimizer is None else optimizer.variables()

    def _build(self, optimizer: Any) -> None:
        inner = inner_optimizer(optimizer)
        build = getattr(inner, "_create_all_weights", None) or inner.build
        build(self.model.trainable_variables)

    def _uses(self, optimizer: Any) -> bool | None:
        inner = inner_optimizer(optimizer)
        if not isinstance(inner, Distributed):
            return None
        return inner._state.was_called or not inner._settings.reduces

    def _send(self, variables: list[Any]) -> None:
        broadcast_variables(variables, self.root_rank)


class MetricAverageCallback(fit_callbacks.MetricAverage, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics over the ranks: hororing._adapters.fit_callbacks.MetricAverage."""


class LearningRateScheduleCallback(
    fit_callbacks.LearningRateSchedule,
    tf.keras.callbacks.Callback,  # type: ignore[misc]
):
    """Sets the learning rate: hororing._adapters.fit_callbacks.LearningRateSchedule."""

    def _rate(self) -> float:
        return float(tf.keras.backend.get_value(self.model.optimizer.learning_rate))

    def _scale_velocities(self, factor: float) -> None:
        for velocity in _velocities(self.model):
            velocity.assign(velocity * tf.cast(factor, velocity.dtype))


class LearningRateWarmupCallback(fit_callbacks.LearningRateWarmup, LearningRateScheduleCallback):
    """Raises the learning rate: hororing._adapters.fit_callbacks.LearningRateWarmup."""


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
    """Saves the best model so far, on rank 0 only: hororing._adapters.fit_callbacks.BestModel."""


class CommitStateCallback(elastic_callbacks.CommitState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state: hororing._adapters.elastic_callbacks.CommitState."""


class UpdateBatchStateCallback(elastic_callbacks.UpdateBatchState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Counts batches in ``state.batch``: hororing._adapters.elastic_callbacks.UpdateBatchState."""


class UpdateEpochStateCallback(elastic_callbacks.UpdateEpochState, tf.keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the epoch in ``state.epoch``: hororing._adapters.elastic_callbacks.UpdateEpochState."""
