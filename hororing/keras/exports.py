"""The names that are the same in hororing.keras and hororing.tensorflow.keras, for any Keras."""

from __future__ import annotations

from hororing import basics, process_sets
from hororing.arguments import Adasum, Average, Max, Min, Product, Sum
from hororing.basics import *  # noqa: F403
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
from hororing.keras import values
from hororing.keras.values import *  # noqa: F403
from hororing.objects import allgather_object, broadcast_object
from hororing.process_sets import *  # noqa: F403
from hororing.verbs import barrier, join

__all__ = [
    "Adasum",
    "Average",
    "DuplicateNameError",
    "HororingInternalError",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
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
    "join",
]
__all__ += process_sets.__all__
__all__ += basics.__all__
__all__ += values.__all__
