"""Horovod's name for `hororing.torch.state`."""

from hororing.torch import state
from hororing.torch.state import *  # noqa: F403

__all__: list[str] = []
__all__ += state.__all__
