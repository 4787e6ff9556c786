"""The callback that averages weights while `model.fit` trains with HierarchicalSGD."""

from __future__ import annotations

from typing import Any

import keras

from hororing.keras.extension import backend
from hororing.numpy import size
from hororing.toolkit.keras.optim.hierarchical import Hierarchical


class HierarchicalSGDCallback(keras.callbacks.Callback):  # type: ignore[misc]
    """Averages weights when HierarchicalSGD requires it. Every rank needs it.

    Before validation, at the end of every epoch and at the end of training, all ranks get the same
    weights. Put it before callbacks that save or evaluate, and after
    BroadcastGlobalVariablesCallback.

    Parameters
    ----------
    every_epoch : bool, optional
        False: only at the end of training. Each rank then validates and saves its own weights,
        which differ between averages.

    Raises
    ------
    TypeError : the model's optimizer is not one of HierarchicalSGD.
    ValueError : ``steps_per_execution`` is not 1; XLA on TensorFlow.
    """

    def __init__(self, every_epoch: bool = True) -> None:
        super().__init__()
        self.every_epoch = every_epoch
        self._training = False

    def set_model(self, model: Any) -> None:
        """Check how the model was compiled."""
        super().set_model(model)
        optimizer = getattr(model, "optimizer", None)
        if not isinstance(optimizer, Hierarchical):
            raise TypeError(
                f"{type(self).__name__}: the model's optimizer is {type(optimizer).__name__}; pass "
                "what HierarchicalSGD returns to model.compile"
            )
        if model.steps_per_execution != 1:
            raise ValueError(
                f"{type(self).__name__}: averages would be missed with steps_per_execution="
                f"{model.steps_per_execution}; pass 1 to model.compile"
            )
        if size() > 1:
            backend().prepare(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Record the first weights, if they exist."""
        self._training = True
        self.model.optimizer.attend()
        complete = all(layer.built for layer in self.model._flatten_layers())
        if complete and not self.model.optimizer.built:
            self.model.optimizer.build(self.model.trainable_variables)
        if self.model.optimizer.built:
            self.model.optimizer.begin_averaging(self.model.weights)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, if due."""
        self._synced().optimizer.average_if_due(self.model.weights)

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average before validation."""
        if self._training and self.every_epoch:
            self._finish()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average before checkpoints."""
        if self.every_epoch:
            self._finish()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Average."""
        self._training = False
        self._finish()

    def _finish(self) -> None:
        self._synced().optimizer.final_average(self.model.weights)

    def _synced(self) -> Any:
        """Return the model, with the values that JAX keeps elsewhere while it trains."""
        if hasattr(self.model, "jax_state_sync"):
            self.model.jax_state_sync()
        return self.model
