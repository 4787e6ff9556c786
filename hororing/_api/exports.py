"""The names that need no framework and that every adapter exports."""

from hororing._api.built import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from hororing._api.init import init
from hororing._engine.shutdown import shutdown
from hororing._engine.state import (
    cross_rank,
    cross_size,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_enabled,
    rank,
    size,
)
from hororing._engine.statistics import statistics
from hororing._engine.timeline import start_timeline, stop_timeline
from hororing._requests.arguments import Adasum, Average, Max, Min, Product, Sum
from hororing._requests.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
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
