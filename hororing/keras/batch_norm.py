"""Batch normalisation over several ranks, for Keras on TensorFlow and on PyTorch::

    from hororing.keras.batch_norm import SyncBatchNormalization

    layer = SyncBatchNormalization(group_size=4)

Guide: docs/large_batch.md.
"""

from __future__ import annotations

import importlib
from typing import Any

import keras

SyncBatchNormalization: Any


class _NoSyncBatchNormalization(keras.layers.Layer):  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        raise ValueError(
            f"SyncBatchNormalization{_named(kwargs)}: Keras' backend is {keras.backend.backend()}, "
            "which may not communicate while it computes gradients; set KERAS_BACKEND to "
            "tensorflow or torch before importing keras, or use keras.layers.BatchNormalization, "
            "with statistics of each rank's own batches, and average these: docs/large_batch.md"
        )


def _named(options: dict[str, Any]) -> str:
    return f" '{options['name']}'" if options.get("name") else ""


if keras.backend.backend() in ("tensorflow", "torch"):
    _module = importlib.import_module(
        f"hororing.keras.backends.{keras.backend.backend()}_batch_norm"
    )
    SyncBatchNormalization = _module.SyncBatchNormalization
else:
    SyncBatchNormalization = _NoSyncBatchNormalization
