"""For layers on top of hororing that need more than the verbs, such as optimizers of your own.

Adapters add their own parts: `hororing.torch.extension`, `hororing.keras.extension`.
"""

from __future__ import annotations

from hororing.collectives import abandon
from hororing.compression import Compressor, NoneCompressor
from hororing.job import host_names
from hororing.membership import is_elastic
from hororing.names import OPTIMIZER, default_name
from hororing.process_sets import check_member, find, obtain
from hororing.reduction import Reduction, check_reduction, checked_passes

__all__ = [
    "OPTIMIZER",
    "Compressor",
    "NoneCompressor",
    "Reduction",
    "abandon",
    "check_member",
    "check_reduction",
    "checked_passes",
    "default_name",
    "find",
    "host_names",
    "is_elastic",
    "obtain",
]
