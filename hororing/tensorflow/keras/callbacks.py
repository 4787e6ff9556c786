"""The callbacks of hororing.keras, with the order of arguments of Horovod's for tf.keras."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hororing.tensorflow.which_keras import is_legacy

if TYPE_CHECKING or not is_legacy():
    from hororing.tensorflow.keras.keras3_callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )
else:
    from hororing.tensorflow.keras.legacy_callbacks import (
        BestModelCheckpoint,
        BroadcastGlobalVariablesCallback,
        LearningRateScheduleCallback,
        LearningRateWarmupCallback,
        MetricAverageCallback,
    )

__all__ = [
    "BestModelCheckpoint",
    "BroadcastGlobalVariablesCallback",
    "LearningRateScheduleCallback",
    "LearningRateWarmupCallback",
    "MetricAverageCallback",
]
