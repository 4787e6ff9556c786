"""hororing.keras with the order of arguments that Horovod has for tf.keras; otherwise the same.

Keras must run on TensorFlow. If tf.keras is Keras 2, so are the optimizers and callbacks
(legacy.py). All names and recipes: docs/keras.md.
"""

from __future__ import annotations

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing.keras import values
from hororing.keras.values import *  # noqa: F403
from hororing.tensorflow.keras import callbacks, elastic
from hororing.tensorflow.keras.optimizer import (
    Compression,
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "PartialDistributedOptimizer",
    "callbacks",
    "elastic",
    "load_model",
]
__all__ += exports.__all__
__all__ += values.__all__
