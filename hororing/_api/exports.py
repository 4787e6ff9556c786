"""The names that need no framework and that every adapter exports.

Written out, because mypy does not follow `__all__ += module.__all__` through two modules.
"""

# ruff: noqa: F403, F405

from hororing._api.built import *
from hororing._api.init import *
from hororing._engine.statistics import *
from hororing._requests.arguments import Adasum, Average, Max, Min, Product, Sum
from hororing._requests.process_sets import *
from hororing.errors import (
    DuplicateNameError,
    HororingInternalError,
    HorovodInternalError,
    MismatchError,
    NotInitializedError,
    PeerLostError,
    ShutDownError,
    StalledError,
    TransportError,
    UnsupportedOpError,
)

__all__ = [
    "Adasum",
    "Average",
    "DuplicateNameError",
    "HororingInternalError",
    "HorovodInternalError",
    "Max",
    "Min",
    "MismatchError",
    "NotInitializedError",
    "PeerLostError",
    "ProcessSet",
    "Product",
    "ShutDownError",
    "StalledError",
    "Sum",
    "TransportError",
    "UnsupportedOpError",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "statistics",
    "stop_timeline",
]
