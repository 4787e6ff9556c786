"""The differences between the frameworks under Keras: one module each, behind `Backend`.

Only these modules import the frameworks and hororing's adapters for them.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import keras

from hororing._adapters.optimizer_options import Settings
from hororing.elastic.variables import Stepper

F = TypeVar("F", bound=Callable[..., Any])
# Whether the totals of gradients are due (None: always), and a function that returns and resets
# them and the sum of their weights, if they have some.
Totals = tuple[Any, Callable[[], tuple[list[Any], Any]]]


class Accumulator(Protocol):
    """Adds up the gradients of several calls."""

    variables: Sequence[Any]  # that it keeps them in

    def add(self, gradients: Sequence[Any], places: Sequence[int], weight: Any = None) -> Totals:
        """Add gradients, or None, of the variables at `places`; with weights, keep their mean."""

    def reset(self) -> None:
        """Forget all gradients."""


class Backend(Protocol):
    """The interface to a framework. Also works while Keras traces a train step."""

    def reduce(
        self,
        gradients: Sequence[Any],
        names: Sequence[str],
        groups: Sequence[Sequence[int]],
        settings: Settings,
    ) -> list[Any]:
        """Return the gradients reduced over the ranks of the process set.

        `names` are the names of the requests; `groups` are places of gradients that are reduced
        together, the others are reduced alone.
        """

    def accumulator(
        self, variables: Sequence[Any], maxima: Sequence[bool], settings: Settings
    ) -> Accumulator:
        """Return an accumulator, due every `settings.passes` calls; of maxima if marked."""

    def track(self, optimizer: Any, variables: Sequence[Any]) -> Sequence[Any]:
        """Let a train step change variables of our own. Return those that became the optimizer's.

        None do where a train step may assign any variable.
        """

    def is_stateless(self, gradients: Sequence[Any]) -> bool:
        """Whether a branch of the step that is traced must return what it changes."""

    def weight_type(self) -> str:
        """Return the data type of weights: the widest floating-point numbers."""

    def choose(self, due: Any, update: Callable[[], Any], otherwise: Callable[[], Any]) -> Any:
        """Call `update` if `due`, else `otherwise`, and return the result."""

    def stepper(self) -> Stepper | None:
        """Return the object that makes steps transactions of an elastic job, or None."""

    def outside_graphs(self, function: Callable[[], None]) -> None:
        """Call `function` outside of the graph that is being traced, if there is one."""

    def not_rewritten(self, function: F) -> F:
        """Return `function`, protected from tools that rewrite Python while they trace."""

    def convert_error(self, error: Exception) -> Exception | None:
        """Convert an error of a train step to ours; None if it is not from hororing."""

    def prepare(self, model: Any) -> None:
        """Make sure that the train step can be compiled; ValueError if it cannot."""


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
