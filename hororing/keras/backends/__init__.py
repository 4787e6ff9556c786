"""What differs between the frameworks under Keras: one module each, behind `Backend`.

Only these modules import the frameworks and hororing's adapters for them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import keras

from hororing.elastic.variables import Stepper
from hororing.optimizer_settings import Settings

F = TypeVar("F", bound=Callable[..., Any])
# Whether the totals of gradients are due, and how to get them (and begin anew).
Totals = tuple[Any, Callable[[], list[Any]]]


class Accumulator(Protocol):
    """Adds up the gradients of several calls."""

    def add(self, gradients: Sequence[Any], places: Sequence[int]) -> Totals:
        """Add gradients, or None, of the variables at `places` of those it was made for."""


class Backend(Protocol):
    """What hororing.keras asks of a framework. Works while Keras traces a train step, too."""

    def reduce(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        groups: Sequence[Sequence[int]],
        settings: Settings,
    ) -> list[Any]:
        """Return the gradients reduced over the ranks of the process set.

        `names` are those of the requests; `groups` are places of gradients that go together, the
        others go alone.
        """

    def accumulator(
        self, variables: Sequence[Any], maxima: Sequence[bool], settings: Settings
    ) -> Accumulator:
        """Return an accumulator, every `settings.passes` calls due; of maxima where so marked."""

    def choose(self, due: Any, update: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Call `update` if `due`, else `otherwise`, and return the result."""

    def stepper(self) -> Stepper | None:
        """Return what makes steps transactions of an elastic job; None: a failed step is lost."""

    def as_written(self, function: F) -> F:
        """Return `function`, safe from tools that rewrite Python while they trace."""

    def as_ours(self, error: Exception) -> Exception | None:
        """Return what an error that a train step raises is here; None if it is not ours."""

    def prepare(self, model: Any) -> None:
        """See to it that the train step can be compiled, before it is; ValueError if it cannot."""


@functools.cache
def backend() -> Backend:
    """The module for the framework that Keras runs on."""
    name = keras.backend.backend()
    if name not in ("tensorflow", "torch", "jax"):
        raise NotImplementedError(
            f"hororing.keras cannot train with Keras' backend {name!r}; set KERAS_BACKEND to "
            "tensorflow, torch or jax"
        )
    module: Any = importlib.import_module(f"hororing.keras.backends.{name}")
    return module  # type: ignore[no-any-return]
