"""Which launcher started this process, from the variables that it set.

No launcher: a job of one rank, for which MPI is never touched. Being inside an allocation
(SLURM_NTASKS) is not enough: the launcher must have given this process a rank that MPI can use.

Beside `hororing.config` the only place that reads or writes environment variables.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

# Open MPI: without these, MPI_Init probes fabrics for a second, and one-sided communication over
# UCX prints an error line per rank. Right wherever all ranks share a host.
_OPENMPI_ON_ONE_HOST = {
    "OMPI_MCA_btl": "self,sm,tcp",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
}


@dataclass(frozen=True)
class Launch:
    """What is known before MPI is initialised. None: not told."""

    launcher: str = "none"
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None

    @property
    def launched(self) -> bool:
        """Whether there are, or may be, other ranks."""
        return self.launcher != "none" and self.size != 1


def detect(environ: MutableMapping[str, str] | None = None) -> Launch:
    """Look for the variables of Open MPI, MPICH and its relatives, and Slurm."""
    env = os.environ if environ is None else environ

    def number(*names: str) -> int | None:
        for name in names:
            if env.get(name, "").isdecimal():
                return int(env[name])
        return None

    if number("OMPI_COMM_WORLD_SIZE") is not None:
        return Launch(
            "Open MPI",
            number("OMPI_COMM_WORLD_RANK"),
            number("OMPI_COMM_WORLD_SIZE"),
            number("OMPI_COMM_WORLD_LOCAL_RANK"),
            number("OMPI_COMM_WORLD_LOCAL_SIZE"),
        )
    slurm = (number("SLURM_LOCALID"), None)
    if number("PMI_SIZE") is not None:
        local = (number("MPI_LOCALRANKID", "SLURM_LOCALID"), number("MPI_LOCALNRANKS"))
        return Launch("PMI", number("PMI_RANK"), number("PMI_SIZE"), *local)
    if number("PMIX_RANK", "PMI_RANK") is not None:
        rank, size = number("PMIX_RANK", "PMI_RANK"), number("SLURM_NTASKS")
        return Launch("Slurm" if size is not None else "PMIx", rank, size, *slurm)
    return Launch()


def is_spawned_worker() -> bool:
    """Whether multiprocessing started this process: it inherits a rank that is not its own."""
    return multiprocessing.parent_process() is not None


def prepare_mpi(launch: Launch, environ: MutableMapping[str, str] | None = None) -> None:
    """Set what makes MPI start quickly, where the user has not set it.

    Only for Open MPI with all ranks on one host (or on nobody knows how many); other MPIs and
    several hosts keep their defaults, since a fast network may need another choice.
    """
    env = os.environ if environ is None else environ
    if launch.launcher != "Open MPI":
        return
    if launch.local_size is not None and launch.local_size != launch.size:
        return
    for name, value in _OPENMPI_ON_ONE_HOST.items():
        env.setdefault(name, value)
