"""Callbacks for ``model.fit`` on many ranks. Every rank needs the same ones, in the same order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from hororing._adapters import fit_callbacks
from hororing._engine.state import size
from hororing.guard.options import from_environment
from hororing.keras.backends import backend
from hororing.keras.distributed import Distributed, shared_variables
from hororing.keras.guard import GuardCallback
from hororing.keras.state import WRONG_ORDER
from hororing.keras.values import broadcast_variables


class BroadcastGlobalVariablesCallback(fit_callbacks.Broadcast, keras.callbacks.Callback):  # type: ignore[misc]
    """Broadcasts one rank's weights and optimizer variables: _adapters.fit_callbacks.Broadcast.

    Also raises ValueError for a LossScaleOptimizer around a distributed optimizer, and for XLA
    (``jit_compile=True``) on TensorFlow.

    With HORORING_GUARD it also does what `GuardCallback` does.

    >>> optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.1))
    >>> model.compile(optimizer, loss="mse")
    >>> model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
    """

    _guard: GuardCallback | None = None  # of HORORING_GUARD

    def set_model(self, model: Any) -> None:
        """Check how the model was compiled."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, Distributed) and not isinstance(optimizer, Distributed):
            raise ValueError(WRONG_ORDER)
        if size() > 1:
            backend().prepare(model)
        if self._guard is None and (options := from_environment()) is not None:
            self._guard = GuardCallback(**vars(options))
        if self._guard is not None:
            self._guard.set_model(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """See `fit_callbacks.Broadcast`."""
        super().on_train_begin(logs)
        if self._guard is not None:
            self._guard.on_train_begin(logs)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell the guard of HORORING_GUARD."""
        if self._guard is not None:
            self._guard.on_epoch_begin(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """See `fit_callbacks.Broadcast`."""
        super().on_train_batch_end(batch, logs)
        if self._guard is not None:
            self._guard.on_train_batch_end(batch, logs)

    def _states(self, optimizer: Any) -> Sequence[Any]:
        return shared_variables(optimizer)

    def _build(self, optimizer: Any) -> None:
        if not optimizer.built:
            optimizer.build(self.model.trainable_variables)

    def _uses(self, optimizer: Any) -> bool | None:
        if isinstance(optimizer, Distributed):
            return optimizer._hororing.was_called or not optimizer._settings.reduces
        # A MultiOptimizer may have distributed ones.
        parts = [self._uses(part) for part in getattr(optimizer, "optimizers", ())]
        return any(parts) if parts and None not in parts else None

    def _send(self, variables: list[Any]) -> None:
        broadcast_variables(variables, self.root_rank)


class MetricAverageCallback(fit_callbacks.MetricAverage, keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics over the ranks: hororing._adapters.fit_callbacks.MetricAverage.

    >>> model.fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback()])
    """


class LearningRateScheduleCallback(
    fit_callbacks.LearningRateSchedule,
    keras.callbacks.Callback,  # type: ignore[misc]
):
    """Sets the learning rate: hororing._adapters.fit_callbacks.LearningRateSchedule.

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
    # Others, such as Muon, have a `momentum` without the rate.
    known = isinstance(optimizer, (keras.optimizers.SGD, keras.optimizers.RMSprop))
    if not (known and optimizer.built and optimizer.momentum):
        return []
    name = "momentums" if hasattr(optimizer, "momentums") else "_momentums"
    return [velocity for velocity in getattr(optimizer, name, []) if velocity is not None]


class LearningRateWarmupCallback(fit_callbacks.LearningRateWarmup, LearningRateScheduleCallback):
    """Raises the learning rate: hororing._adapters.fit_callbacks.LearningRateWarmup.

    >>> warmup = hvd.callbacks.LearningRateWarmupCallback(0.1 * hvd.size(), warmup_epochs=5)
    >>> model.fit(x, y, callbacks=[warmup])
    """


class BestModelCheckpoint(fit_callbacks.BestModel, keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the best model so far, on rank 0 only: hororing._adapters.fit_callbacks.BestModel.

    >>> best = hvd.callbacks.BestModelCheckpoint(monitor="loss", filepath="best.keras")
    >>> model.fit(x, y, callbacks=[hvd.callbacks.MetricAverageCallback(), best])
    """


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "GuardCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
