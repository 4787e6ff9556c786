"""mpi4py in the same process: either may initialize MPI, and scripts may pass communicators."""

from __future__ import annotations

import functools
import threading
from pathlib import Path

import mpirun
import numpy as np
import pytest
import tiers

import hororing.numpy as hvd

pytest.importorskip("mpi4py")

RANKS = Path(__file__).parents[1] / "support/mpi4py_ranks.py"


@pytest.mark.parametrize("size", tiers.choose([2, 3], push=[3]))
@pytest.mark.parametrize(
    "how",
    [
        "mpi4py_first",
        "hororing_first",
        "mpi4py_goes_on_after_shutdown",
        "hororing_begins_after_an_end",
        "finalize_by_hand",
    ],
)
def test_either_may_be_first_and_the_job_ends_well(how: str, size: int):
    job = mpirun.run(RANKS, size, how)
    assert job.returncode == 0, job.report()
    assert [*job.outputs, job.launcher_output] == [""] * (size + 1), job.report()


def test_the_thread_level_is_known():
    job = mpirun.run(RANKS, 2, "tell_threads")
    assert job.returncode == 0, job.report()


@pytest.mark.parametrize("level", ["serialized", "single"])
def test_an_mpi_with_too_few_threads_is_refused(level: str):
    job = mpirun.run(RANKS, 2, "too_few_threads", level)
    assert job.returncode == 0, job.report()


def test_an_exception_beside_mpi4py_ends_the_job():
    job = mpirun.run(RANKS, 2, "fail_beside_mpi4py", timeout_s=60)
    assert job.returncode not in (None, 0), job.report()
    assert "ArithmeticError: on purpose" in job.outputs[1], job.report()
    # mpirun may end rank 0 before it prints.
    if "lost" in job.outputs[0]:
        assert "lost 1" in job.outputs[0]
        assert "ArithmeticError: on purpose" in job.outputs[0]


# ---------------------------------------------------------------------------------------------
# Communicators: cases run on every rank, one after the other in one process


def check_job(rank: int, size: int) -> None:
    """Fail unless the engine works, as rank `rank` of `size`."""
    assert hvd.is_initialized()
    assert (hvd.rank(), hvd.size()) == (rank, size)
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    for elements in (1, 1000, 300_000):
        mine = np.full(elements, 2.0**rank)
        assert (hvd.allreduce(mine, op=hvd.Sum) == 2.0**size - 1).all()
    gathered = hvd.allgather(np.full((rank, 2), rank, np.int32))
    assert gathered[:, 0].tolist() == [r for r in range(size) for _ in range(r)]
    for root in range(size):
        assert hvd.broadcast_object(("from", rank), root_rank=root) == ("from", root)


def world():
    from mpi4py import MPI

    return MPI.COMM_WORLD


def case_the_world_of_mpi4py_is_that_of_mpirun() -> None:
    hvd.init()
    everybody = world()
    check_job(everybody.rank, everybody.size)
    hvd.shutdown()
    hvd.init(comm=everybody)
    check_job(everybody.rank, everybody.size)
    assert hvd.mpi_enabled()
    hvd.shutdown()


def case_a_duplicate_may_be_freed_once_init_has_returned() -> None:
    duplicate = world().Dup()
    hvd.init(comm=duplicate)
    duplicate.Free()
    check_job(world().rank, world().size)
    hvd.shutdown()


def case_each_half_is_a_job_of_its_own() -> None:
    everybody = world()
    color = everybody.rank % 2
    half = everybody.Split(color, key=everybody.rank)
    hvd.init(comm=half)
    check_job(half.rank, half.size)
    # The halves are separate jobs: they use the same names for different values.
    assert hvd.allreduce(np.array([color]), name="same", op=hvd.Max)[0] == color
    assert {r % 2 for r in hvd.allgather_object(everybody.rank)} == {color}
    hvd.shutdown()
    half.Free()
    everybody.Barrier()


def case_the_order_is_that_of_the_communicator() -> None:
    everybody = world()
    backwards = everybody.Split(0, key=-everybody.rank)
    hvd.init(comm=backwards)
    check_job(everybody.size - 1 - everybody.rank, everybody.size)
    hvd.shutdown()
    backwards.Free()


def case_alone_in_a_communicator() -> None:
    from mpi4py import MPI

    hvd.init(comm=MPI.COMM_SELF)
    check_job(0, 1)
    hvd.shutdown()
    world().Barrier()


