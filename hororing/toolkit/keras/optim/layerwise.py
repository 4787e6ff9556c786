"""The common part of LARS and LAMB: which variables decay and adapt, float32 arithmetic, norms.

A 16-bit variable is updated in float32: through a master weight, or without, rounded at random.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final

import keras
from keras import ops

from hororing.toolkit.keras.optim.rounding import round_stochastically
from hororing.toolkit.large_batch.stochastic_rounding import (
    SHORT,
    StochasticRounding,
    checked_rounding,
)

# Beyond so many elements float32 is too coarse to add up squares in.
_MANY: Final = 10_000_000


class Layerwise(keras.Optimizer):  # type: ignore[misc]  # Keras declares no types
    """An optimizer that computes in float32 at least, with a rate for each variable."""

    def __init__(
        self,
        learning_rate: Any,
        weight_decay: float,
        no_decay: Iterable[str] | None,
        no_adaptation: Iterable[str] | None,
        rounding: StochasticRounding | None,
        **options: Any,
    ) -> None:
        # Keras' own weight decay is another one: not part of the gradient.
        super().__init__(learning_rate=learning_rate, weight_decay=None, **options)
        if not weight_decay >= 0:
            raise ValueError(f"weight_decay={weight_decay} must not be negative")
        self.coupled_weight_decay = float(weight_decay)
        self.no_decay = _patterns("no_decay", no_decay)
        self.no_adaptation = _patterns("no_adaptation", no_adaptation)
        self.rounding = checked_rounding(rounding)

    def build(self, variables: Sequence[Any]) -> None:
        """Make the optimizer's variables."""
        if self.built:
            return
        super().build(variables)
        paths = [str(variable.path) for variable in variables]
        for argument in ("no_decay", "no_adaptation"):
            for pattern in getattr(self, argument) or ():
                if not any(re.search(pattern, path) for path in paths):
                    raise ValueError(f"{argument}: {pattern!r} matches no variable of the model")
        self._decays = [
            self.coupled_weight_decay if self._use_weight_decay(v) and not _fits(self.no_decay, v)
            else 0.0
            for v in variables
        ]  # fmt: skip
        self._adapts = [not _fits(self.no_adaptation, v) for v in variables]
        # Float32 master weights of 16-bit variables.
        self._masters: list[Any] = [None] * len(variables)
        for at, variable in enumerate(variables):
            if _is_short(variable) and self.rounding is None:
                self._masters[at] = self._like(variable, "float32_weight")
                self._masters[at].assign(ops.cast(variable, "float32"))

    def _like(self, variable: Any, name: str) -> Any:
        """Return a new variable of the optimizer, of the type of its arithmetic."""
        return self.add_variable(
            shape=variable.shape,
            initializer="zeros",
            dtype=_wide(variable),
            name=f"{variable.path.replace('/', '_')}_{name}",
            layout=getattr(variable, "_layout", None),
        )

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        """Update one variable."""
        at = self._get_variable_index(variable)
        dtype, master = _wide(variable), self._masters[at]
        weight = ops.cast(ops.convert_to_tensor(variable), dtype)
        if master is not None:
            # Keep what other code has written into the variable since.
            kept = ops.convert_to_tensor(master)
            unchanged = ops.equal(ops.cast(ops.cast(kept, variable.dtype), dtype), weight)
            weight = ops.where(unchanged, kept, weight)
        gradient = ops.cast(ops.convert_to_tensor(gradient), dtype)
        change = self._change(at, weight, gradient, ops.cast(learning_rate, dtype))
        weight = ops.subtract(weight, change)
        if master is not None:
            self.assign(master, weight)
        if self.rounding is None or not _is_short(variable):
            short = ops.cast(weight, variable.dtype)
        else:
            short = round_stochastically(
                weight, keras.backend.standardize_dtype(variable.dtype),
                seed=self.rounding.seed, tensor=at, step=self.iterations,
            )  # fmt: skip
        self.assign(variable, short)

    def _change(self, at: int, weight: Any, gradient: Any, rate: Any) -> Any:
        """Return the change to subtract from `weight`, the optimizer's variable number `at`."""
        raise NotImplementedError("a layerwise optimizer needs _change(at, weight, gradient, rate)")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments."""
        return {
            **super().get_config(),
            "weight_decay": self.coupled_weight_decay,
            "no_decay": self.no_decay,
            "no_adaptation": self.no_adaptation,
            "rounding": None if self.rounding is None else self.rounding.seed,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> Any:
        """Return an optimizer with these arguments. It keeps the original rounding seed."""
        if config.get("rounding") is not None:
            config = {**config, "rounding": StochasticRounding.loaded(config["rounding"])}
        return super().from_config(config, custom_objects)


def norm(tensor: Any) -> Any:
    """Return the 2-norm in the tensor's type; that of a large one is added up in float64."""
    dtype = keras.backend.standardize_dtype(tensor.dtype)
    elements = 1
    for extent in tensor.shape:
        elements *= extent
    if elements > _MANY and keras.backend.backend() != "jax":  # which has none by default
        tensor = ops.cast(tensor, "float64")
    return ops.cast(ops.sqrt(ops.sum(ops.square(tensor))), dtype)


def positive(one: Any, other: Any) -> Any:
    """Return whether both norms are: only then there is a ratio."""
    return ops.logical_and(ops.greater(one, 0), ops.greater(other, 0))


def quotient(above: Any, below: Any, valid: Any) -> Any:
    """Return above / below; a finite number if it is not `valid`."""
    return ops.divide(above, ops.where(valid, below, ops.ones_like(below)))


def _is_short(variable: Any) -> bool:
    return keras.backend.standardize_dtype(variable.dtype) in SHORT


def _wide(variable: Any) -> str:
    dtype = str(keras.backend.standardize_dtype(variable.dtype))
    return "float32" if dtype in SHORT else dtype


def _patterns(argument: str, patterns: Iterable[str] | None) -> list[str] | None:
    if isinstance(patterns, str):
        raise TypeError(f"{argument}={patterns!r} must be a list of expressions: [{patterns!r}]")
    if patterns is None:
        return None
    found = list(patterns)
    for pattern in found:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"{argument}: {pattern!r} is not a regular expression: {error}"
            ) from None
    return found


def _fits(patterns: list[str] | None, variable: Any) -> bool:
    if patterns is None:
        name = str(variable.path).rpartition("/")[2]
        return len(variable.shape) <= 1 or name in ("gamma", "beta")
    return any(re.search(pattern, str(variable.path)) for pattern in patterns)
