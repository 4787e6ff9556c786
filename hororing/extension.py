"""For layers on top of hororing that need more than the verbs, such as optimizers of your own.

Adapters add their own parts: `hororing.torch.extension`, `hororing.keras.extension`.
"""

from __future__ import annotations

from hororing._adapters.optimizer_options import Reduction, check_reduction, checked_passes
from hororing._engine.membership import is_elastic
from hororing._engine.state import host_names
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.handles import abandon
from hororing._requests.names import OPTIMIZER, default_name
from hororing._requests.process_sets import check_member, find, obtain

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
