"""Horovod's name for the verbs and what belongs to them. `hororing.torch` has the same names."""

from hororing import basics, process_sets
from hororing.arguments import Adasum, Average, Max, Min, Product, Sum
from hororing.basics import *  # noqa: F403
from hororing.errors import HororingInternalError, HorovodInternalError
from hororing.process_sets import *  # noqa: F403
from hororing.torch import ops
from hororing.torch.ops import *  # noqa: F403

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
__all__ += ops.__all__
__all__ += process_sets.__all__
__all__ += basics.__all__
