"""Horovod's module of this name: the functions about the process and its engine."""

from types import SimpleNamespace

from hororing._api.exports import (
    ccl_built,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rank,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    statistics,
    stop_timeline,
)
from hororing._requests.process_sets import ids_and_ranks

__all__ = [
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
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
    "rocm_built",
    "shutdown",
    "size",
    "start_timeline",
    "statistics",
    "stop_timeline",
]


def as_object() -> SimpleNamespace:
    """Return these functions as Horovod's `_basics`, an object that scripts and tests use."""
    functions = {name: globals()[name] for name in __all__}
    return SimpleNamespace(**functions, _get_process_set_ids_and_ranks=ids_and_ranks)
