"""Horovod's name for the verbs and what belongs to them, all of it in `hororing.tensorflow` too."""

from hororing._api import basics, exports
from hororing._api.exports import *  # noqa: F403
from hororing.tensorflow import topology, verbs
from hororing.tensorflow.topology import *  # noqa: F403
from hororing.tensorflow.verbs import *  # noqa: F403

# Horovod's scripts and tests ask this object too.
_basics = basics.as_object()

__all__: list[str] = []
__all__ += verbs.__all__
__all__ += topology.__all__
__all__ += exports.__all__
