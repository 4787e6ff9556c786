"""The common part of callbacks of ``model.fit``, for Keras 3 and for tf_keras, which is Keras 2.

Mixins for the callbacks of either, which contain what differs between the two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

import hororing.numpy as hvd
from hororing._engine import membership
from hororing._engine.state import rank, size
from hororing._requests import arguments, handles
from hororing._requests.objects import allgather_object
from hororing.elastic.variables import renew_constants

NOTHING_REDUCED = (
    "the model was trained, but no gradient went through hororing's DistributedOptimizer: ranks "
    "train separately. Pass what DistributedOptimizer returns to model.compile (again, if the "
    "model was trained before); a copy of a model (clone_model, a loaded file) has a plain "
    "optimizer, which must be wrapped again"
)


class Broadcast:
    """Broadcasts one rank's weights and optimizer variables, and checks that gradients are reduced.

    A model that is already built is broadcast before the first batch. What that batch builds is
    broadcast after it: ranks start with different weights, but continue with the same ones. `build`
    of a sub-class of keras.Model may leave its layers to the first batch. Each rank keeps the
    states of its random generators (for example of dropout layers).

    Parameters
    ----------
    root_rank : int
        The rank whose values are sent.
    device : str, optional
        Accepted for Horovod's sake; no effect.
    local_variables : iterable, optional
        Variables to leave out, as `register_local_var` does.

    Raises
    ------
    RuntimeError : after the first batch, if no gradient was reduced; before it, if only some ranks
        have built the model.
    """

    model: Any  # Keras sets it

    def __init__(
        self, root_rank: int, device: str = "", local_variables: Iterable[Any] | None = None
    ) -> None:
        super().__init__()
        arguments.check_text("device", device)
        self.root_rank = arguments.check_root(root_rank, type(self).__name__)
        self._local: set[Any] = set()
        for variable in () if local_variables is None else local_variables:
            self.register_local_var(variable)
        self._done = False
        self._before: set[Any] = set()  # what was broadcast before the first batch
        self._sent: Any = None  # the model, optimizer and generation of the latest broadcast
        self._checked = False
        self._submitted = 0

    def register_local_var(self, var: Any) -> None:
        """Leave a variable out of the broadcast."""
        title, advice = type(self).__name__, arguments.OF_A_LAYER
        self._local.add(self._key(*arguments.check_variables([var], title, advice)))

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Broadcast, if the model is built and new, or an elastic job was formed again."""
        optimizer = self._optimizer
        self._done = self._sent == (self.model, optimizer, membership.generation())
        self._checked = False
        if not self._done:
            self._before = set()
            count = len(self._states(optimizer))
            built, alike = _built_on_all(self.model, count, type(self).__name__)
            if built:
                # Its first step would build it, perhaps with variables that the model does not
                # list. But a rank may have loaded its state.
                if optimizer is not None and not alike:
                    self._build(optimizer)
                self._broadcast()
        self._submitted = handles.submitted()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Check that gradients were reduced; broadcast, if the model was not built before."""
        if not self._checked:
            self._checked = True
            trains = self._optimizer is not None and self.model.trainable_weights
            if size() > 1 and trains and self._has_reduced_nothing():
                raise RuntimeError(NOTHING_REDUCED)
        if not self._done:
            self._broadcast()
            self._done = True

    @property
    def _optimizer(self) -> Any:
        return getattr(self.model, "optimizer", None)

    def _has_reduced_nothing(self) -> bool:
        uses = self._uses(self._optimizer)
        if uses is not None:
            return not uses
        # A train step may reduce gradients itself.
        return handles.submitted() == self._submitted or _only_keras(self.model, self._optimizer)

    def _broadcast(self) -> None:
        """Broadcast everything before the first batch, and after it what that batch has created."""
        unique = {self._key(variable): variable for variable in self.model.weights}
        if not unique.keys() <= self._before:
            # Not if the weights were equal when the first batch created this state: it is either
            # equal, too, or each rank's own (Adasum, local variables, other process sets).
            states = self._states(self._optimizer)
            unique |= {self._key(variable): variable for variable in states}
        left_out = self._local | self._before
        variables = [variable for key, variable in unique.items() if key not in left_out]
        if variables:
            self._send(variables)
            renew_constants(self.model)
        self._before = set(unique)
        self._sent = (self.model, self._optimizer, membership.generation())

    # What differs between Keras 2 and 3.

    @staticmethod
    def _key(variable: Any) -> Any:
        """Return what identifies a variable."""
        return id(variable)

    def _states(self, optimizer: Any) -> Sequence[Any]:
        """Return the variables of an optimizer, or of None."""
        raise NotImplementedError

    def _build(self, optimizer: Any) -> None:
        """Create the variables of an optimizer, if it has none."""
        raise NotImplementedError

    def _uses(self, optimizer: Any) -> bool | None:
        """Return whether a distributed optimizer was used as it should, or None for another one."""
        raise NotImplementedError

    def _send(self, variables: list[Any]) -> None:
        """Broadcast variables from `root_rank`."""
        raise NotImplementedError


def _built_on_all(model: Any, optimizer_variables: int, title: str) -> tuple[bool, bool]:
    """Return whether the model has variables, and whether all optimizers have as many.

    RuntimeError if only some ranks have variables: they would broadcast before the first batch, and
    the others after it.
    """
    mine = (bool(model.built and model.weights), optimizer_variables)
    found = allgather_object(mine, f"{title}.built")
    built = [each for each, _ in found]
    if any(built) and not all(built):
        have = [at for at, each in enumerate(built) if each]
        lack = [at for at, each in enumerate(built) if not each]
        raise RuntimeError(
            f"{title}: the model has variables on ranks {have} and none yet on ranks {lack}; on "
            "all ranks, give it a keras.Input as its first layer, or call it with a batch"
        )
    return all(built), len({count for _, count in found}) == 1


def _only_keras(model: Any, optimizer: Any) -> bool:
    """Whether Keras' own code makes and applies the gradients: it reduces nothing.

    Requests in such a train step are those of layers, such as SyncBatchNormalization.
    """
    kind = type(getattr(optimizer, "inner_optimizer", optimizer))
    if kind.__module__.startswith("hororing."):
        kind = kind.apply  # that of LARS and LAMB is Keras'
    parts = (model.make_train_function, model.train_step, kind)
    return all(each.__module__.startswith(("keras.", "tf_keras.")) for each in parts)


def _is_number(value: Any) -> bool:
    try:
        np.asarray(value, np.float64)
    except (TypeError, ValueError):
        return False
    return True


class MetricAverage:
    """Averages all metrics over the ranks at the end of each epoch.

    Put it before callbacks that read metrics: ReduceLROnPlateau, EarlyStopping,
    ModelCheckpoint, TensorBoard. All ranks must have the same metrics, numbers or arrays of them;
    otherwise each gets a ValueError.

    Parameters
    ----------
    device : str, optional
        Accepted for Horovod's sake; no effect.
    weight : float or callable, optional
        The weight of this rank's metrics, such as its number of samples: a number, or a
        function without arguments that returns one. None: equal weights.
    """

    def __init__(self, device: str = "", weight: float | Callable[[], float] | None = None) -> None:
        super().__init__()
        arguments.check_text("device", device)
        self._weight = weight if callable(weight) else arguments.check_weight(weight, "metrics")

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Replace the metrics in `logs`."""
        logs = {} if logs is None else logs
        title, names = type(self).__name__, sorted(logs)
        # Values are joined by position.
        others = [f"{name}={logs[name]!r}" for name in names if not _is_number(logs[name])]
        found = allgather_object((names, others), f"{title}.{epoch}.names")
        wrong = [f"rank {at}: {', '.join(each)}" for at, (_, each) in enumerate(found) if each]
        if wrong:
            raise ValueError(f"{title}: metrics that are no numbers ({'; '.join(wrong)})")
        lists = [", ".join(each) for each, _ in found]
        if len(set(lists)) > 1:
            listed = "; ".join(f"rank {at}: {each or 'none'}" for at, each in enumerate(lists))
            raise ValueError(f"{title}: the metrics differ between the ranks ({listed})")
        if not names:
            return
        values = [np.asarray(logs[name], np.float64) for name in names]
        means = hvd.allreduce(
            np.concatenate([value.ravel() for value in values]),
            name=f"{title}.{epoch}",
            op=arguments.Average,
            weight=self._weight() if callable(self._weight) else self._weight,
        )
        ends = np.cumsum([value.size for value in values])
        for name, value, mean in zip(names, values, np.split(means, ends[:-1]), strict=True):
            logs[name] = mean.item() if value.size == 1 else mean.reshape(value.shape)


