"""Horovod's name for the verbs and what belongs to them. `hororing.torch` has the same names."""

from hororing._api import basics, exports
from hororing._api.exports import *  # noqa: F403
from hororing.torch import ops
from hororing.torch.ops import *  # noqa: F403

# Horovod's scripts and tests ask this object too.
_basics = basics.as_object()

__all__: list[str] = []
__all__ += ops.__all__
__all__ += exports.__all__
