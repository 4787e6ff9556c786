"""Elastic training with Keras 3::

    import hororing.keras as hvd

    hvd.init()
    model = ...  # built and compiled
    state = hvd.elastic.KerasState(model, epoch=0, batch=0)

    @hvd.elastic.run
    def train(state):
        model.fit(..., initial_epoch=state.epoch, callbacks=[
            hvd.elastic.UpdateEpochStateCallback(state),
            hvd.elastic.UpdateBatchStateCallback(state),
            hvd.elastic.CommitStateCallback(state),
        ])

    train(state)

Start it with hororun --min-np. See docs/elastic.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import ops

from hororing import elastic
from hororing._adapters import elastic_callbacks
from hororing.elastic import *  # noqa: F403
from hororing.elastic import run_fn
from hororing.elastic.loop import reset
from hororing.elastic.variables import ModelState
from hororing.keras.backends import backend
from hororing.keras.distributed import shared_variables


def run(func: Callable[..., Any]) -> Callable[..., Any]:  # type: ignore[no-redef]
    """Like `hororing.elastic.run`, also for errors from compiled Keras functions."""
    return run_fn(func, reset, lambda error: backend().convert_error(error))


class KerasState(ModelState):
    """A state of a model, its optimizer and plain objects, as attributes.

    >>> state = KerasState(model, epoch=0, batch=0)

    Parameters
    ----------
    model : Model
        Must be built.
    optimizer : Optimizer
        None: that of the compiled model, if any.
    kwargs : dict
        The objects by name.

    Raises
    ------
    ValueError : the model has no variables yet.
    """

    def _array(self, variable: Any) -> Any:
        return ops.convert_to_numpy(variable)

    def _variables(self) -> list[Any]:
        return [*self.model.weights, *shared_variables(self.optimizer)]


class CommitStateCallback(elastic_callbacks.CommitState, keras.callbacks.Callback):  # type: ignore[misc]
    """Commits the state: hororing._adapters.elastic_callbacks.CommitState."""


class UpdateBatchStateCallback(elastic_callbacks.UpdateBatchState, keras.callbacks.Callback):  # type: ignore[misc]
    """Counts batches in ``state.batch``: hororing._adapters.elastic_callbacks.UpdateBatchState."""


class UpdateEpochStateCallback(elastic_callbacks.UpdateEpochState, keras.callbacks.Callback):  # type: ignore[misc]
    """Notes the epoch in ``state.epoch``: hororing._adapters.elastic_callbacks.UpdateEpochState."""


__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]
__all__ += elastic.__all__
