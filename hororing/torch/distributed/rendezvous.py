"""Starts the engine for the process group of all ranks, and provides torch's store.

It uses an engine that is already running. Otherwise `init_process_group` starts one: through the
launcher if that is MPI or hororun, and through torch's own store in all other cases (torchrun,
`torch.multiprocessing.spawn`, a file), which need no launcher. Such an engine ends when the group
is destroyed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final

import torch.distributed as torch_distributed

from hororing._api import init
from hororing._engine import mpi, state
from hororing._engine.shutdown import shutdown
from hororing._job import bootstrap, launchers
from hororing._job.launchers import Launch
from hororing._job.rendezvous import interfaces, torch_store
from hororing._requests import control, handles
from hororing._requests.names import WORLD_SET
from hororing._requests.objects import broadcast_object
from hororing.errors import HororingInternalError
from hororing.torch.distributed.group import ProcessGroup
from hororing.torch.guard import guard_parallel_models

# torch's stubs lack many names.
dist: Any = torch_distributed

_LEAVE: Final = "torch.distributed.destroy_process_group"
# How long a rank waits at its end for ranks that still use other groups.
_LEAVE_S: Final = 30.0


def create(options: Any, _: Any = None) -> ProcessGroup:
    """Make a process group; torch calls it in each member of the group."""
    ranks, rank, size = options.global_ranks_in_group, options.group_rank, options.group_size
    timeout: timedelta = options.timeout
    of_all = not ranks
    leaves = False
    if not state.has_engine():
        if not of_all and size != dist.get_world_size():
            raise ValueError(
                f"process group {options.group_id} of ranks {list(ranks)}: hororing does not run "
                'yet, and all ranks must start it; call init_process_group("hororing") or '
                "hororing.torch.init() before"
            )
        leaves = _start(options.store, rank, size, timeout.total_seconds())
    ranks = list(ranks) or list(range(size))
    _check(rank, size, of_all)
    # The name of a group, which is part of its store's prefix, may differ between members.
    store = options.store if of_all else dist.distributed_c10d._get_default_store()
    guard_parallel_models()
    return ProcessGroup(rank, ranks, timeout, store, _leave if leaves else _nothing)


def _start(store: Any, rank: int, size: int, timeout_s: float) -> bool:
    """Start the engine; return whether it has only these ranks, so that another may follow."""
    started_by = launchers.detect(mpi=mpi.is_usable)
    by_launcher = started_by.mpi or started_by.launcher == launchers.HORORUN
    if by_launcher and (started_by.rank, started_by.min_size) == (rank, size):
        init.start(started_by)
        return False
    if size == 1:
        init.start(Launch())
        return True
    launched = Launch(
        "torch.distributed", rank, size, started_by.local_rank, started_by.local_size, mpi=False,
        sign=f"world_size={size}", own=f"rank={rank}",
    )  # fmt: skip
    one_host = started_by.local_size == size
    secret = bootstrap.secret_at_torch(torch_store.host_of(store), one_host)
    init.start(
        launched,
        meet=lambda: torch_store.meet_in(
            store, rank=rank, size=size, timeout_s=timeout_s, secret=secret
        ),
    )
    return True


def _check(rank: int, size: int, of_all: bool) -> None:
    """ValueError unless torch's ranks are those of the job."""
    if of_all and (rank, size) != (state.rank(), state.size()):
        raise ValueError(
            f"init_process_group: torch.distributed has rank {rank} of {size}, but hororing runs "
            f"already with rank {state.rank()} of {state.size()}; they must be the same"
        )


def _leave() -> None:
    """End the engine that a group started, once the other ranks have left theirs."""
    if not state.has_engine():
        return
    with suppress(HororingInternalError, ValueError):  # the job has ended already
        handle = control.start_barrier(_LEAVE, WORLD_SET, blocking=True)
        if handles.wait_at_most(handle, _LEAVE_S):
            handles.wait(handle)
        else:
            handles.abandon(handle, None)
    shutdown()


def _nothing() -> None:
    pass


def meet(_: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
    """Start the engine through its own rendezvous, and share a store of torch: hororing://."""
    init.init()
    rank, size = state.rank(), state.size()
    store, place = None, None
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, size, is_master=True, wait_for_workers=False)
        one_host = state.local_size() == size
        place = "127.0.0.1" if one_host else interfaces.reached_at(), store.port
    host, port = broadcast_object(place, 0, name="torch.distributed.store")
    if store is None:
        store = dist.TCPStore(host, port, size, is_master=False, wait_for_workers=False)
    yield store, rank, size
    raise RuntimeError("ranks meet once by hororing://")
