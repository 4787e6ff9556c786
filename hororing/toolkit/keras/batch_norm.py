"""Averages moving statistics that differ between ranks, or groups of ranks."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops

from hororing.extension import ProcessSet, global_process_set
from hororing.toolkit.large_batch.averaging import weighted_mean


def average_moving_statistics(
    model: keras.layers.Layer,
    samples: float = 1.0,
    *,
    process_set: ProcessSet = global_process_set,
) -> None:
    """Average the moving means and variances of batch normalisation over ranks.

    All ranks call it, before evaluation and before a checkpoint is written. Training may continue
    with the averages. It sends one request for the whole model. Ranks have the same bits
    afterwards.

    Parameters
    ----------
    model : keras.layers.Layer
        A model or layer; every BatchNormalization in it is averaged, Keras' own too.
    samples : float, optional
        The weight of this rank, if ranks have trained on different numbers of samples.

    Raises
    ------
    ValueError : for a negative weight, and on every rank when all are 0.
    MismatchError : when models differ.

    Examples
    --------
    >>> average_moving_statistics(model)
    """
    norms = [
        layer
        for layer in model._flatten_layers()
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built
    ]
    variables = [variable for layer in norms for variable in layer.non_trainable_variables]
    variables = list({id(v): v for v in variables if v.name in _STATISTICS}.values())
    if not variables:
        return
    values = [ops.convert_to_numpy(variable.value) for variable in variables]
    means = weighted_mean(
        values, samples, name="average_moving_statistics", process_set=process_set
    )
    for variable, value, mean in zip(variables, values, means, strict=True):
        variable.assign(mean.astype(value.dtype))


_STATISTICS = {"moving_mean", "moving_variance", "renorm_mean", "renorm_stddev"}


class AverageMovingStatistics(keras.callbacks.Callback):  # type: ignore[misc]
    """Calls `average_moving_statistics` before every evaluation and at the end of every epoch.

    Put it before callbacks that write checkpoints, on every rank. (On JAX variables are not in the
    model while `fit` runs: call the function between calls of `fit`.)

    Parameters
    ----------
    samples, process_set : float or ProcessSet, optional
        As for the function.

    Raises
    ------
    ValueError : from `fit` on JAX.

    Examples
    --------
    >>> model.fit(x, y, callbacks=[AverageMovingStatistics()])
    """

    def __init__(
        self, samples: float = 1.0, *, process_set: ProcessSet = global_process_set
    ) -> None:
        super().__init__()
        self.samples = samples
        self.process_set = process_set

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Check the backend."""
        if keras.backend.backend() == "jax":
            raise ValueError(
                "AverageMovingStatistics: on JAX a model's variables are not up to date while fit "
                "runs; call average_moving_statistics(model) after fit"
            )

    def on_test_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Average, before an evaluation."""
        average_moving_statistics(self.model, self.samples, process_set=self.process_set)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Average, before checkpoints are written."""
        average_moving_statistics(self.model, self.samples, process_set=self.process_set)
