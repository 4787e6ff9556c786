"""The ranks of those tests in test_mpi4py.py that need their own jobs."""

from __future__ import annotations

import signal
import sys

import numpy as np
import pytest

import hororing.numpy as hvd
from hororing import errors
from hororing._api import built
from hororing._engine import mpi


def use_both() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    assert (world.rank, world.size) == (hvd.rank(), hvd.size())
    assert MPI.Query_thread() == MPI.THREAD_MULTIPLE
    for step in range(20):
        handle = hvd.allreduce_async(np.full(50_000, step), name="x", op=hvd.Sum)
        assert world.allreduce(world.rank) == world.size * (world.size - 1) // 2
        assert (hvd.synchronize(handle) == step * world.size).all()


def mpi4py_first() -> None:
    """The script ends neither hororing nor MPI: both end by themselves."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    world = MPI.COMM_WORLD
    mine = hvd.ProcessSet(world.Split(world.rank % 2))  # another one on each rank
    hvd.init(process_sets=[mine])
    assert mine.ranks == list(range(world.rank % 2, world.size, 2))
    total = hvd.allreduce(np.ones(1), op=hvd.Sum, process_set=mine)
    assert total == mine.size() == mine.mpi_comm.size
    use_both()


def hororing_first() -> None:
    hvd.init()
    from mpi4py import MPI

    assert MPI.Is_initialized()
    use_both()


def mpi4py_goes_on_after_shutdown() -> None:
    from mpi4py import MPI

    hvd.init()
    use_both()
    hvd.shutdown()
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
    MPI.COMM_WORLD.Barrier()


def hororing_begins_after_an_end() -> None:
    """MPI stays usable between shutdown() and init()."""
    hvd.init()
    hvd.shutdown()
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
    hvd.init(comm=MPI.COMM_WORLD)
    use_both()


def finalize_by_hand() -> None:
    from mpi4py import MPI

    hvd.init()
    use_both()
    hvd.shutdown()
    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    with pytest.raises(ValueError, match="MPI has been finalized"):
        hvd.init()
    assert not hvd.is_initialized()


def tell_threads() -> None:
    hvd.init()
    version, level, path, _ = mpi.describe()
    assert version
    assert "libmpi" in path
    assert level == "multiple", level
    assert hvd.mpi_enabled()
    assert built.mpi_threads_supported()


def too_few_threads() -> None:
    import mpi4py

    mpi4py.rc.thread_level = sys.argv[2]
    from mpi4py import MPI

    for comm in (None, MPI.COMM_WORLD):
        with pytest.raises(ValueError, match=r"MPI_THREAD_MULTIPLE.*thread_level"):
            hvd.init(comm=comm)
    assert not hvd.is_initialized()
    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size


def fail_beside_mpi4py() -> None:
    """Neither hororing nor mpi4py may finalize MPI while other ranks are busy."""
    from mpi4py import MPI

    assert MPI.Is_initialized()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # mpirun's, while the ranks print
    hvd.init()
    hvd.barrier()
    if hvd.rank() == 1:
        raise ArithmeticError("on purpose")
    try:
        hvd.allreduce(np.ones(4), name="x")
    except errors.PeerLostError as error:
        print("lost", error.rank, str(error), flush=True)
        raise


if __name__ == "__main__":
    globals()[sys.argv[1]]()
