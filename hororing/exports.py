"""The names that need no framework and that every adapter exports."""

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
from hororing.process_sets import *  # noqa: F403

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
]
__all__ += process_sets.__all__
__all__ += basics.__all__
