"""Which launcher started this process, according to its variables (LAUNCHERS).

Without a launcher: a job of one rank, which never touches MPI. An allocation (SLURM_NTASKS) alone
is not enough: the launcher must have given this process a rank. If MPI does not connect the
processes, _job/endpoints.py says where they meet. It is an error if a launcher reports several
processes that nothing connects: each would train alone.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import sys
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field

from hororing.config import environment

# Open MPI: without these, MPI_Init probes fabrics for a second, and one-sided communication over
# UCX prints an error line per rank. Correct if all ranks share a host. Not "tcp", which listens on
# every interface.
_OPENMPI_ON_ONE_HOST = {
    "OMPI_MCA_btl": "self,sm",
    "OMPI_MCA_pml": "ob1",
    "OMPI_MCA_osc": "^ucx",
}


# In the environment of every rank that MPI connects: its process, and the launcher's name of the
# job. Not a HORORING_* variable, because users do not set it.
_RANK = "_HORORING_RANK"
_JOBS = (
    "HORORING_JOB", "PMIX_NAMESPACE", "PMI_PORT", "PMI_FD", "TORCHELASTIC_RUN_ID", "MASTER_PORT",
    "SLURM_JOB_ID", "SLURM_STEP_ID",
)  # fmt: skip

_SHARED_MEMORY = "/dev/shm"
# Open MPI's "sm" does not start with less than 16 MiB of free memory, and other ranks start, too.
_MIN_SHARED_MEMORY_BYTES = 32 << 20


@dataclass(frozen=True)
class Launch:
    """The launcher's variables, before MPI is initialised. None: unknown."""

    launcher: str = "none"
    rank: int | None = None
    size: int | None = None
    local_rank: int | None = None
    local_size: int | None = None
    mpi: bool = True  # whether the processes meet through MPI
    sign: str = field(default="", compare=False)  # the variable that shows other processes
    own: str = field(default="", compare=False)  # the variable that shows this process's rank

    @property
    def min_size(self) -> int:
        """The minimum number of processes of the job."""
        return self.size if self.size is not None else (self.rank or 0) + 1

    @property
    def launched(self) -> bool:
        """Whether there are, or may be, other ranks."""
        return self.launcher != "none" and self.size != 1


@dataclass(frozen=True)
class Launcher:
    """The variables of a launcher. "A|B": A, or else B."""

    name: str
    mpi: bool  # the processes find one another through MPI
    known_by: tuple[str, ...]  # all of these are numbers
    rank: str
    size: str = ""  # "": unknown
    local_rank: str = ""
    local_size: str = ""
    counts_alone: bool = False  # even with one process, whatever started the launcher


ELASTIC = "an elastic job"  # of hororun; not in LAUNCHERS, because ranks come from its store
HORORUN = "hororun"
TORCHRUN, SRUN, KUBERNETES = "torchrun", "srun", "Kubernetes Indexed Job"

# Variables that only launchers set. Ranks and sizes are also set by hand.
_BY_LAUNCHERS = (
    "HORORING_SECRET_FD", "TORCHELASTIC_RUN_ID", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE",
    "PMIX_RANK", "PMI_RANK",
)  # fmt: skip

