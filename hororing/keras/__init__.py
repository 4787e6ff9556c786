"""hororing for Keras 3, on TensorFlow, PyTorch and JAX::

    import hororing.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

All names and recipes: docs/keras.md.
"""

from hororing._api import exports
from hororing._api.exports import *  # noqa: F403
from hororing.keras import callbacks, elastic, values
from hororing.keras.compression import Compression
from hororing.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from hororing.keras.values import *  # noqa: F403

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
