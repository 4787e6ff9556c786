"""Memory that the ranks of a host share, on 1 to 4 ranks: reduced where it lies, or copied."""

from __future__ import annotations

import gc
import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import ending_ranks
import mpirun
import numpy as np
import oracle
import pytest
from live_job import LiveJob

import hororing.numpy as hvd
from hororing import arena

Array = np.ndarray[Any, np.dtype[Any]]

SMALL = 32 << 10  # up to here everything is packed

# ---------------------------------------------------------------------------------------------
# On the ranks


def shared(content: Array) -> Array:
    """A copy in the arena, or in private memory where there is none."""
    memory = arena.allocate(content.nbytes)
    assert (memory is None) == (hvd.size() == 1), arena.why_not()
    if memory is None:
        return content.copy()
    array = np.frombuffer(memory, content.dtype).reshape(content.shape)
    assert not array.any()
    array[...] = content
    return array


def inputs(name: str, shape: tuple[int, ...], *key: int) -> list[Array]:
    """What the ranks pass, in rank order."""
    return [
        oracle.values(np.random.default_rng([mpirun.seed(), rank, *key]), name, shape)
        for rank in range(hvd.size())
    ]


def resident() -> int:
    """Bytes of shared memory that this process has in its page tables."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssShmem"))


def case_arrays_in_the_arena_are_reduced_where_they_lie() -> None:
    hvd.init(process_sets="dynamic")
    for key, name in enumerate(("float32", "float16", "int32", "float64")):
        values = inputs(name, (100_003,), key)
        array = shared(values[hvd.rank()])
        before = hvd.statistics()
        result = hvd.allreduce_(array, op=hvd.Sum, name="x")
        assert result is array
        oracle.reduced(values, hvd.Sum, 1.0, 1.0).compare(array)
        after = hvd.statistics()
        several = hvd.size() > 1
        assert after["in_place_bytes"] - before["in_place_bytes"] == array.nbytes * several
        assert after["packed_bytes"] == before["packed_bytes"]


def case_private_arrays_are_packed_and_counted() -> None:
    before = hvd.statistics()
    array = np.ones(SMALL, np.float32)
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    after = hvd.statistics()
    assert after["in_place_bytes"] == before["in_place_bytes"]
    assert after["packed_bytes"] - before["packed_bytes"] == array.nbytes * (hvd.size() > 1)


def case_ranks_may_differ_in_what_they_have_in_the_arena() -> None:
    rng = np.random.default_rng([mpirun.seed(), 1000 + hvd.rank()])  # not the same on all
    shapes = [(70_001,), (3, 5), (40_000, 2), (1,), (0,), (33_333,)]
    for step in range(12):
        values = [inputs("float32", shape, step, i) for i, shape in enumerate(shapes)]
        mine = [each[hvd.rank()] for each in values]
        arrays = [
            shared(each) if each.size and rng.random() < 0.6 else each.copy() for each in mine
        ]
        if step % 2:
            hvd.grouped_allreduce_(arrays, op=hvd.Average, name="group")
        else:
            for handle in [
                hvd.allreduce_async_(array, op=hvd.Average, name=f"x{i}")
                for i, array in enumerate(arrays)
            ]:
                hvd.synchronize(handle)
        for array, each in zip(arrays, values, strict=True):
            oracle.reduced(each, hvd.Average, 1.0, 1.0).compare(array)


def case_each_rank_has_its_own_memory() -> None:
    array = shared(np.full(SMALL, hvd.rank(), np.float32))
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    hvd.barrier()
    array += hvd.rank()  # as if one of them had clipped its gradients
    hvd.barrier()
    assert (array == sum(range(hvd.size())) + hvd.rank()).all()


def case_process_sets_reduce_in_the_arena() -> None:
    ranks = range(hvd.size())
    sets = [list(ranks[:-1]), list(ranks[1:])] if hvd.size() > 1 else []
    for overlapping in [hvd.add_process_set(members) for members in sets]:
        if not overlapping.included():
            continue
        array = shared(np.full(SMALL, hvd.rank() + 1, np.float32))
        hvd.allreduce_(array, op=hvd.Sum, name="x", process_set=overlapping)
        assert (array == sum(rank + 1 for rank in overlapping.ranks)).all()
    hvd.barrier()


def case_memory_is_given_back_with_its_last_view() -> None:
    if hvd.size() == 1:
        return
    gc.collect()
    before = resident()
    array = shared(np.ones(8 << 18, np.float32))
    view = array[10:20]
    assert resident() >= before + (8 << 20)
    del array
    gc.collect()
    assert resident() >= before + (8 << 20)
    assert (view == 1).all()
    del view
    gc.collect()
    assert resident() < before + (1 << 20)


def case_memory_that_is_held_is_counted() -> None:
    if hvd.size() == 1:
        assert hvd.statistics()["arena_bytes"] == 0
        return
    gc.collect()
    before = hvd.statistics()["arena_bytes"]
    array = shared(np.ones(3 << 18, np.float32))
    assert hvd.statistics()["arena_bytes"] == before + (3 << 20)
    del array
    gc.collect()
    assert hvd.statistics()["arena_bytes"] == before


def case_a_forked_child_sees_the_memory_and_frees_nothing() -> None:
    array = shared(np.full(SMALL, 5, np.float32))
    child = os.fork()
    if child == 0:
        right = bool((array == 5).all()) and arena.allocate(100) is None
        del array
        gc.collect()
        os._exit(0 if right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 5).all()
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    assert (array == 5 * hvd.size()).all()


def case_memory_stays_after_shutdown_and_is_private_to_the_next_engine() -> None:
    array = shared(np.full(SMALL, 2, np.float32))
    hvd.barrier()
    hvd.shutdown()
    assert arena.allocate(100) is None
    assert "hvd.init()" in arena.why_not()
    assert (array == 2).all()
    hvd.init()
    hvd.allreduce_(array, op=hvd.Sum, name="x")
    assert (array == 2 * hvd.size()).all()
    assert hvd.statistics()["in_place_bytes"] == 0
    new = shared(array)
    hvd.allreduce_(new, op=hvd.Sum, name="x")
    assert hvd.statistics()["in_place_bytes"] == new.nbytes * (hvd.size() > 1)
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
def test_on_ranks(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)


# ---------------------------------------------------------------------------------------------
# Where there is none, or too little, and where the job ends


def limited(limit: str) -> None:
    """Say how much of 3 MiB the arena has room for, with what error; the sums are right."""
    if limit == "address space" and os.environ["OMPI_COMM_WORLD_RANK"] == "1":
        resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    hvd.init()
    got = [arena.allocate(1 << 20) for _ in range(3)]
    ending_ranks.say("got", sum(each is not None for each in got), arena.why_not())
    arrays = [
        np.ones(1 << 18, np.float32) if each is None else np.frombuffer(each, np.float32)
        for each in got
    ]
    for array in arrays:
        array[:] = hvd.rank() + 1
    for array in hvd.grouped_allreduce_(arrays, op=hvd.Sum, name="x"):
        assert (array == sum(rank + 1 for rank in range(hvd.size()))).all()
    hvd.barrier()
    ending_ranks.say("right")
    hvd.shutdown()


@pytest.mark.parametrize(
    ("limit", "arena_bytes", "room", "text"),
    [
        ("off", "0", 0, "rank 0 has no arenas: HORORING_ARENA_BYTES is 0"),
        ("too small", "2MiB", 2, "(2 MiB of 2 MiB in use"),
        ("address space", "2GiB", 0, "rank 1 has no arenas"),
    ],
)
def test_without_room_private_memory_serves(limit: str, arena_bytes: str, room: int, text: str):
    with LiveJob(Path(__file__), 2, "limited", limit, HORORING_ARENA_BYTES=arena_bytes) as job:
        for rank in range(2):
            count, error = job.said(rank, "got").split(maxsplit=1)
            assert int(count) == room
            assert text in error
        job.wait_until_all_say("right")
        assert job.end() == 0
        assert job.files_left() == set()


def work_in_the_arena() -> None:
    """Reduce arrays in the arena until a rank is killed."""
    ending_ranks.begin()
    array = shared(np.ones(4 << 20, np.float32))
    hvd.barrier()
    ending_ranks.say("working")

    def work() -> None:
        while True:
            hvd.allreduce_(array, op=hvd.Average, name="x")

    ending_ranks.fail_with(work)


@pytest.mark.parametrize("victims", [[1], [0, 1]])
def test_nothing_is_left_of_arenas_when_ranks_are_killed(victims: list[int]):
    with LiveJob(
        Path(__file__), 2, "work_in_the_arena", options=["--runtime-options", "recoverable"]
    ) as job:
        job.wait_until_all_say("working")
        for victim in victims:
            os.kill(job.pid(victim), signal.SIGKILL)
        if victims == [1]:
            seen = json.loads(job.said(0, "failed"))
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", 1), seen
        job.end()
        assert job.files_left() == set()


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