# The first match counts: the innermost launcher precedes what started it.
LAUNCHERS = (
    Launcher(
        HORORUN,
        False,
        ("HORORING_RANK", "HORORING_SIZE"),
        "HORORING_RANK",
        "HORORING_SIZE",
        "HORORING_LOCAL_RANK",
        "HORORING_LOCAL_SIZE",
        counts_alone=True,
    ),
    # Before MPI: mpirun, and srun with MPI's variables, may start torchrun. Also accelerate.
    Launcher(
        TORCHRUN,
        False,
        ("TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE"),
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        counts_alone=True,
    ),
    Launcher(
        "Open MPI",
        True,
        ("OMPI_COMM_WORLD_SIZE",),
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # MPICH and its relatives.
    Launcher(
        "PMI",
        True,
        ("PMI_SIZE",),
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID|SLURM_LOCALID",
        "MPI_LOCALNRANKS",
    ),
    Launcher(
        "Slurm",
        True,
        ("PMIX_RANK|PMI_RANK", "SLURM_STEP_NUM_TASKS|SLURM_NTASKS"),
        "PMIX_RANK|PMI_RANK",
        "SLURM_STEP_NUM_TASKS|SLURM_NTASKS",
        "SLURM_LOCALID",
    ),
    Launcher("PMIx", True, ("PMIX_RANK|PMI_RANK",), "PMIX_RANK|PMI_RANK"),
    Launcher(
        "horovodrun",
        False,
        ("HOROVOD_SIZE",),
        "HOROVOD_RANK",
        "HOROVOD_SIZE",
        "HOROVOD_LOCAL_RANK",
        "HOROVOD_LOCAL_SIZE",
    ),
    # The variables of torch.distributed without torchrun: DeepSpeed, Kubeflow's jobs for PyTorch.
    Launcher(
        TORCHRUN, False, ("WORLD_SIZE",), "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"
    ),
    # A batch script has SLURM_NTASKS and SLURM_PROCID, too, but is not a step.
    Launcher(
        SRUN,
        False,
        ("SLURM_PROCID", "SLURM_STEP_ID"),
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS|SLURM_NTASKS",
        "SLURM_LOCALID",
    ),
    Launcher(
        KUBERNETES,
        False,
        ("JOB_COMPLETION_INDEX",),
        "JOB_COMPLETION_INDEX",
        "HORORING_SIZE",
        counts_alone=True,
    ),
)


def detect(
    environ: Mapping[str, str] | None = None, mpi: Callable[[str], bool] = lambda launcher: True
) -> Launch:
    """Find the launcher by its variables. Those without MPI count only with several processes.

    `mpi`: whether it can be used at all, by the launcher's name. If not, a launcher without MPI
    precedes one with it, such as srun before the PMIx that it offers.
    """
    env = environment.live() if environ is None else environ
    unusable = Launch()
    for row in LAUNCHERS:
        if not all(_numbered(names, env) for names in row.known_by):
            continue
        launch = _launch(row, env)
        if row.mpi and not mpi(row.name):
            unusable = launch
        elif row.mpi or row.counts_alone or launch.min_size > 1:
            return launch
    return unusable


def _launch(row: Launcher, env: Mapping[str, str]) -> Launch:
    rank, size, local_rank, local_size = (
        _numbered(names, env) for names in (row.rank, row.size, row.local_rank, row.local_size)
    )
    sign = size or rank
    return Launch(
        row.name,
        int(env[rank]) if rank else None,
        int(env[size]) if size else None,
        int(env[local_rank]) if local_rank else None,
        int(env[local_size]) if local_size else None,
        row.mpi,
        f"{sign}={env.get(sign)}",
        f"{rank}={env.get(rank)}",
    )


def _numbered(names: str, env: Mapping[str, str]) -> str:
    """Return the first of `names` whose value is a number, or ""."""
    return next((name for name in names.split("|") if env.get(name, "").isdecimal()), "")


def check(launch: Launch, environ: Mapping[str, str] | None = None) -> None:
    """ValueError if a launcher without MPI sets half of the variables, or contradicts itself."""
    env = environment.live() if environ is None else environ
    name = launch.launcher
    if name == "none" and env.get("RANK"):
        if env["RANK"].isdecimal() and not env.get("WORLD_SIZE"):
            raise _incomplete(f"RANK={env['RANK']} is set, but WORLD_SIZE is not")
        name = TORCHRUN if env.get("WORLD_SIZE") else name  # apparently one rank
    row = next((row for row in LAUNCHERS if row.name == name), None)
    if row is None or row.mpi or row.name == HORORUN:
        return
    names_of_row = [row.rank, row.size, row.local_rank, row.local_size]
    named = [next((n for n in names.split("|") if env.get(n)), "") for names in names_of_row]
    for name in named:
        if name and not env[name].isdecimal():
            raise _incomplete(f"{name}={env[name]!r} is not a number")
    rank, size, local_rank, local_size = named
    if not rank:
        raise _incomplete(f"{launch.sign} is set, but {row.rank} is not")
    for one, other, least in (
        (rank, size, 1),
        (local_rank, local_size, 1),
        (local_rank, rank, 0),
        (local_size, size, 0),
    ):
        if one and other and int(env[one]) + least > int(env[other]):
            raise _incomplete(f"{one}={env[one]} contradicts {other}={env[other]}")


def _incomplete(what: str) -> ValueError:
    return ValueError(
        f"init: {what}; set HORORING_ALONE=1 if this process is to be a job of one rank"
    )


def may_outlive_parent(launch: Launch) -> bool:
    """Whether a shell, not a launcher, started this process: it continues when the shell ends."""
    if launch.mpi or multiprocessing.parent_process() is not None:
        return False
    return not any(name in environment.live() for name in _BY_LAUNCHERS)


def refuse_without_mpi(launch: Launch) -> None:
    """ValueError if there are other processes that MPI does not connect with this one."""
    if launch.launched and not launch.mpi:
        raise ValueError(
            f"init: {launch.sign} shows that there are at least {launch.min_size} processes (set "
            f"by {launch.launcher}), but neither MPI nor HORORING_RENDEZVOUS connects this process "
            "with them: use hororun -np N python ... or mpirun; or set HORORING_ALONE=1, if this "
            "process is to be a job of one rank"
        )


def refuse_children(launch: Launch, environ: Mapping[str, str] | None = None) -> None:
    """ValueError in a process that a rank started: it inherits a rank that is not its own."""
    env = environment.live() if environ is None else environ
    # Since Python 3.14, a fork server imports the script, too, under the name that workers use.
    again = getattr(sys.modules.get("__mp_main__"), "__name__", "") == "__mp_main__"
    is_worker = again or multiprocessing.parent_process() is not None
    if is_worker and (launch.mpi or _is_inherited(launch)):
        raise ValueError(
            "init: called in a worker process of multiprocessing, which inherits the rank of "
            "its parent; put the script's code under if __name__ == '__main__':"
        )
    pid, _, job = env.get(_RANK, "").partition(" ")
    # If it is of another job, the rank has started it through a launcher.
    if pid not in ("", str(os.getpid())) and job == _job(env):
        raise ValueError(
            f"init: called in a process that rank {launch.rank} (pid {pid}) has started, of which "
            "it inherits the launcher's variables, but it is not a rank itself; set "
            "HORORING_ALONE=1 in its environment if it is to be a job of one rank"
        )


def _is_inherited(launch: Launch) -> bool:
    """Whether the rank was set before this process started; otherwise it was set in it."""
    with open("/proc/self/environ", "rb") as file:
        began_with = file.read().split(b"\0")
    return launch.own.encode() in began_with


def mark_rank(environ: MutableMapping[str, str] | None = None) -> None:
    """Mark later child processes of this rank: they are not ranks."""
    env = environment.live() if environ is None else environ
    env[_RANK] = f"{os.getpid()} {_job(env)}"


def _job(env: Mapping[str, str]) -> str:
    """Return what identifies a job of a launcher, as far as known."""
    return " ".join(env.get(name, "") for name in _JOBS)


def prepare_mpi(launch: Launch, environ: MutableMapping[str, str] | None = None) -> None:
    """Set the variables that make MPI start fast and fail with an error, unless the user has.

    Only for Open MPI; those for speed only with all ranks on one host. Other MPIs and several hosts
    keep their defaults, because a fast network may need another choice.
    """
    env = environment.live() if environ is None else environ
    if launch.launcher != "Open MPI":
        return
    # Otherwise MPI_Init ends the process if another rank dies during it.
    env.setdefault("OMPI_MCA_mpi_initial_errhandler", "mpi_errors_return")
    if launch.local_size != launch.size:
        return
    if not _has_shared_memory():
        env.setdefault("OMPI_MCA_btl", "self,sm,tcp")
    for name, value in _OPENMPI_ON_ONE_HOST.items():
        env.setdefault(name, value)


def _has_shared_memory() -> bool:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free >= _MIN_SHARED_MEMORY_BYTES
    except OSError:
        return False
