"""Distributed optimizers of tf_keras, which is Keras 2: tf.keras with TF_USE_LEGACY_KERAS=1.

Its optimizers, including those of `tf.keras.optimizers.legacy`, aggregate gradients over the
replicas of tf.distribute before they clip and apply them, and a LossScaleOptimizer makes the inner
one do so before it looks for infinities. Gradients are reduced there. A call without aggregation
(``skip_gradients_aggregation=True``, ``experimental_aggregate_gradients=False``) reduces nothing.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from hororing._adapters.optimizer_options import WHAT, Settings, WithoutWeight, checked_settings
from hororing._requests.arguments import Adasum
from hororing._requests.compression import Compressor, NoneCompressor
from hororing.tensorflow.gradients import (
    checked_key,
    keyed_groups,
    reduce_gradients,
    unique_names,
    variable_key,
)
from hororing.tensorflow.tape import weights_of

Pairs = Iterable[tuple[Any, Any]]  # gradients and variables


class Distributed(WithoutWeight):
    """The mixin of distributed optimizers, placed before an optimizer's class of tf_keras."""

    _settings: Settings  # of the class, which serves one optimizer and its copies

    @property
    def _state(self) -> _State:
        state: _State = self.__dict__.setdefault("_hororing_state", _State())
        return state

    def register_local_var(self, var: Any) -> None:
        """Exclude the gradient of a variable from the reduction: each rank has its own."""
        self._state.local.add(checked_key(var, "register_local_var"))

    def aggregate_gradients(self, grads_and_vars: Pairs) -> Any:
        """Reduce gradients over the ranks. Called by `apply_gradients`."""
        return super().aggregate_gradients(self._reduced(grads_and_vars))  # type: ignore[misc]

    def _aggregate_gradients(self, grads_and_vars: Pairs) -> Any:
        """Like `aggregate_gradients`: the name in legacy optimizers."""
        return super()._aggregate_gradients(self._reduced(grads_and_vars))  # type: ignore[misc]

    def apply_gradients(self, grads_and_vars: Pairs, *args: Any, **kwargs: Any) -> Any:
        """Update variables; with backward_passes_per_step = n, in every n-th call."""
        apply = super().apply_gradients  # type: ignore[misc]
        pairs = list(grads_and_vars)
        if self._settings.passes == 1 or not pairs:
            return apply(pairs, *args, **kwargs)
        variables = [variable for _, variable in pairs]
        with tf.init_scope():  # no branch of a graph can make variables
            make: Any = getattr(self, "_create_all_weights", None) or self.build  # type: ignore[attr-defined]
            make(variables)
        sums = self._state.sums(variables)
        for total, (gradient, _) in zip(sums, pairs, strict=True):
            if gradient is not None:
                total.assign_add(tf.cast(tf.convert_to_tensor(gradient), total.dtype))
        factor = 1.0 / self._settings.passes if self._settings.average_passes else 1.0

        def update() -> None:
            totals = [
                (None if gradient is None else total * tf.cast(factor, total.dtype), variable)
                for total, (gradient, variable) in zip(sums, pairs, strict=True)
            ]
            apply(totals, *args, **kwargs)
            for total in sums:
                total.assign(tf.zeros_like(total))
            self._state.count.assign(0)

        # A graph calls `_reduced` when it is traced, eager mode in the last pass only.
        self._state.was_called |= tf.executing_eagerly()
        due = tf.equal(self._state.count.assign_add(1), self._settings.passes)
        tf.cond(due, update, lambda: None)
        # As in Keras: a LossScaleOptimizer around a legacy one expects an operation.
        legacy = hasattr(self, "_create_all_weights")
        return tf.group(due) if legacy else self.iterations  # type: ignore[attr-defined]

    def forget_passes(self) -> None:
        """Add up gradients from zero again; an elastic state calls it when ranks have changed."""
        self._state.forget_passes()

    def _reduced(self, grads_and_vars: Pairs) -> list[tuple[Any, Any]]:
        self._state.was_called = True
        pairs = list(grads_and_vars)
        variables = [variable for _, variable in pairs]
        reduced = reduce_gradients(
            [gradient for gradient, _ in pairs],
            unique_names(self._settings.name, variables),
            self._settings,
            keys=[variable_key(variable) for variable in variables],
            local=self._state.local_keys(),
        )
        return list(zip(reduced, variables, strict=True))


