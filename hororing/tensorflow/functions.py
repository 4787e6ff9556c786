"""Horovod's name for `hororing.tensorflow.state`."""

from hororing.tensorflow import state
from hororing.tensorflow.state import *  # noqa: F403

__all__: list[str] = []
__all__ += state.__all__
