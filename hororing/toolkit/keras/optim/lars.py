"""LARS: layer-wise adaptive rate scaling, for Keras."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import keras
from keras import ops

from hororing.toolkit.keras.optim.layerwise import Layerwise, norm, positive, quotient
from hororing.toolkit.large_batch.stochastic_rounding import StochasticRounding


@keras.saving.register_keras_serializable(package="hororing")
class LARS(Layerwise):
    """Momentum SGD with a rate for each variable, for large batches.

    For a variable w with gradient g, weight decay d and the current learning rate::

        trust = trust_coefficient * |w| / (|g| + d * |w| + epsilon)     1 where |w| or |g| is 0
        v     = momentum * v + learning_rate * trust * (g + d * w)
        w     = w - v

    (You, Gitman, Ginsburg: "Large batch training of convolutional networks", 2017,
    arXiv:1708.03888.) Takes the same steps as `hororing.toolkit.torch.optim.LARS`. Variables of 16
    bits are updated in float32.

    Parameters
    ----------
    learning_rate : float or LearningRateSchedule or callable, optional
        A number, a LearningRateSchedule or a function.
    momentum : float, optional
        From 0 to below 1.
    weight_decay : float, optional
        D, coupled: it is part of the gradient, unlike that of Keras' optimizers.
    trust_coefficient : float, optional
        The paper's eta.
    epsilon : float, optional
        0 in the paper and in the MLPerf reference; added to the denominator.
    denominator : str, optional
        "paper": |g| + d |w| + epsilon; "sum": |g + d w| + epsilon.
    momentum_form : str, optional
        "scaled": the rate is inside v, as above; "unscaled": ``u = momentum * u + g + d * w``,
        ``w = w - learning_rate * trust * u``.
    clip : bool, optional
        Trust is at most 1 / learning_rate, so that the rate is at most 1 (LARC).
    nesterov : bool, optional
        Look ahead.
    no_decay, no_adaptation : iterable of str, optional
        Two lists of regular expressions that are searched for in the paths of variables; a
        variable that matches does not decay, or has trust 1. None: variables of at most one
        dimension, gamma and beta. `exclude_from_weight_decay` of Keras counts, too.
    rounding : StochasticRounding, optional
        Of 16-bit variables. None: float32 master weights are kept (4 bytes per element).
        Otherwise there are none, and the variables are rounded at random.
    **options : dict
        Of keras.optimizers.Optimizer: clipnorm, gradient_accumulation_steps, name, ...

    Examples
    --------
    >>> model.compile(hvd.DistributedOptimizer(LARS(0.1, weight_decay=5e-5)), loss="mse")
    """

    def __init__(
        self,
        learning_rate: Any = 0.1,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        epsilon: float = 0.0,
        denominator: str = "paper",
        momentum_form: str = "scaled",
        clip: bool = False,
        nesterov: bool = False,
        no_decay: Iterable[str] | None = None,
        no_adaptation: Iterable[str] | None = None,
        rounding: StochasticRounding | None = None,
        **options: Any,
    ) -> None:
        super().__init__(learning_rate, weight_decay, no_decay, no_adaptation, rounding, **options)
        if not 0 <= momentum < 1:
            raise ValueError(f"LARS: momentum={momentum} must be from 0 to below 1")
        if nesterov and momentum == 0:
            raise ValueError("LARS: nesterov=True needs a momentum")
        for name, value in (("trust_coefficient", trust_coefficient), ("epsilon", epsilon)):
            if not value >= 0:
                raise ValueError(f"LARS: {name}={value} must not be negative")
        for name, word, allowed in (
            ("denominator", denominator, ("paper", "sum")),
            ("momentum_form", momentum_form, ("scaled", "unscaled")),
        ):
            if word not in allowed:
                raise ValueError(f"LARS: {name}={word!r} must be one of {allowed}")
        # Not `momentum`: code that corrects momentum for a changing rate looks for that name.
        self.lars_momentum, self.epsilon = momentum, epsilon
        self.trust_coefficient, self.denominator = trust_coefficient, denominator
        self.momentum_form, self.clip, self.nesterov = momentum_form, clip, nesterov

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables."""
        if self.built:
            return
        super().build(variables)
        self._velocities = (
            [self._like(variable, "momentum") for variable in variables]
            if self.lars_momentum
            else []
        )

    def _change(self, at: int, weight: Any, gradient: Any, rate: Any) -> Any:
        decay, momentum = self._decays[at], self.lars_momentum
        direction = gradient if decay == 0 else gradient + decay * weight
        if self._adapts[at]:
            rate = self._layer_rate(weight, gradient, direction, decay, rate)
        if not momentum:
            return rate * direction
        velocity = ops.convert_to_tensor(self._velocities[at])
        scaled = self.momentum_form == "scaled"
        added = rate * direction if scaled else direction
        velocity = momentum * velocity + added
        self.assign(self._velocities[at], velocity)
        ahead = momentum * velocity + added if self.nesterov else velocity
        return ahead if scaled else rate * ahead

    def _layer_rate(
        self, weight: Any, gradient: Any, direction: Any, decay: float, rate: Any
    ) -> Any:
        """Return the learning rate times trust."""
        size = norm(weight)
        length = norm(gradient if self.denominator == "paper" else direction)
        below = length + self.epsilon
        if self.denominator == "paper":
            below = below + decay * size
        adapts = positive(size, length)
        trust = self.trust_coefficient * quotient(size, below, adapts)
        return ops.where(adapts, ops.minimum(trust, rate) if self.clip else rate * trust, rate)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "momentum": self.lars_momentum,
            "trust_coefficient": self.trust_coefficient,
            "epsilon": self.epsilon,
            "denominator": self.denominator,
            "momentum_form": self.momentum_form,
            "clip": self.clip,
            "nesterov": self.nesterov,
        }
