"""Keras on PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

import hororing.torch as hvd
from hororing._adapters.optimizer_options import Settings
from hororing._requests.compression import compressed
from hororing.elastic.steps import Steps
from hororing.keras.backends.accumulator import VariableAccumulator
from hororing.keras.backends.dense import reduce_all

F = TypeVar("F", bound=Callable[..., Any])

# torch declares no types.
_no_grad: Any = torch.no_grad()


@_no_grad  # type: ignore[untyped-decorator]
def reduce(
    gradients: Sequence[Any],
    names: Sequence[str],
    groups: Sequence[Sequence[int]],
    settings: Settings,
) -> list[Any]:
    """See `Backend`. Out of place: the given gradients are the caller's."""
    return compressed(
        settings.compression,
        map(_dense, gradients),
        lambda packed: reduce_all(hvd, packed, names, groups, settings),
    )


def accumulator(
    variables: Sequence[Any], maxima: Sequence[bool], settings: Settings
) -> VariableAccumulator:
    """See `Backend`."""
    return VariableAccumulator(variables, maxima, settings, _dense)


def track(optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
    """See `Backend`."""
    return ()


def is_stateless(gradients: Sequence[Any]) -> bool:
    """See `Backend`."""
    return False


def weight_type() -> str:
    """See `Backend`."""
    return "float64"


def choose(due: Any, update: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
    """See `Backend`."""
    return update() if due else otherwise()


class Stepper:
    """See `Backend`. Keras calls the optimizer for each step."""

    _steps: Steps | None = None

    def take(self, apply: Callable[[], Any], gradients: Sequence[Any]) -> None:
        """Take a step, or skip it."""
        if self._steps is None:
            apply()
        else:
            self._steps.take(apply)

    def attach(self, steps: Steps | None) -> None:
        """Let these steps decide."""
        self._steps = steps


def stepper() -> Stepper:
    """See `Backend`."""
    return Stepper()


def outside_graphs(function: Callable[[], None]) -> None:
    """See `Backend`."""
    function()


def not_rewritten(function: F) -> F:
    """Make torch.compile compile only the code around it."""
    untraced: Any = torch.compiler.disable
    return untraced(function)  # type: ignore[no-any-return]


def convert_error(error: Exception) -> Exception | None:
    """See `Backend`."""
    return error


def prepare(model: Any) -> None:
    """Do nothing: torch.compile skips what it cannot compile."""


def _dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
