"""Learning rate schedules of toolkit.large_batch for Keras: as schedule, and as callback."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from hororing.keras.extension import velocities
from hororing.toolkit.large_batch import schedules
from hororing.toolkit.large_batch.schedules import momentum_correction


@keras.saving.register_keras_serializable(package="hororing")
class WarmupPolynomial(keras.optimizers.schedules.LearningRateSchedule):  # type: ignore[misc]
    """`large_batch.schedules.WarmupPolynomial` as a LearningRateSchedule, in float32.

    It is computed inside of the train step. Keras' SGD has the rate in its velocity: use
    `ScheduleCallback` with it, which corrects that, or `LARS` with ``momentum_form="unscaled"``.

    Parameters
    ----------
    peak, total_steps, warmup_steps, start, end, power, form : float or int or str, optional
        As there.

    Examples
    --------
    >>> plan = schedules.WarmupPolynomial.for_batch(batch, samples=50_000, epochs=90, base_rate=0.1)
    >>> optimizer = LARS(WarmupPolynomial.of(plan))
    """

    def __init__(
        self,
        peak: float,
        total_steps: int,
        warmup_steps: int = 0,
        start: float = 0.0,
        end: float = 0.0,
        power: float = 2.0,
        form: str = "shift",
    ) -> None:
        super().__init__()
        self.plan = schedules.WarmupPolynomial(
            peak, total_steps, warmup_steps, start, end, power, form
        )

    @classmethod
    def of(cls, plan: schedules.WarmupPolynomial) -> WarmupPolynomial:
        """Return the Keras form of a schedule."""
        return cls(**vars(plan))

    def __call__(self, step: Any) -> Any:
        """Return the rate of update `step`."""
        plan = self.plan
        step = ops.cast(step, "float32")
        rising = plan.start + (plan.peak - plan.start) * step / max(plan.warmup_steps, 1)
        clock = plan.warmup_steps if plan.form == "shift" else 0
        left = ops.clip((plan.total_steps - step) / max(plan.total_steps - clock, 1), 0.0, 1.0)
        falling = plan.end + (plan.peak - plan.end) * ops.power(left, plan.power)
        rate = ops.where(ops.less(step, plan.warmup_steps), rising, falling)
        return ops.where(ops.less(step, plan.total_steps), rate, plan.end)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return dict(vars(self.plan))


class ScheduleCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Sets the learning rate to ``schedule(step)`` before every batch.

    A step is an update of the weights: ``optimizer.iterations``, also with
    ``backward_passes_per_step``, and in training that is resumed.

    Parameters
    ----------
    schedule : callable
        A function of the step, such as
        ``hororing.toolkit.large_batch.schedules.WarmupPolynomial``.
    momentum_correction : bool, optional
        Multiply the velocity of Keras' SGD, which contains the rate, by new rate / old rate, so
        that momentum has the effect that it has in torch (Goyal et al. 2017, arXiv:1706.02677,
        section 3). Optimizers whose momentum contains no rate are left alone, and LARS as well:
        the rate inside its momentum is part of its definition.

    Raises
    ------
    ValueError : when training begins with ``steps_per_execution`` above 1: callbacks do not see
        every step then. Use a LearningRateSchedule.

    Examples
    --------
    >>> warmup = schedules.WarmupPolynomial(peak=0.1, total_steps=100, warmup_steps=10)
    >>> model.fit(x, y, callbacks=[ScheduleCallback(warmup)])
    """

    def __init__(self, schedule: Callable[[int], float], momentum_correction: bool = True) -> None:
        super().__init__()
        if not callable(schedule):
            raise TypeError(f"schedule={schedule!r} must be a function of the step")
        self.schedule = schedule
        self.momentum_correction = momentum_correction

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check how the model was compiled."""
        together = getattr(self.model, "steps_per_execution", 1)
        if together > 1:
            raise ValueError(
                f"{type(self).__name__}: steps_per_execution={together} hides steps from "
                "callbacks; use the WarmupPolynomial of hororing.toolkit.keras.optim as learning "
                "rate, or steps_per_execution=1"
            )

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the rate, and correct velocities."""
        optimizer = self.model.optimizer
        step = int(ops.convert_to_numpy(optimizer.iterations))
        before = float(ops.convert_to_numpy(optimizer.learning_rate))
        optimizer.learning_rate = self.schedule(step)
        after = float(ops.convert_to_numpy(optimizer.learning_rate))
        factor = momentum_correction(after, before)
        if self.momentum_correction and step > 0 and factor != 1:
            for velocity in velocities(optimizer):
                velocity.assign(ops.multiply(velocity, factor))

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Do nothing. Without this method Keras would call the others in the background."""

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Add the rate to the metrics, as "lr"."""
        if logs is not None:
            logs["lr"] = float(ops.convert_to_numpy(self.model.optimizer.learning_rate))
