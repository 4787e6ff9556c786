"""Which libraries were found, under the names that scripts for Horovod use."""

from __future__ import annotations

import os

from hororing import config
from hororing._engine import mpi, nccl, state
from hororing._engine.core import lib


def mpi_built() -> bool:
    """Whether the MPI transport was built."""
    return mpi.is_built()


def mpi_threads_supported() -> bool:
    """Whether MPI may be called from several threads, as by mpi4py beside the engine.

    True in a job of one rank, where the engine calls no MPI. ValueError where MPI was not built.
    """
    state.topology()
    if not mpi_built():
        raise ValueError(
            "MPI is not enabled: hororing was built without; see docs/troubleshooting.md"
        )
    return not state.mpi_enabled() or mpi.describe().level == "multiple"


def gloo_enabled() -> bool:
    """Return False: hororing does not use Gloo."""
    return False


def gloo_built() -> bool:
    """Return False: hororing does not use Gloo."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL on this host, 23203 for 2.32.3; 0 if there is none.

    NCCL is not part of the build: if it is installed later, nothing needs to be rebuilt.
    """
    chosen = config.load()["NCCL_LIBRARY"]
    return int(lib.hr_nccl_version(os.fsencode(nccl.libraries(chosen))))


def ddl_built() -> bool:
    """Return False: there is no DDL in hororing."""
    return False


def ccl_built() -> bool:
    """Return False: there is no oneCCL in hororing."""
    return False


def cuda_built() -> bool:
    """Return True: every build supports tensors on CUDA devices.

    `python -m hororing info` shows whether there are devices.
    """
    return True


def rocm_built() -> bool:
    """Return False: only NVIDIA's GPUs are supported."""
    return False
