"""hororing.keras.elastic with Horovod's names for tf.keras; also for Keras 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hororing.elastic import *  # noqa: F403  # for mypy, see hororing._api.exports
from hororing.tensorflow import elastic
from hororing.tensorflow.elastic import *  # noqa: F403
from hororing.tensorflow.elastic import TensorFlowKerasState as KerasState
from hororing.tensorflow.which_keras import is_legacy

if TYPE_CHECKING or not is_legacy():
    from hororing.keras.elastic import (
        CommitStateCallback,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )
else:
    from hororing.tensorflow.keras._keras2.callbacks import (
        CommitStateCallback,
        UpdateBatchStateCallback,
        UpdateEpochStateCallback,
    )

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
]
__all__ += elastic.__all__
