"""Keras on JAX: the verbs of hororing.jax, inside the train step that Keras compiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from hororing._adapters.optimizer_options import Settings
from hororing.jax import errors
from hororing.jax.gradients import in_groups, reduce_parts
from hororing.keras.backends.accumulator import VariableAccumulator

F = TypeVar("F", bound=Callable[..., Any])


def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    settings: Settings,
) -> list[Any]:
    """See `Backend`. Gradients without a group are reduced in groups of about 8 MiB."""
    _check_alone()
    grouped = {at for group in groups for at in group}
    others = [at for at in range(len(gradients)) if at not in grouped]
    leaves = [jax.numpy.asarray(gradient) for gradient in gradients]
    parts = [*groups, *in_groups(leaves, others)]
    return reduce_parts(leaves, names, parts, settings.name, settings, settings.weight)


def accumulator(
    variables: Sequence[Any], maxima: Sequence[bool], settings: Settings
) -> VariableAccumulator:
    """See `Backend`."""
    return VariableAccumulator(variables, maxima, settings, jax.numpy.asarray, weight_type())


def track(optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
    """See `Backend`. Train steps get the values of the optimizer's variables, and return them."""
    for variable in variables:
        optimizer._track_variable(variable)
    return variables


def is_stateless(gradients: Sequence[Any]) -> bool:
    """See `Backend`."""
    return any(isinstance(each, jax.core.Tracer) for each in gradients)


def weight_type() -> str:
    """See `Backend`."""
    return "float64" if jax.config.jax_enable_x64 else "float32"


def choose(due: Any, update: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """See `Backend`."""
    if isinstance(due, jax.core.Tracer):
        return jax.lax.cond(due, update, otherwise)
    return update() if due else otherwise()


def stepper() -> None:
    """See `Backend`. The train step owns the memory of the weights: a failure loses it."""


def outside_graphs(function: Callable[[], None]) -> None:
    """See `Backend`."""
    function()


def not_rewritten(function: F) -> F:
    """Return it: JAX does not rewrite Python."""
    return function


def convert_error(error: Exception) -> Exception | None:
    """See `Backend`."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return error
    return errors.convert_error(error)


def prepare(model: Any) -> None:
    """Do nothing: JAX compiles requests."""


def _check_alone() -> None:
    """Raise ValueError if JAX joins several processes in one computation."""
    if jax.process_count() > 1:
        raise ValueError(
            f"DistributedOptimizer: JAX spans {jax.process_count()} processes, and would call "
            "hororing in one of them only; leave out keras.distribution.initialize and "
            "jax.distributed.initialize, so that each rank computes by itself, or train without "
            "DistributedOptimizer"
        )
