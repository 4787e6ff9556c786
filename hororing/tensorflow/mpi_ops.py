"""Horovod's name for the verbs and what belongs to them, all of it in `hororing.tensorflow` too."""

from hororing import basics, process_sets
from hororing.arguments import Adasum, Average, Max, Min, Product, Sum
from hororing.basics import *  # noqa: F403
from hororing.errors import HororingInternalError, HorovodInternalError
from hororing.process_sets import *  # noqa: F403
from hororing.tensorflow import topology, verbs
from hororing.tensorflow.topology import *  # noqa: F403
from hororing.tensorflow.verbs import *  # noqa: F403

# Horovod's scripts and tests ask this object too.
_basics = basics.as_object()

__all__ = [
    "Adasum",
    "Average",
    "HororingInternalError",
    "HorovodInternalError",
    "Max",
    "Min",
    "Product",
    "Sum",
]
__all__ += verbs.__all__
__all__ += topology.__all__
__all__ += process_sets.__all__
__all__ += basics.__all__
