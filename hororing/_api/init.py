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
from hororing._api.find_job import WORLD, Job, find_job, lost
from hororing._engine import membership, mpi, recorder, state
from hororing._engine.core import fail, ffi, lib
from hororing._engine.logs import Forwarder, logger
from hororing._engine.shutdown import install_hooks, reason_of
from hororing._engine.start_config import engine_config, fingerprint
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

_log = Forwarder()


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Start the engine and find the other ranks. Blocks until all ranks have called it.

    If already initialised, it only looks at `process_sets`. `shutdown()` and `init()` may follow
    one another. In an elastic job (hororun --min-np), this forms the next generation of the
    processes that exist by then; it has new ranks.

    Parameters
    ----------
    comm : None, list of int, or mpi4py.MPI.Comm
        None: all ranks of the job. If MPI started them: ranks, or a communicator, which then form
        their own job.
    process_sets : list of ProcessSet, list of lists of int, or "dynamic"
        Registered with ids from 1 in this order. "dynamic" allows `add_process_set` afterwards.

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
        if meet is not None and _process.member is not None:
            _process.member.done()  # leave the previous job
            _process.member = None
        job = find_job(started_by, settings, comm, meet, _process.member)
        _process.dynamic = dynamic or settings["DYNAMIC_PROCESS_SETS"]
        if job.elastic:
            _form_generation(settings, process_sets)
            return
        _process.member, _process.launched = job.member, job.by_mpi
        if job.connected:
            launchers.mark_rank()
        if job.by_mpi:
            launchers.prepare_mpi(job.launch)
        _run(settings, job, process_sets)


def _form_generation(settings: configuration.Config, process_sets: str) -> None:
    """Form the next generation, and another one if a member is lost meanwhile."""
    compared = fingerprint(settings, process_sets)
    while True:
        launch = membership.enter(settings, compared, failed=_process.broken)
        launchers.mark_rank()
        try:
            _run(settings, Job(launch, _process.member, elastic=True), process_sets)
        except (errors.PeerLostError, errors.TransportError) as error:
            membership.note_start(error)  # the store decides whether to try again
        else:
            return membership.note_start()


def _exchange(member: Member, timeout_s: float) -> None:
    """Exchange the texts of all ranks out of band, for the core. Blocks until all ranks do so."""
    mine = ffi.string(lib.hr_exchange_text()).decode("utf-8", "surrogateescape")
    try:
        texts = member.share(mine, timeout_s or math.inf)
    except RendezvousError as error:
        raise lost(error) from None
    keep = [ffi.new("char[]", text.encode("utf-8", "surrogateescape")) for text in texts]
    lib.hr_exchanged(ffi.new("char *[]", keep), ffi.NULL)


def _run(settings: configuration.Config, job: Job, process_sets: str) -> None:
    """Start the engine. After an exception, no engine exists."""
    _log.open(job.launch.rank if job.connected else 0)
    keep, c_config = engine_config(
        settings, job.launch, job.connected, _log.core_level(), process_sets, job.member
    )
    c_config.mpi_communicator = job.communicator
    if job.ranks is not None:
        keep.append(ffi.new("int32_t[]", job.ranks))
        c_config.ranks, c_config.ranks_count = keep[-1], len(job.ranks)
    watched = job.communicator == WORLD and job.member is None
    neighbours = Neighbours(job.ranks) if watched else None
    named = bootstrap.name_of(job.member) if job.member else job_of("self") or ""
    recorder.begin(settings["FLIGHT_RECORDER"], settings["STACK_SIGNAL"], job.launch, named)
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
        pending = code in (lib.HR_PENDING, lib.HR_EXCHANGES)
        if code == lib.HR_EXCHANGES and _process.member is not None:
            _exchange(_process.member, timeout_s)
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
