"""The callbacks of hororing.keras, with the order of arguments of Horovod's for tf.keras."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from hororing.tensorflow.which_keras import is_legacy

if TYPE_CHECKING or not is_legacy():
    from hororing.keras import callbacks
else:
    from hororing.tensorflow.keras._keras2 import callbacks

BroadcastGlobalVariablesCallback = callbacks.BroadcastGlobalVariablesCallback
LearningRateScheduleCallback = callbacks.LearningRateScheduleCallback
LearningRateWarmupCallback = callbacks.LearningRateWarmupCallback
MetricAverageCallback = callbacks.MetricAverageCallback


class BestModelCheckpoint(callbacks.BestModelCheckpoint):
    """Like hororing.keras.callbacks.BestModelCheckpoint."""

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: bool = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        filepath: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(monitor, verbose, mode, save_freq, save_weights_only, filepath)


__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
