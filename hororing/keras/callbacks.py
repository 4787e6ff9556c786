"""Callbacks for ``model.fit`` on many ranks. Every rank needs the same ones, in the same order."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops

import hororing.numpy as hvd
from hororing import arguments, collectives
from hororing.keras.backends import backend
from hororing.keras.distributed import NOTHING_REDUCED, WRONG_ORDER, Distributed
from hororing.keras.settings import check_text
from hororing.keras.values import broadcast_variables
from hororing.runtime import rank, size


class BroadcastGlobalVariablesCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Lets all ranks begin with the weights and the optimizer's variables of one; checks, too.

    A model that is built is broadcast before its first batch, one that is not after it: ranks have
    begun with different weights then, but go on with the same ones. States of random generators
    (of dropout layers, say) stay those of each rank.

    Parameters
    ----------
    root_rank : the rank whose values all get.
    device : Horovod's; without a meaning here.
    local_variables : what is left out, as `register_local_var` does.

    Raises
    ------
    RuntimeError : after the first batch, if no gradient was reduced.
    ValueError : for a LossScaleOptimizer around a distributed optimizer, and for XLA
        (``jit_compile=True``) on TensorFlow.
    """

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        check_text("device", device)
        self.root_rank = arguments.check_root(root_rank, type(self).__name__)
        self._local = {_key(variable) for variable in local_variables or ()}
        self._done = False
        self._checked = False
        self._submitted = 0

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        self._local.add(_key(var))

    def set_model(self, model: Any) -> None:
        """Look at how the model was compiled."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        inner = getattr(optimizer, "inner_optimizer", None)
        if isinstance(inner, Distributed) and not isinstance(optimizer, Distributed):
            raise ValueError(WRONG_ORDER)
        if size() > 1:
            backend().prepare(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if there is something."""
        if self.model.built and not self._done:
            optimizer = getattr(self.model, "optimizer", None)
            if optimizer is not None and not optimizer.built:
                optimizer.build(self.model.trainable_variables)
            self._broadcast()
        self._submitted = collectives.submitted()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check that gradients were reduced; broadcast, if there was nothing before."""
        if not self._checked:
            self._checked = True
            self._check()
        if not self._done:
            self._broadcast()

    def _check(self) -> None:
        optimizer = getattr(self.model, "optimizer", None)
        if size() == 1 or optimizer is None:
            return
        if isinstance(optimizer, Distributed):
            if optimizer._settings.reduces and not optimizer._hororing.reached:
                raise RuntimeError(NOTHING_REDUCED)
        elif collectives.submitted() == self._submitted:  # a train step may reduce by itself
            raise RuntimeError(NOTHING_REDUCED)

    def _broadcast(self) -> None:
        model = self.model
        optimizer = getattr(model, "optimizer", None)
        variables = [*model.weights, *(() if optimizer is None else optimizer.variables)]
        # A variable may be in both.
        unique = {_key(variable): variable for variable in variables}
        broadcast_variables(
            [variable for key, variable in unique.items() if key not in self._local],
            self.root_rank,
        )
        self._done = True


def _key(variable: Any) -> int:
    return id(variable)


class MetricAverageCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages all metrics over the ranks at the end of each epoch.

    It must stand before callbacks that look at them: ReduceLROnPlateau, EarlyStopping,
    ModelCheckpoint, TensorBoard. All ranks must have the same metrics.

    Parameters
    ----------
    device : Horovod's; without a meaning here.
    """

    def __init__(self, device: str = "") -> None:
        super().__init__()
        check_text("device", device)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics in `logs`."""
        if not logs:
            return
        names = sorted(logs)
        means = hvd.allreduce(
            np.array([float(logs[name]) for name in names]),
            name=f"{type(self).__name__}.{epoch}",
            op=arguments.Average,
        )
        logs.update(zip(names, means.tolist(), strict=True))


class LearningRateScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Parameters
    ----------
    initial_lr : the rate that is multiplied.
    multiplier : a function of the epoch, or a number.
    start_epoch, end_epoch : when it is in force: start_epoch <= epoch < end_epoch.
    staircase : change it once per epoch; otherwise with every batch, and `multiplier` is given
        fractions of epochs.
    momentum_correction : keep the effect of momentum when the rate changes (Goyal et al. 2017,
        arXiv:1706.02677, section 3). The velocity of Keras' optimizers contains the rate, so it
        is multiplied by new rate / old rate.
    steps_per_epoch : batches per epoch, where ``staircase=False`` and Keras does not know it.
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if not callable(multiplier) and not isinstance(multiplier, int | float | np.number):
            raise TypeError(
                f"{type(self).__name__}: multiplier must be a number or a function, not "
                f"{type(multiplier).__name__} ({multiplier!r})"
            )
        self.initial_lr = float(initial_lr)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.multiplier = multiplier
        self.current_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Learn how long an epoch is."""
        if self.staircase or self.steps_per_epoch:
            return
        self.steps_per_epoch = (self.params or {}).get("steps")
        if not self.steps_per_epoch:
            raise ValueError(
                f"{type(self).__name__}: Keras does not know how many batches an epoch has; pass "
                "steps_per_epoch, or staircase=True"
            )

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Note the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate."""
        epoch = self.current_epoch
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if not self.staircase:
            assert self.steps_per_epoch is not None
            self._set(epoch + batch / self.steps_per_epoch)
        elif batch == 0:
            self._set(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing. Without this method Keras would call the others in the background."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics, as "lr"."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(ops.convert_to_numpy(self.model.optimizer.learning_rate))

    def _set(self, epoch: float) -> None:
        factor = self.multiplier(epoch) if callable(self.multiplier) else self.multiplier
        optimizer = self.model.optimizer
        before = self._rate()
        optimizer.learning_rate = self.initial_lr * factor
        after = self._rate()
        if self.momentum_correction and before != after and before > 0:
            for velocity in velocities(optimizer):
                velocity.assign(ops.multiply(velocity, after / before))


def velocities(optimizer: Any) -> list[Any]:
    """Variables of optimizers with `momentum` that contain the learning rate: SGD, RMSprop."""
    optimizer = getattr(optimizer, "inner_optimizer", optimizer)
    if not optimizer.built or not getattr(optimizer, "momentum", 0):
        return []
    name = "momentums" if hasattr(optimizer, "momentums") else "_momentums"
    return [velocity for velocity in getattr(optimizer, name, []) if velocity is not None]


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from ``initial_lr / size`` to `initial_lr`, batch by batch.

    For rates that were multiplied by the number of ranks (Goyal et al. 2017, arXiv:1706.02677,
    section 2.2). The last batch of the last epoch of warm-up has `initial_lr`.

    Parameters
    ----------
    initial_lr : the rate to arrive at.
    warmup_epochs : how long that takes.
    momentum_correction, steps_per_epoch : as for `LearningRateScheduleCallback`.
    verbose : 1: rank 0 prints the rate when it has arrived.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            done = epoch + 1 / self.steps_per_epoch  # when this batch is over
            return (done * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics."""
        super().on_epoch_end(epoch, logs)
        if self.verbose and rank() == 0 and epoch + 1 == self.end_epoch:
            print(f"\nEpoch {epoch + 1}: learning rate warmup is over, at {self._rate():g}.")


class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Saves the best model so far, on rank 0 only.

    Put MetricAverageCallback before it, so that the best of all ranks counts.

    Parameters
    ----------
    monitor, verbose, mode, save_freq, save_weights_only : as for keras.callbacks.ModelCheckpoint.
    filepath : where to; may be assigned later, before training, to the attribute of this name.
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
            self.filepath: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise ValueError if there is no path."""
        if self.filepath is None:
            raise ValueError(f"{type(self).__name__}: set its filepath before training")
        self.filepath = os.fspath(self.filepath)
        super().on_train_begin(logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if it is time."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if it is time."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
