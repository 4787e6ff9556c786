"""Learning rates for large batches, as functions of the step: no framework, no state.

Steps are updates of the weights, from 0. The batch that counts is the effective one: all samples
that one update sees, on all ranks and in all passes whose gradients are added up before it.

Sources: linear scaling, gradual warm-up and momentum correction of P. Goyal et al., "Accurate,
large minibatch SGD: training ImageNet in 1 hour", 2017, arXiv:1706.02677, sections 2.1, 2.2, 3.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

FORMS: Final = ("shift", "mask")


def effective_batch(micro_batch: int, accumulation: int = 1, replicas: int = 1) -> int:
    """Return the samples of one update: ``micro_batch * accumulation * replicas``.

    Parameters
    ----------
    micro_batch : int
        Samples of one forward pass of one replica.
    accumulation : int, optional
        Passes before an update: `backward_passes_per_step`.
    replicas : int, optional
        Ranks that average gradients, usually ``hvd.size()``.

    Examples
    --------
    >>> effective_batch(32, accumulation=2, replicas=4)
    256
    """
    for name, value in (
        ("micro_batch", micro_batch), ("accumulation", accumulation), ("replicas", replicas),
    ):  # fmt: skip
        if int(value) != value or value < 1:
            raise ValueError(f"effective_batch: {name}={value!r} must be a positive integer")
    return int(micro_batch) * int(accumulation) * int(replicas)


def linear_scaled_rate(base_rate: float, batch: int, reference_batch: int = 256) -> float:
    """Return ``base_rate * batch / reference_batch``: the linear scaling rule.

    `base_rate` is the rate for `reference_batch` samples; 0.1 for 256 with ResNet-50.

    >>> linear_scaled_rate(0.1, batch=1024)
    0.4
    """
    if not batch >= 1 or not reference_batch >= 1:
        raise ValueError(f"batch={batch} and reference_batch={reference_batch} must be positive")
    return base_rate * batch / reference_batch


def steps_in(epochs: float, samples: int, batch: int) -> int:
    """Return the updates in so many epochs of `samples`; incomplete batches are dropped.

    >>> steps_in(2, samples=1000, batch=256)
    6
    """
    if samples < batch:
        raise ValueError(f"an epoch of {samples} samples has no batch of {batch}")
    return round(epochs * (samples // batch))


def momentum_correction(rate: float, previous_rate: float) -> float:
    """Return the factor for the velocity when the rate changes: the quotient of the rates.

    Only for a velocity that contains the rate, ``v = m v + rate g; w -= v`` (Keras' SGD); then it
    moves weights as ``u = m u + g; w -= rate u`` (torch's SGD) does, which needs no correction.
    1 where the previous rate was 0, for that velocity is 0 as well or older than the zero.

    >>> momentum_correction(0.2, previous_rate=0.1)
    2.0
    """
    return rate / previous_rate if previous_rate > 0 else 1.0


@dataclasses.dataclass(frozen=True)
class WarmupPolynomial:
    """Linear warm-up, then polynomial decay; calling it with a step gives the rate.

    With W = warmup_steps and T = total_steps::

        rate(t) = start + (peak - start) * t / W                            t < W
        rate(t) = end + (peak - end) * (1 - (t - c) / (T - c)) ** power     W <= t < T
        rate(t) = end                                                       t >= T

    Parameters
    ----------
    peak : float
        The rate at the end of warm-up.
    total_steps, warmup_steps : int, optional
        Updates; warm-up is part of the total.
    start, end : float, optional
        The first rate, and the last.
    power : float, optional
        2 is usual with LARS, 1 is linear, 0 keeps the peak.
    form : str, optional
        Where the clock c of the decay begins. "shift": at W, so the rate is continuous; "mask":
        at 0, and warm-up hides its first part, so the rate drops at W to where the decay has
        come.

    Examples
    --------
    >>> rate = WarmupPolynomial(peak=0.4, total_steps=12, warmup_steps=2, power=1)
    >>> [round(rate(step), 2) for step in (0, 1, 2, 7, 12)]
    [0.0, 0.2, 0.4, 0.2, 0.0]
    """

    peak: float
    total_steps: int
    warmup_steps: int = 0
    start: float = 0.0
    end: float = 0.0
    power: float = 2.0
    form: str = "shift"

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_steps <= self.total_steps or self.total_steps < 1:
            raise ValueError(
                f"WarmupPolynomial: warmup_steps={self.warmup_steps} must be from 0 to "
                f"total_steps={self.total_steps}, which must be positive"
            )
        if self.form not in FORMS:
            raise ValueError(f"WarmupPolynomial: form={self.form!r} must be one of {FORMS}")
        for name in ("peak", "start", "end", "power"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"WarmupPolynomial: {name}={value} must be finite, not negative")

    def __call__(self, step: float) -> float:
        """Return the rate of update `step`, from 0."""
        if step < self.warmup_steps:
            return self.start + (self.peak - self.start) * step / self.warmup_steps
        if step >= self.total_steps:
            return self.end
        left = math.pow(1 - self.decayed(step), self.power)
        return self.end + (self.peak - self.end) * left

    def decayed(self, step: float) -> float:
        """Return which part of the decay is over at `step`, from 0 to 1."""
        clock = self.warmup_steps if self.form == "shift" else 0
        return (step - clock) / (self.total_steps - clock)

    @classmethod
    def for_batch(
        cls,
        batch: int,
        *,
        samples: int,
        epochs: float,
        base_rate: float,
        reference_batch: int = 256,
        warmup_epochs: float = 5.0,
        start: float | None = None,
        end: float = 0.0,
        power: float = 2.0,
        form: str = "shift",
    ) -> WarmupPolynomial:
        """Return the schedule for an effective batch: scaled peak, epochs as steps.

        Parameters
        ----------
        batch : array_like
            See `effective_batch`.
        samples : int
            Of the training set; incomplete batches are dropped.
        epochs, warmup_epochs : float, optional
            Warm-up is part of the epochs.
        base_rate, reference_batch : float or int, optional
            See `linear_scaled_rate`.
        start : float, optional
            The first rate; None: `base_rate`, or the peak where that is lower (Goyal et al.).
        end, power, form : float or str, optional
            See the class.

        Examples
        --------
        >>> batch = effective_batch(32, accumulation=2, replicas=hvd.size())
        >>> rate = WarmupPolynomial.for_batch(batch, samples=50_000, epochs=90, base_rate=0.1)
        """
        peak = linear_scaled_rate(base_rate, batch, reference_batch)
        return cls(
            peak=peak,
            total_steps=steps_in(epochs, samples, batch),
            warmup_steps=steps_in(warmup_epochs, samples, batch),
            start=min(base_rate, peak) if start is None else start,
            end=end,
            power=power,
            form=form,
        )
