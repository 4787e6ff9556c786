"""LAMB: layer-wise adaptive moments for batch training, for Keras."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from hororing.toolkit.keras.optim.layerwise import Layerwise, norm, positive, quotient
from hororing.toolkit.large_batch.stochastic_rounding import StochasticRounding


@keras.saving.register_keras_serializable(package="hororing")
class LAMB(Layerwise):
    """Adam with a rate for each variable, for large batches.

    For a variable w with gradient g, weight decay d and the current learning rate::

        m = beta_1 * m + (1 - beta_1) * g            v = beta_2 * v + (1 - beta_2) * g**2
        r = m / (1 - beta_1**t) / (sqrt(v / (1 - beta_2**t)) + epsilon)
        u = r + d * w
        w = w - learning_rate * phi(|w|) / |u| * u    the ratio is 1 where |w| or |u| is 0

    (You et al.: "Large batch optimization for deep learning: training BERT in 76 minutes", 2020,
    arXiv:1904.00962, algorithm 2.) `keras.optimizers.Lamb` has its weight decay outside of the
    ratio: there |u| is |r|, and learning_rate * d * w is subtracted before, whatever the ratio is.
    With weight_decay=0 both take the same steps, except for the use of epsilon. Takes the same
    steps as `hororing.toolkit.torch.optim.LAMB`.

    Parameters
    ----------
    learning_rate : float or LearningRateSchedule or callable, optional
        A number, a LearningRateSchedule or a function.
    beta_1, beta_2 : float, optional
        Decay of the two moments.
    epsilon : float, optional
        Added to the root.
    weight_decay : float, optional
        D, inside the ratio.
    phi : sequence of float, optional
        None: phi(x) = x; or (low, high), such as (0, 10): x is clipped to that range.
    no_decay, no_adaptation : iterable of str, optional
        As for `LARS`; without adaptation the ratio is 1, which is AdamW.
    rounding : StochasticRounding, optional
        As for `LARS`.
    **options : dict
        Of keras.optimizers.Optimizer: clipnorm, gradient_accumulation_steps, name, ...

    Examples
    --------
    >>> model.compile(hvd.DistributedOptimizer(LAMB(0.001, weight_decay=0.01)), loss="mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.001,
        *,
        beta_1: float = 0.9,
        beta_2: float = 0.999,
        epsilon: float = 1e-6,
        weight_decay: float = 0.0,
        phi: Sequence[float] | None = None,
        no_decay: Iterable[str] | None = None,
        no_adaptation: Iterable[str] | None = None,
        rounding: StochasticRounding | None = None,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, no_decay, no_adaptation, rounding, **options)
        for name, beta in (("beta_1", beta_1), ("beta_2", beta_2)):
            if not 0 <= beta < 1:
                raise ValueError(f"LAMB: {name}={beta} must be from 0 to below 1")
        if not epsilon >= 0:
            raise ValueError(f"LAMB: epsilon={epsilon} must not be negative")
        if phi is not None and not (
            isinstance(phi, list | tuple) and len(phi) == 2 and 0 <= phi[0] < phi[1]
        ):
            raise ValueError(f"LAMB: phi={phi!r} must be None or (low, high) with 0 <= low < high")
        self.beta_1, self.beta_2, self.epsilon = beta_1, beta_2, epsilon
        self.phi = None if phi is None else [float(phi[0]), float(phi[1])]

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables."""
        if self.built:
            return
        super().build(variables)
        self._first = [self._like(variable, "first_moment") for variable in variables]
        self._second = [self._like(variable, "second_moment") for variable in variables]

    def _change(self, at: int, weight: Any, gradient: Any, rate: Any) -> Any:
        step = ops.cast(self.iterations + 1, weight.dtype)
        first = self.beta_1 * ops.convert_to_tensor(self._first[at]) + (1 - self.beta_1) * gradient
        second = self.beta_2 * ops.convert_to_tensor(self._second[at]) + (
            1 - self.beta_2
        ) * ops.square(gradient)
        self.assign(self._first[at], first)
        self.assign(self._second[at], second)
        root = ops.sqrt(second / _correction(self.beta_2, step)) + self.epsilon
        update = first / _correction(self.beta_1, step) / root
        if self._decays[at]:
            update = update + self._decays[at] * weight
        if self._adapts[at]:
            size, length = norm(weight), norm(update)
            adapts = positive(size, length)
            phi = size if self.phi is None else ops.clip(size, *self.phi)
            rate = ops.where(adapts, rate * quotient(phi, length, adapts), rate)
        return rate * update

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "beta_1": self.beta_1,
            "beta_2": self.beta_2,
            "epsilon": self.epsilon,
            "phi": self.phi,
        }


def _correction(beta: float, step: Any) -> Any:
    """Return 1 - beta**step, without the cancellation that costs float32 four digits at first."""
    return -ops.expm1(step * math.log(beta)) if beta > 0 else ops.ones_like(step)
