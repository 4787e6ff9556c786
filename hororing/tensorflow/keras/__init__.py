"""hororing.keras as Horovod's users of tf.keras know it: the same, but for the order of arguments.

Keras runs on TensorFlow then. Where tf.keras is Keras 2, the optimizers and callbacks are for that
(legacy.py). All names and recipes: docs/keras.md.
"""

from __future__ import annotations

from hororing.keras import exports
from hororing.keras.exports import *  # noqa: F403
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
