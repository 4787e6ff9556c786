"""The names that are the same in hororing.keras and hororing.tensorflow.keras, for any Keras."""

from __future__ import annotations

from hororing import exports
from hororing.exports import *  # noqa: F403
from hororing.keras import values
from hororing.keras.values import *  # noqa: F403
from hororing.objects import allgather_object, broadcast_object
from hororing.verbs import barrier, join

__all__ = [
    "allgather_object",
    "barrier",
    "broadcast_object",
    "join",
]
__all__ += exports.__all__
__all__ += values.__all__
