"""How this process becomes rank r of n: one value, from the launcher and the arguments of `init`.

==========  ====================================================================================
alone       a job of one rank: no launcher, HORORING_ALONE=1, or a launcher of one process
by a store  the environment names it, or the launcher's variables do (_job/endpoints.py)
by MPI      mpirun or srun has started the processes, or `comm` is a communicator
elastic     the launcher's store gives this process a rank, anew in each generation
==========  ====================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hororing import errors
from hororing._engine import membership
from hororing._engine.start_config import check_cores
from hororing._job import bootstrap, job_settings, launchers
from hororing._job.launchers import Launch
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing.config import Config

WORLD: Final = -1  # as hr_config.mpi_communicator


@dataclass(frozen=True)
class Job:
    """How this process takes part in its job, before the engine starts."""

    launch: Launch  # its rank and their number, as far as known
    member: Member | None = None  # of the store that connects the ranks
    by_mpi: bool = False  # MPI connects them
    elastic: bool = False
    communicator: int = WORLD  # of MPI
    ranks: list[int] | None = None  # those that take part; None: all

    @property
    def connected(self) -> bool:
        """Whether something connects this process with other ranks."""
        return self.by_mpi or self.member is not None


def find_job(
    started_by: Launch,
    settings: Config,
    comm: Any,
    meet: Callable[[], Member] | None,
    known: Member | None,
) -> Job:
    """Find the job of this process; connect to its store, if it has one and is not elastic.

    Parameters
    ----------
    started_by : Launch
        What the launcher's variables say.
    comm : list of int or Comm
        As for `init`.
    meet : callable or None
        Connects to a store that the environment does not name.
    known : Member or None
        The member that this process has been in an earlier job of this store, which serves
        until the process ends.

    Raises
    ------
    ValueError : a bad argument or variable, or nothing connects the processes of a launcher.
    TransportError, PeerLostError : the store cannot be reached, or a rank was lost meanwhile.
    """
    if settings["ALONE"] and meet is None:
        started_by = Launch()
    elif meet is None and membership.is_elastic():
        if comm is not None:
            raise ValueError(f"init: comm={comm!r} needs MPI, which did not start this elastic job")
        launch = Launch(launchers.ELASTIC, mpi=False, own=membership.SIGN)
        launchers.refuse_children(launch)
        return Job(launch, elastic=True)
    communicator, ranks, others = _parse_comm(comm, started_by)
    by_mpi = (started_by.launched and started_by.mpi) or others
    if by_mpi or started_by.launched:
        launchers.refuse_children(started_by)
        check_cores(settings, started_by)
    if by_mpi:
        return Job(started_by, None, True, False, communicator, ranks)
    member = known if meet is None else None
    if member is None:
        member = _connect(started_by, settings, comm, meet)
    if member is None and communicator == WORLD:
        launchers.refuse_without_mpi(started_by)
    return Job(started_by, member, False, False, communicator, ranks)


def _connect(
    started_by: Launch, settings: Config, comm: Any, meet: Callable[[], Member] | None
) -> Member | None:
    """Connect to the store of this job. Return None if the environment names none."""
    if comm is not None and job_settings.read(started_by) is not None:
        raise ValueError(f"init: comm={comm!r} needs MPI, which did not start this job")
    try:
        return meet() if meet else bootstrap.find(started_by, settings)
    except RendezvousError as error:
        raise lost(error) from None


def lost(error: RendezvousError) -> errors.HororingInternalError:
    """Return the exception for a failure of the rendezvous."""
    if error.rank < 0:
        return errors.TransportError(f"init: {error}")
    return errors.PeerLostError(f"init: {error}", error.rank)


def _parse_comm(comm: Any, started_by: Launch) -> tuple[int, list[int] | None, bool]:
    """The Fortran handle, the ranks, and whether the communicator has several ranks."""
    if comm is None:
        return WORLD, None, False
    if isinstance(comm, (list, tuple, range)):
        ranks = list(comm)
        if not ranks or not all(type(rank) is int and rank >= 0 for rank in ranks):
            raise ValueError(f"init: comm={comm!r} is not a list of ranks: use integers from 0")
        if len(set(ranks)) != len(ranks):
            raise ValueError(f"init: comm={comm!r} lists a rank twice")
        if not started_by.launched and ranks != [0]:
            raise ValueError(
                f"init: comm={comm!r} lists ranks that do not exist: this job has one rank, 0; "
                "for more start it with mpirun"
            )
        return WORLD, ranks if started_by.launched else None, False
    if callable(getattr(comm, "py2f", None)) and callable(getattr(comm, "Get_size", None)):
        if not comm:
            raise ValueError("init: comm is MPI.COMM_NULL: this rank is not in it")
        handle = int(comm.py2f())
        size = int(comm.Get_size())
        return handle, None, size > 1
    raise ValueError(
        f"init: comm={comm!r} is neither None, nor a list of ranks, nor an mpi4py communicator"
    )
