"""`init`: find the job, start the engine of this process, register its process sets.

Each process has one engine; a forked child has none. `_engine.state` holds its state;
`_engine.shutdown` ends it.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from typing import Any

from hororing import config as configuration
from hororing import errors
from hororing._engine import membership, mpi, recorder, state
from hororing._engine.core import fail, ffi, lib
from hororing._engine.logs import Forwarder, logger
from hororing._engine.shutdown import install_hooks, reason_of
from hororing._engine.start_config import check_cores, engine_config, fingerprint
from hororing._engine.state import process as _process
from hororing._engine.timeline import absolute
from hororing._job import bootstrap, launchers
from hororing._job.launchers import Launch
from hororing._job.local_ranks import Neighbours, job_of
from hororing._job.rendezvous.client import Member, RendezvousError
from hororing._job.rendezvous.patience import Patience
from hororing._requests import process_sets as sets

# While init waits: seconds between two checks for signals, and for ended ranks of this host.
_POLL_S, _NEIGHBOURS_S = 0.2, 0.5

_WORLD = -1  # as hr_config.mpi_communicator

_log = Forwarder()


# ---------------------------------------------------------------------------------------------
# Init


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the engine and find the other ranks. Blocks until all ranks have called it.

    If already initialised, it only looks at `process_sets`. `shutdown()` and `init()` may follow
    one another. In an elastic job (hororun --min-np), this forms the next generation of the
    processes that exist by then; it has new ranks.

    Parameters
    ----------
    comm : None for all ranks of the job; or, if MPI started them, a list of ranks, which then form
        their own job, or an mpi4py communicator.
    process_sets : a list of `ProcessSet` or of lists of ranks, registered with ids from 1 in this
        order; or "dynamic", which allows `add_process_set` afterwards.

    Raises
    ------
    ValueError : a bad argument or environment variable; this rank is not in `comm`; or a launcher
        started several processes without a rendezvous (HORORING_ALONE=1 makes each a job of one
        rank).
    MismatchError : ranks are configured differently.
    TransportError : ranks cannot connect, or some did not call init within HORORING_TIMEOUT_S.
    PeerLostError : a rank ended before all had called init, as far as its host or MPI reports.
    KeyboardInterrupt : within seconds. If MPI was starting, the process can only end.
    SystemExit : 0, an elastic job no longer needs this process: its host was removed, or the job is
        done.

    Examples
    --------
    >>> hvd.init()
    >>> f"rank {hvd.rank()} of {hvd.size()}"  # on one rank
    'rank 0 of 1'
    """
    start(launchers.detect(mpi=mpi.is_usable), comm, process_sets)


def start(
    started_by: Launch,
    comm: Any = None,
    process_sets: Any = None,
    meet: Callable[[], Member] | None = None,
) -> None:
    """Like `init`, in a job launched by `started_by`.

    `meet` finds the ranks' store if the environment does not name one.
    """
    static = sets.parse(process_sets)
    dynamic = isinstance(process_sets, str)
    if state.has_engine():
        sets.adopt_static(static)
        _process.dynamic = _process.dynamic or dynamic
        return
    compared = "dynamic" if dynamic else str([each.ranks for each in static])
    _start(started_by, comm, dynamic, compared, meet)
    _process.process_sets = process_sets
    sets.register_static(static)


def _start(
    started_by: Launch,
    comm: Any,
    dynamic: bool,
    process_sets: str,
    meet: Callable[[], Member] | None,
) -> None:
    state.refuse_forked()  # in a child the lock may stay locked forever
    with _process.lock:
        if state.has_engine():
            return
        settings = configuration.load()
        _log.configure(
            settings.log_level(),
            chosen=settings.settings["LOG_LEVEL"].source != "default",
            hide_time=settings["LOG_HIDE_TIME"],
        )
        _log.set_rank(started_by.rank)
        if settings["ALONE"] and meet is None:
            started_by = Launch()
        elif meet is None and membership.is_elastic():
            _start_elastic(settings, comm, dynamic, process_sets)
            return
        communicator, ranks, others = _parse_comm(comm, started_by)
        by_mpi = (started_by.launched and started_by.mpi) or others
        if by_mpi or started_by.launched:
            launchers.refuse_children(started_by)
            check_cores(settings, started_by)
        if not by_mpi:
            _find_ranks(started_by, settings, comm, meet)
        launched = by_mpi or _process.member is not None
        if communicator == _WORLD and not launched:
            launchers.refuse_without_mpi(started_by)
        if launched:
            launchers.mark_rank()
        if by_mpi:
            launchers.prepare_mpi(started_by)
        _process.launched = by_mpi
        _process.dynamic = dynamic or settings["DYNAMIC_PROCESS_SETS"]
        watched = communicator == _WORLD and _process.member is None
        neighbours = Neighbours(ranks) if watched else None
        _run(settings, started_by, launched, process_sets, communicator, ranks, neighbours)


def _start_elastic(
    settings: configuration.Config, comm: Any, dynamic: bool, process_sets: str
) -> None:
    """Form the next generation, and another one if a member is lost meanwhile."""
    if comm is not None:
        raise ValueError(f"init: comm={comm!r} needs MPI, which did not start this elastic job")
    launchers.refuse_children(Launch(launchers.ELASTIC, mpi=False, own=membership.SIGN))
    _process.dynamic = dynamic or settings["DYNAMIC_PROCESS_SETS"]
    compared = fingerprint(settings, process_sets)
    while True:
        started_by = membership.enter(settings, compared, failed=_process.broken)
        launchers.mark_rank()
        try:
            _run(settings, started_by, True, process_sets, _WORLD, None, None)
        except (errors.PeerLostError, errors.TransportError) as error:
            membership.note_start(error)  # the store decides whether to try again
        else:
            return membership.note_start()


