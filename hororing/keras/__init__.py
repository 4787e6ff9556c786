"""hororing for Keras 3, on TensorFlow, PyTorch and JAX::

    import hororing.keras as hvd

    hvd.init()
    model.compile(hvd.DistributedOptimizer(optimizer), loss="mse")
    model.fit(x, y, callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])

All names and recipes: docs/keras.md.
"""

from __future__ import annotations

from hororing import process_sets, runtime
from hororing.arguments import Adasum, Average, Max, Min, Product, Sum
from hororing.errors import (
    DuplicateNameError,
    HororingInternalError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutDownError,
    StalledError,
    TransportError,
    UnsupportedOpError,
)
from hororing.keras import callbacks, values
from hororing.keras.compression import Compression
from hororing.keras.optimizer import (
    DistributedOptimizer,
    PartialDistributedOptimizer,
    load_model,
)
from hororing.keras.values import *  # noqa: F403
from hororing.objects import allgather_object, broadcast_object
from hororing.process_sets import *  # noqa: F403
from hororing.runtime import *  # noqa: F403
from hororing.verbs import barrier, join

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DistributedOptimizer",
    "DuplicateNameError",
    "HororingInternalError",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PartialDistributedOptimizer",
    "PeerLostError",
    "Product",
    "ShutDownError",
    "StalledError",
    "Sum",
    "TransportError",
    "UnsupportedOpError",
    "allgather_object",
    "barrier",
    "broadcast_object",
    "callbacks",
    "join",
    "load_model",
]
__all__ += process_sets.__all__
__all__ += runtime.__all__
__all__ += values.__all__
