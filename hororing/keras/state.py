"""`State`: what a distributed optimizer keeps, and errors that its users meet."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import Any

from hororing._adapters.replica_check import ReplicaCheck
from hororing.elastic.variables import Stepper
from hororing.keras.backends import Accumulator
from hororing.keras.flags import Flags


class State:
    """The state of a distributed optimizer that Keras neither saves nor tracks."""

    def __init__(self, first_iteration: int = 0) -> None:
        self.first_iteration = first_iteration  # when it became distributed
        self.was_called = False  # Keras has called `apply` or `stateless_apply`
        self.stateless = False  # `stateless_apply` is about to call `apply`
        self.local_variables: list[Any] = []
        self.local_layers: Sequence[Any] = ()
        self.accumulator: Accumulator | None = None
        self.places: list[int] = []  # of the variables whose gradients it adds up
        self.stepper: Stepper | None = None
        self.check: ReplicaCheck | None = None
        self.flags: Flags | None = None
        self.weight: Any = None  # a function or a variable; None: all ranks count the same
        # Of this rank alone, but among the optimizer's variables, for Keras on JAX.
        self.own: list[Any] = []
        self.hides_own = False  # while Keras reads or writes a file


def has_failed(caller: FrameType) -> bool:
    """Whether an error is on its way through the caller: Keras on JAX ends such a `fit`, too."""
    error = sys.exc_info()[1]
    frames = () if error is None else traceback.walk_tb(error.__traceback__)
    return any(frame is caller for frame, _ in frames)


def check_is_here(variable: Any) -> None:
    """Raise RuntimeError for a variable whose value is in the train step of Keras on JAX."""
    if getattr(variable, "_value", 0) is None:
        raise RuntimeError(
            "optimizer: during model.fit on JAX its weight is for callbacks, which must name it "
            "self.model.optimizer.weight: then Keras gives the train step its new value"
        )


WRONG_ORDER = (
    "a LossScaleOptimizer around a distributed optimizer would let one rank skip a reduction that "
    "the others wait for; wrap the other way round: DistributedOptimizer(LossScaleOptimizer("
    "optimizer)). Under the policy mixed_float16, set it before DistributedOptimizer is called, "
    "which then does that itself"
)
