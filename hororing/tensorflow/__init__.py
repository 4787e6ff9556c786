"""hororing for TensorFlow 2::

    import hororing.tensorflow as hvd

    hvd.init()

All names and recipes: docs/tensorflow.md.
"""

from __future__ import annotations

from hororing.errors import (
    DuplicateNameError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutDownError,
    StalledError,
    TransportError,
    UnsupportedOpError,
)
from hororing.tensorflow import mpi_ops
from hororing.tensorflow.compression import Compression
from hororing.tensorflow.mpi_ops import *  # noqa: F403

__all__ = [
    "Compression",
    "DuplicateNameError",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ShutDownError",
    "StalledError",
    "TransportError",
    "UnsupportedOpError",
]
__all__ += mpi_ops.__all__
