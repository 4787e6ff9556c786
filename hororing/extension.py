"""For layers on top of hororing that need more than the verbs, such as optimizers of your own.

Adapters add their own parts: `hororing.torch.extension`, `hororing.keras.extension`.
"""

from __future__ import annotations

from hororing._adapters.optimizer_options import Reduction, check_reduction, checked_passes
from hororing._engine.membership import is_elastic
from hororing._engine.recorder import show
from hororing._engine.state import host_names
from hororing._engine.timeline import enabled as timeline_is_on
from hororing._engine.timeline import path as timeline_path
from hororing._requests.compression import Compressor, NoneCompressor
from hororing._requests.handles import abandon
from hororing._requests.names import OPTIMIZER, default_name
from hororing._requests.process_sets import (
    ProcessSet,
    check_member,
    find,
    global_process_set,
    obtain,
)

__all__ = [
    "OPTIMIZER",
    "Compressor",
    "NoneCompressor",
    "ProcessSet",
    "Reduction",
    "abandon",
    "check_member",
    "check_reduction",
    "checked_passes",
    "default_name",
    "find",
    "global_process_set",
    "host_names",
    "is_elastic",
    "obtain",
    "show",
    "timeline_is_on",
    "timeline_path",
]