def _find_ranks(
    started_by: Launch,
    settings: configuration.Config,
    comm: Any,
    meet: Callable[[], Member] | None,
) -> None:
    """Find the store of this job, if the environment names one. It serves until the end."""
    if _process.member is not None:
        if meet is None:
            return
        _process.member.done()  # leave the previous job
        _process.member = None
    try:
        _process.member = meet() if meet else bootstrap.find(started_by, settings)
    except RendezvousError as error:
        raise _lost(error) from None
    if _process.member is not None and comm is not None:
        raise ValueError(f"init: comm={comm!r} needs MPI, which did not start this job")


def _lost(error: RendezvousError) -> errors.HororingInternalError:
    if error.rank < 0:
        return errors.TransportError(f"init: {error}")
    return errors.PeerLostError(f"init: {error}", error.rank)


def _answer(member: Member, timeout_s: float) -> None:
    """Share the texts that the core requests. Blocks until all ranks do so."""
    mine = ffi.string(lib.hr_asked()).decode("utf-8", "surrogateescape")
    try:
        texts = member.share(mine, timeout_s or math.inf)
    except RendezvousError as error:
        raise _lost(error) from None
    keep = [ffi.new("char[]", text.encode("utf-8", "surrogateescape")) for text in texts]
    lib.hr_answer(ffi.new("char *[]", keep), ffi.NULL)


def _run(
    settings: configuration.Config,
    started_by: Launch,
    launched: bool,
    process_sets: str,
    communicator: int,
    ranks: list[int] | None,
    neighbours: Neighbours | None,
) -> None:
    """Start the engine. After an exception, no engine exists."""
    _log.open(started_by.rank if launched else 0)
    keep, c_config = engine_config(
        settings, started_by, launched, _log.core_level(), process_sets, _process.member
    )
    c_config.mpi_communicator = communicator
    if ranks is not None:
        keep.append(ffi.new("int32_t[]", ranks))
        c_config.ranks, c_config.ranks_count = keep[-1], len(ranks)
    named = bootstrap.name_of(_process.member) if _process.member else job_of("self") or ""
    recorder.begin(settings["FLIGHT_RECORDER"], settings["STACK_SIGNAL"], started_by, named)
    _process.pid = os.getpid()
    _process.broken = True  # until it is known to work
    install_hooks(_log.close)
    try:
        code = int(lib.hr_init(c_config))
        if code == lib.HR_OK:
            code = _await_start(neighbours, settings["TIMEOUT_S"])
        if code != lib.HR_OK:
            # A rank outside of `comm` does not take part, but MPI is not broken.
            _process.broken = code != lib.HR_INVALID_ARGUMENT
            fail(code)
        _process.broken = False
        _process.topology = state.read_topology()
        # Not without one: the working directory may have been deleted.
        _process.timeline = absolute(settings["TIMELINE"]) if settings["TIMELINE"] else ""
        _log.set_rank(_process.topology.rank)
        recorder.note(rank=_process.topology.rank, size=_process.topology.size)
        if _process.topology.rank == 0:
            for log_level, note in configuration.horovod_notes():
                logger.log(log_level, note)
        state.begin_era()
        for callback in _process.at_init:
            callback()
    except BaseException as error:
        if _process.topology is not None or not isinstance(error, Exception):  # Ctrl-C, for example
            _process.broken = True
        lib.hr_abort(reason_of(type(error), error))
        _process.topology = None
        raise


def _await_start(neighbours: Neighbours | None, timeout_s: float) -> int:
    """Wait for the engine of hr_init; return its code. Ctrl-C works."""
    began, patience = time.monotonic(), Patience()
    look_at = began + _NEIGHBOURS_S
    pending = True
    while pending:
        code = int(lib.hr_init_wait(_POLL_S))
        now = time.monotonic()
        pending = code in (lib.HR_PENDING, lib.HR_ASKS)
        if code == lib.HR_ASKS and _process.member is not None:
            _answer(_process.member, timeout_s)
        if pending and _process.member is None:
            patience.say("this rank", "MPI to connect all ranks, each of which must call init")
        # MPI_Init may also fail because of a dead rank, without saying which.
        if neighbours is None or not (now >= look_at or code == lib.HR_TRANSPORT):
            continue
        look_at = now + _NEIGHBOURS_S
        if ended := neighbours.ended():
            raise errors.PeerLostError(
                f"init: {', '.join(f'rank {rank} (pid {pid})' for rank, pid in ended.items())} "
                f"ended, and this rank had waited {now - began:.0f} s for all ranks; every process "
                "that mpirun starts must call init",
                next(iter(ended)),
            )
    return code


def _parse_comm(comm: Any, started_by: Launch) -> tuple[int, list[int] | None, bool]:
    """The Fortran handle, the ranks, and whether the communicator has several ranks."""
    if comm is None:
        return _WORLD, None, False
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
        return _WORLD, ranks if started_by.launched else None, False
    if callable(getattr(comm, "py2f", None)) and callable(getattr(comm, "Get_size", None)):
        if not comm:
            raise ValueError("init: comm is MPI.COMM_NULL: this rank is not in it")
        handle = int(comm.py2f())
        size = int(comm.Get_size())
        return handle, None, size > 1
    raise ValueError(
        f"init: comm={comm!r} is neither None, nor a list of ranks, nor an mpi4py communicator"
    )
