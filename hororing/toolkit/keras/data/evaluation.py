"""Exact evaluation of Keras models; hororing/toolkit/data/evaluation.py defines exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import keras
from keras import ops

from hororing.extension import ProcessSet, global_process_set
from hororing.toolkit.data.evaluation import Total, Totals

Metric = Callable[[Any, Any], Any]


def evaluate(
    model: keras.Model,
    batches: Iterable[Any],
    metrics: Mapping[str, Metric],
    *,
    process_set: ProcessSet = global_process_set,
) -> dict[str, Total]:
    """Evaluate `model` on each rank's batches, and return the totals over all ranks.

    Parameters
    ----------
    batches : iterable
        Of this rank: (inputs, targets), or (inputs, targets, mask), as from
        `hororing.toolkit.data.evaluation.masked_arrays`. Ranks may have different numbers of
        batches, and none, unless layers of the model communicate in inference.
    metrics : dict of str to Metric
        By name, functions of (targets, outputs), as Keras has them, that return a value for
        each sample, of shape (batch, ...): ``keras.losses.sparse_categorical_crossentropy``,
        ``keras.metrics.sparse_categorical_accuracy``. Booleans and integers are counted
        exactly, others are added up in float64 (in which zeros and ones are exact, too).

    Notes
    -----
    Calls ``model.predict_on_batch``: in inference, compiled where Keras compiles.

    Raises
    ------
    ValueError : as `Totals.reduced` says; and for a metric that is one number for a batch.
    RuntimeError : on the other ranks, when a model, a metric or the batches of one have failed.

    Examples
    --------
    >>> from hororing.toolkit.data.evaluation import masked_arrays
    >>> batches = masked_arrays((x, y), batch_size=3)
    >>> totals = evaluate(model, batches, {"loss": keras.losses.mean_squared_error})
    >>> mean = totals["loss"].mean
    """
    totals = Totals(metrics)
    with totals.adding():
        for inputs, targets, *rest in batches:
            outputs = model.predict_on_batch(inputs)
            mask = ops.convert_to_numpy(rest[0]) if rest else None
            for name, metric in metrics.items():
                totals.add(name, ops.convert_to_numpy(metric(targets, outputs)), mask)
    return totals.reduced(process_set)