class LearningRateSchedule:
    """Sets the learning rate to ``initial_lr * multiplier(epoch)``.

    Parameters
    ----------
    initial_lr : float
        The rate that is multiplied.
    multiplier : float or callable
        A function of the epoch, or a number.
    start_epoch, end_epoch : int, optional
        When it applies: start_epoch <= epoch < end_epoch.
    staircase : bool, optional
        Change the rate once per epoch. Otherwise it changes with every batch, and `multiplier`
        gets fractions of epochs.
    momentum_correction : bool, optional
        Keep the effect of momentum when the rate changes (Goyal et al. 2017, arXiv:1706.02677,
        section 3). The velocity of Keras' optimizers contains the rate, so it is multiplied by
        new rate / old rate.
    steps_per_epoch : int, optional
        Batches per epoch, if ``staircase=False`` and Keras does not know it.
    """

    model: Any  # Keras sets these two
    params: dict[str, Any] | None

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[Any], float],
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
        self._steps = steps_per_epoch  # of the present training
        self.multiplier = multiplier
        self.current_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Note the length of an epoch."""
        self._steps = self.steps_per_epoch or (self.params or {}).get("steps")
        if not self.staircase and not self._steps:
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
            assert self._steps is not None
            self._set(epoch + batch / self._steps)
        elif batch == 0:
            self._set(epoch)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing. Without this method Keras would call the others in the background."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics, as "lr"."""
        if logs is not None:
            logs["lr"] = self._rate()

    def _set(self, epoch: float) -> None:
        factor = self.multiplier(epoch) if callable(self.multiplier) else self.multiplier
        before = self._rate()
        self.model.optimizer.learning_rate = self.initial_lr * factor
        after = self._rate()
        if self.momentum_correction and before != after and before > 0:
            self._scale_velocities(after / before)

    def _rate(self) -> float:
        """Return the optimizer's learning rate."""
        raise NotImplementedError

    def _scale_velocities(self, factor: float) -> None:
        """Multiply the optimizer's variables that contain the learning rate."""
        raise NotImplementedError


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from ``initial_lr / size`` to `initial_lr`, batch by batch.

    For rates that were multiplied by the number of ranks (Goyal et al. 2017, arXiv:1706.02677,
    section 2.2). The last batch of warm-up has `initial_lr`. With `steps_per_execution`, batches of
    one execution have the rate of the last of them.

    Parameters
    ----------
    initial_lr : float
        The final rate.
    warmup_epochs : int, optional
        How long that takes; also a fraction.
    momentum_correction, steps_per_epoch : bool or int, optional
        As for `LearningRateSchedule`.
    verbose : int, optional
        1: rank 0 prints the rate when warm-up ends.
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        if not warmup_epochs >= 0:  # TypeError if it is a text
            raise ValueError(f"warmup_epochs={warmup_epochs} is negative")

        def multiplier(epoch: float) -> float:
            assert self._steps is not None
            batches = int(self.model.steps_per_execution or 1)  # until the rate may change again
            done = min(epoch + batches / self._steps, warmup_epochs)
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


class BestModel:
    """Makes a ModelCheckpoint, the class after this one, save the best model, on rank 0 only.

    Put MetricAverageCallback before it, so that the average of all ranks decides.

    Parameters
    ----------
    monitor, verbose, mode, save_freq, save_weights_only : str or int or bool, optional
        As for keras.callbacks.ModelCheckpoint.
    filepath : str or PathLike, optional
        The path; may be set later, before training, through the attribute of this name.
    """

    filepath: Any

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
            unknown if filepath is None else filepath,  # type: ignore[call-arg]
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        if filepath is None:
            self.filepath = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise ValueError if there is no path."""
        if self.filepath is None:
            raise ValueError(f"{type(self).__name__}: set its filepath before training")
        self.filepath = os.fspath(self.filepath)
        super().on_train_begin(logs)  # type: ignore[misc]

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if it is time."""
        if rank() == 0:
            super().on_train_batch_end(batch, logs)  # type: ignore[misc]

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Save, if it is time."""
        if rank() == 0:
            super().on_epoch_end(epoch, logs)  # type: ignore[misc]