class _State:
    """The state of a distributed optimizer that Keras neither saves nor tracks."""

    def __init__(self) -> None:
        self.was_called = False  # whether gradients have passed through
        self.local: set[Any] = set()  # keys of variables
        self.local_layers: Sequence[Any] = ()  # may be built later
        self.count: Any = None
        self._sums: dict[Any, Any] = {}

    def local_keys(self) -> set[Any]:
        return self.local | {variable_key(weight) for weight in weights_of(self.local_layers)}

    def sums(self, variables: Sequence[Any]) -> list[Any]:
        """The sums of gradients of these variables, created on first use."""
        with tf.init_scope():
            if self.count is None:
                self.count = tf.Variable(0, trainable=False)
            for variable in variables:
                if variable_key(variable) not in self._sums:
                    zeros = tf.zeros(variable.shape, variable.dtype)
                    self._sums[variable_key(variable)] = tf.Variable(zeros, trainable=False)
        return [self._sums[variable_key(variable)] for variable in variables]

    def forget_passes(self) -> None:
        for variable in (*self._sums.values(), *([] if self.count is None else [self.count])):
            variable.assign(tf.zeros_like(variable))


def inner_optimizer(optimizer: Any) -> Any:
    """Return the optimizer in a LossScaleOptimizer, or the optimizer itself."""
    scales = isinstance(optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    return optimizer.inner_optimizer if scales else optimizer


def wrapped(optimizer: Any, settings: Settings) -> Any:
    """Make `optimizer`, or the one in a LossScaleOptimizer, distributed; return `optimizer`."""
    inner = inner_optimizer(optimizer)
    kinds = (tf.keras.optimizers.Optimizer, tf.keras.optimizers.legacy.Optimizer)
    if not isinstance(inner, kinds):
        raise TypeError(
            "optimizer must be one of tf.keras.optimizers, which is tf_keras since "
            f"TF_USE_LEGACY_KERAS is set, not {type(optimizer).__name__} ({optimizer!r}); for "
            "optimizers of Keras 3 unset TF_USE_LEGACY_KERAS"
        )
    if isinstance(inner, Distributed):
        raise ValueError("optimizer is distributed already; wrap it once")
    if settings.op == Adasum:
        raise ValueError(
            f"{WHAT}: op=Adasum is not available for tf_keras; use Average, a "
            "DistributedGradientTape, or Keras 3"
        )
    if not isinstance(settings.groups, int):
        settings = dataclasses.replace(settings, groups=keyed_groups(settings.groups, WHAT))
    base = type(inner)
    namespace = {
        "__module__": base.__module__,
        "__doc__": base.__doc__,
        "_settings": settings,
        # Keras writes this class into files, which then load without us; `isinstance` and
        # `type` see the real one.
        "__class__": property(lambda self: base),
    }
    make: Any = type(base)
    object.__setattr__(inner, "__class__", make(base.__name__, (Distributed, base), namespace))
    return optimizer


def load_model(
    filepath: str | os.PathLike[str],
    custom_optimizers: Sequence[type] | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    compression: type[Compressor] = NoneCompressor,
    legacy_opts: bool = False,
) -> Any:
    """Load a model of tf_keras, and make its optimizer distributed; its state is kept.

    Arguments are those of hororing.keras.load_model. `legacy_opts` has no effect: the file names
    the kind of its optimizer.
    """
    named = {each.__name__: each for each in custom_optimizers or ()}
    model = tf.keras.models.load_model(filepath, custom_objects={**named, **(custom_objects or {})})
    if getattr(model, "optimizer", None) is not None:
        wrapped(model.optimizer, checked_settings(compression=compression))
    return model
