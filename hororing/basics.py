"""What every adapter offers of the process and its engine, under the names of Horovod's basics."""

from hororing import built, counters, runtime
from hororing.built import *  # noqa: F403
from hororing.counters import *  # noqa: F403
from hororing.runtime import *  # noqa: F403

__all__: list[str] = []
__all__ += built.__all__
__all__ += counters.__all__
__all__ += runtime.__all__
