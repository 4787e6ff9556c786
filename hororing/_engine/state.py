"""The place of this process in the job: `rank`, `size`, ...

`hororing._api.init` starts and ends the engine, and stores its findings here. They are separate
because most modules need them, and `runtime` needs many of those modules.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from hororing import errors
from hororing._engine.core import check, ffi, lib
from hororing._job.rendezvous.client import Member

_FORKED = (
    "hororing has not been initialized in this process, which was forked from one that is: "
    "communicate in the parent, or start workers with the 'spawn' method"
)


@dataclass(frozen=True)
class Topology:
    """The place of this rank. Local: on this host; cross: across hosts, among equal local ranks."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    homogeneous: bool


@dataclass
class Process:
    """The state of `hororing._api.init`, written by `init` and `shutdown` under `lock`."""

    pid: int = 0  # of the process that called init
    topology: Topology | None = None
    launched: bool = False  # MPI found the peers
    member: Member | None = None  # of a store, which found them
    hooked: bool = False  # into atexit, sys.excepthook and sys.exit
    exit_code: object = None  # of sys.exit, which the script has not caught
    broken: bool = False  # the job failed here: MPI must not be finalised
    dynamic: bool = False  # process sets may come and go after init
    process_sets: object = None  # as `init` was given them
    timeline: str = ""  # the latest file that was asked for
    ending: bool = False  # shutdown() runs
    era: int = 0  # number of calls of `init` and `join`, after which scripts send a state to all
    # Reentrant: signal handlers call `shutdown`.
    lock: threading.RLock = field(default_factory=threading.RLock)
    before_joining: list[Callable[[], object]] = field(default_factory=list)
    at_init: list[Callable[[], None]] = field(default_factory=list)
    at_era: list[Callable[[], None]] = field(default_factory=list)
    before_shutdown: list[Callable[[], None]] = field(default_factory=list)
    at_shutdown: list[Callable[[], None]] = field(default_factory=list)


process = Process()


def before_joining(callback: Callable[[], object]) -> None:
    """Call it before this process joins an elastic job, whose other ranks then wait for it."""
    process.before_joining.append(callback)


def at_init(callback: Callable[[], None]) -> None:
    """Call `callback` whenever an engine starts, for state that all ranks must reset."""
    process.at_init.append(callback)


def at_era(callback: Callable[[], None]) -> None:
    """Call `callback` whenever an engine starts, and whenever this rank joins."""
    process.at_era.append(callback)


def begin_era() -> None:
    """Note that states of ranks may differ from now on, until the script sends one to all."""
    process.era += 1
    for callback in process.at_era:
        callback()


def before_shutdown(callback: Callable[[], None]) -> None:
    """Call `callback` when an engine that has not failed is about to end."""
    process.before_shutdown.append(callback)


def at_shutdown(callback: Callable[[], None]) -> None:
    """Call `callback` whenever an engine has ended."""
    process.at_shutdown.append(callback)


def refuse_forked() -> None:
    """NotInitializedError in a child that was forked from an initialised process.

    There, functions return the parent's rank and size, but nothing that needs the engine works.
    """
    if process.pid not in (0, os.getpid()):
        raise errors.NotInitializedError(_FORKED)


def peers_are_proven() -> bool:
    """Whether all ranks are known to belong to this job; not with HORORING_INSECURE=1."""
    return process.member is None or process.member.proven


def read_topology() -> Topology:
    """Read it from the engine."""
    now = ffi.new("hr_topology *")
    check(lib.hr_topology_now(now))
    return Topology(
        now.rank,
        now.size,
        now.local_rank,
        now.local_size,
        now.cross_rank,
        now.cross_size,
        bool(now.homogeneous),
    )


def is_initialized() -> bool:
    """Whether `init()` has returned and `shutdown()` has not been called since. Never raises.

    In a forked child: whether that was so in the parent.

    >>> hvd.is_initialized()
    True
    """
    return process.topology is not None


def has_engine() -> bool:
    """Whether the engine runs in this process; not in a forked child."""
    return process.topology is not None and process.pid == os.getpid()


def topology() -> Topology:
    """All of the following at once; of the parent, in a forked child.

    NotInitializedError before `init()`.
    """
    return process.topology or read_topology()


def rank() -> int:
    """Return the index of this process in the job, from 0.

    >>> hvd.rank(), hvd.size(), hvd.local_rank()  # on one rank
    (0, 1, 0)
    """
    return topology().rank


def size() -> int:
    """Return the number of processes in the job.

    >>> rate = 0.1 * hvd.size()
    """
    return topology().size


def local_rank() -> int:
    """Return the index of this process among those of its host.

    >>> device = f"cuda:{hvd.local_rank()}"  # a GPU for each rank of the host
    """
    return topology().local_rank


def local_size() -> int:
    """Return the number of processes on this host."""
    return topology().local_size


def cross_rank() -> int:
    """Return the index of this host, among the hosts that have this local rank."""
    return topology().cross_rank


def cross_size() -> int:
    """Return the number of hosts that have this local rank."""
    return topology().cross_size


def is_homogeneous() -> bool:
    """Whether every host has the same number of processes."""
    return topology().homogeneous


def host_names() -> list[str]:
    """Return the host of every rank, by rank.

    NotInitializedError before `init()` and in a forked child.
    """
    refuse_forked()
    return [ffi.string(lib.hr_host_name(rank)).decode() for rank in range(size())]


def mpi_enabled() -> bool:
    """Whether the ranks of this job found one another through MPI. False for a job of one rank."""
    return is_initialized() and process.launched


def process_sets_are_dynamic() -> bool:
    """Whether `add_process_set` and `remove_process_set` are allowed."""
    topology()
    return process.dynamic