def case_some_ranks_form_a_job_and_the_others_cannot_join_it() -> None:
    everybody = world()
    listed = [rank for rank in (0, 2) if rank < everybody.size]
    if everybody.rank in listed:
        hvd.init(comm=listed)
        check_job(listed.index(everybody.rank), len(listed))
        assert hvd.allgather_object(everybody.rank) == listed
        hvd.shutdown()
    else:
        with pytest.raises(ValueError, match=f"rank {everybody.rank}, which .* does not list"):
            hvd.init(comm=listed)
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.rank()
    everybody.Barrier()
    # Afterwards, all ranks are in one job.
    hvd.init()
    check_job(everybody.rank, everybody.size)
    hvd.shutdown()


def case_a_list_has_an_order() -> None:
    everybody = world()
    listed = list(range(everybody.size))[::-1]
    hvd.init(comm=listed)
    check_job(everybody.size - 1 - everybody.rank, everybody.size)
    hvd.shutdown()


def case_a_rank_that_does_not_exist_is_refused_everywhere() -> None:
    everybody = world()
    with pytest.raises(ValueError, match=f"rank {everybody.size} of .* is not a rank of this"):
        hvd.init(comm=[*range(everybody.size), everybody.size])
    assert not hvd.is_initialized()
    everybody.Barrier()


def case_no_communicator_is_refused() -> None:
    from mpi4py import MPI

    with pytest.raises(ValueError, match="COMM_NULL"):
        hvd.init(comm=MPI.COMM_NULL)
    part = world().Split(0 if world().rank == 0 else MPI.UNDEFINED)
    if world().rank == 0:
        hvd.init(comm=part)
        check_job(0, 1)
        hvd.shutdown()
        part.Free()
    else:
        with pytest.raises(ValueError, match="this rank is not in it"):
            hvd.init(comm=part)
    world().Barrier()


def case_both_work_at_the_same_time_in_different_threads() -> None:
    from mpi4py import MPI

    hvd.init()
    everybody = world()
    # As usual in MPI, each thread needs its own communicator.
    communicators = [everybody.Dup() for _ in range(2)]
    failures: list[BaseException] = []

    def use_mpi(communicator) -> None:
        try:
            for step in range(100):
                sent = np.full(2000, step, np.float64)
                received = np.empty_like(sent)
                communicator.Allreduce(sent, received, MPI.SUM)
                assert (received == step * communicator.size).all()
        except BaseException as error:
            failures.append(error)

    def use_engine(number: int) -> None:
        try:
            for step in range(30):
                result = hvd.allreduce(np.full(20_000, step), name=f"t{number}", op=hvd.Sum)
                assert (result == step * hvd.size()).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=use_mpi, args=(each,)) for each in communicators]
    threads += [threading.Thread(target=use_engine, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []
    for communicator in communicators:
        communicator.Free()


def case_messages_of_both_do_not_mix() -> None:
    """The script's wildcard receives on the world never match the engine's messages."""
    from mpi4py import MPI

    everybody = world()
    handles = [hvd.allreduce_async(np.ones(10_000), name=f"m{i}", op=hvd.Sum) for i in range(10)]
    right, left = (everybody.rank + 1) % everybody.size, (everybody.rank - 1) % everybody.size
    request = everybody.isend({"from": everybody.rank}, dest=right, tag=7)
    status = MPI.Status()
    received = everybody.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG, status=status)
    assert (received, status.source, status.tag) == ({"from": left}, left, 7)
    request.wait()
    for handle in handles:
        assert (hvd.synchronize(handle) == everybody.size).all()
    assert not everybody.iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
    everybody.Barrier()


def case_the_end() -> None:
    """End without shutdown or finalize; the exit code must be 0."""
    assert hvd.is_initialized()


@functools.cache
def cases(size: int, transport: str) -> mpirun.Job:
    job = mpirun.run(
        __file__,
        size,
        script=False,
        timeout_s=mpirun.CASES_LIMIT_S,
        environment={"HORORING_TRANSPORT": transport},
    )
    return job


# Over "mpi" the engine's thread is inside MPI all the time.
@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize(
    ("size", "transport"),
    tiers.choose(
        [(2, "auto"), (3, "mpi"), (4, "auto"), (4, "mpi")], push=[(2, "auto"), (3, "mpi")]
    ),
)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_communicators(case: str, size: int, transport: str):
    job = cases(size, transport)
    job.check(case)
    if case == "case_the_end":
        assert job.returncode == 0, job.report()
