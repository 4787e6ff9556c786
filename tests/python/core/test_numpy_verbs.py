"""Features of hororing.numpy only: handles, views and read-only arrays; and calls from threads.

conformance/ tests the results and errors of the verbs for every framework.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import random
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import oracle
import pytest
import tiers
from configured import raises

import hororing.numpy as hvd
from hororing import errors

Array = np.ndarray[Any, np.dtype[Any]]

FLOATS = [oracle.type_of(name) for name in oracle.FLOATS]
HUGE = 2**31 + 4096


def agree(result: Any, wanted: Array) -> None:
    """Fail unless `result` is `wanted`, in type, shape and value."""
    assert isinstance(result, np.ndarray)
    assert result.dtype == wanted.dtype
    np.testing.assert_array_equal(result.astype(np.float64), wanted.astype(np.float64), strict=True)


def arrays_of(dtype: Any, shape: Any, *key: int) -> list[Array]:
    """Return the inputs of all ranks. Floats are multiples of 1/8 up to 4: sums are exact."""
    unit = 8 if np.dtype(dtype).kind == "f" else 1
    rngs = [np.random.default_rng([mpirun.seed(), rank, *key]) for rank in range(hvd.size())]
    return [(rng.integers(-32, 33, shape) / unit).astype(dtype) for rng in rngs]


def total_of(arrays: list[Array]) -> Array:
    return functools.reduce(np.add, arrays)


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0)


# ---------------------------------------------------------------------------------------------
# Cases, on every rank


def case_init() -> None:
    hvd.init()
    assert hvd.size() == int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    assert hvd.rank() == int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


def case_sums_are_made_in_the_order_of_the_ranks() -> None:
    """On one host, where the order determines the bits; over MPI the order is free."""
    if os.environ.get("HORORING_TRANSPORT") == "mpi":
        return
    rngs = [np.random.default_rng([mpirun.seed(), 6, rank]) for rank in range(hvd.size())]
    for dtype, count in itertools.product(FLOATS, (1, 67, 9001)):
        wide = np.dtype("float32") if dtype.itemsize == 2 else dtype
        arrays = [rng.standard_normal(count).astype(dtype) for rng in rngs]
        scaled = [array.astype(wide) * wide.type(1.1) for array in arrays]
        for op, wanted in (
            (hvd.Sum, total_of(scaled)),
            (hvd.Average, total_of(scaled) / wide.type(hvd.size())),
            (hvd.Product, functools.reduce(np.multiply, scaled)),
        ):
            result = hvd.allreduce(
                arrays[hvd.rank()], op=op, prescale_factor=1.1, postscale_factor=0.7
            )
            assert result.tobytes() == (wanted * wide.type(0.7)).astype(dtype).tobytes()


def case_inputs_stay_as_they_were() -> None:
    rank, root = hvd.rank(), hvd.size() - 1
    mine = arrays_of("float32", 100, 12)[rank]
    before = mine.copy()
    for result in (
        hvd.allreduce(mine),
        *hvd.grouped_allreduce([mine, mine[::2]]),
        hvd.broadcast(mine, root),
        hvd.allgather(mine),
        *hvd.grouped_allgather([mine, mine[:0]]),
        hvd.synchronize(hvd.allreduce_async(mine, op=hvd.Max)),
    ):
        assert not np.shares_memory(result, mine)
        result[...] = 77  # the result belongs to the caller
    assert (mine == before).all()


def case_a_part_of_a_gathered_result_keeps_its_memory() -> None:
    part = hvd.allgather(np.full(1000, hvd.rank()))[5:9]
    gc.collect()
    hvd.allgather(np.full(1000, 99))  # would get the memory if it were freed
    assert part.tolist() == [0] * 4


def case_kinds_of_arguments_and_results() -> None:
    size, mine = hvd.size(), np.full(2, hvd.rank())
    assert type(hvd.grouped_allreduce(each for each in [mine, mine])) is list
    assert type(hvd.grouped_allreduce_([mine, mine.copy()])) is tuple
    assert type(hvd.grouped_allgather([mine, mine])) is tuple
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather):
        with raises(ValueError, "there are no tensors"):
            call([])
    agree(hvd.allreduce(np.float32(hvd.rank()), op=hvd.Sum), np.array(sum(range(size)), np.float32))
    deep = np.full((1,) * 32 + (2,), hvd.rank(), np.int32)
    assert hvd.allreduce(deep, op=hvd.Max).shape == deep.shape
    # With one bad member, nothing of the group is submitted.
    with raises(ValueError, "not supported"):
        hvd.grouped_allreduce([np.ones(2), np.ones(2, "c8")], name="half bad")
    hvd.grouped_allreduce([np.ones(2), np.ones(2)], name="half bad")


def case_a_group_waits_for_all_of_its_members_ranks() -> None:
    """Every rank submits groups, single arrays and unnamed calls in its own order."""
    rank = hvd.rank()
    mine = random.Random(mpirun.seed() + 50 + rank)
    for turn in range(4):
        arrays = arrays_of("float32", 60, 16, turn)
        parts = [np.split(array, 3) for array in arrays]
        starts = [
            lambda t=turn, p=parts[rank]: hvd.grouped_allreduce_async(p, op=hvd.Sum, name=f"g{t}"),
            lambda t=turn, a=arrays[rank]: hvd.allreduce_async(a, op=hvd.Sum, name=f"s{t}"),
            lambda t=turn, p=parts[rank]: hvd.grouped_allgather_async(p, name=f"a{t}"),
        ]
        order = mine.sample(range(3), 3)
        handles = {which: starts[which]() for which in order}
        total = total_of(arrays)
        agree(hvd.synchronize(handles[1]), total)
        agree(np.concatenate(hvd.synchronize(handles[0])), total)
        gathered = hvd.synchronize(handles[2])
        assert type(gathered) is tuple
        for index, each in enumerate(gathered):
            agree(each, np.concatenate([p[index] for p in parts]))


def case_arrays_that_are_not_contiguous() -> None:
    size, rank = hvd.size(), hvd.rank()
    views: list[Callable[[Array], Array]] = [
        lambda a: a.T,
        lambda a: a[::2, 1:],
        lambda a: a[::-1],
        lambda a: a[:, 3],
        lambda a: np.asfortranarray(a),
        lambda a: a[1:1],
        lambda a: a[:, :, np.newaxis].transpose(2, 1, 0),
        lambda a: np.frombuffer(b"x" + a.tobytes(), np.uint8)[1:].view(a.dtype),  # unaligned
    ]
    for dtype, (key, view) in itertools.product((np.float64, np.int16), enumerate(views)):
        arrays = arrays_of(dtype, (10, 8), 20, key)
        wanted = total_of([np.ascontiguousarray(view(a)) for a in arrays])
        agree(hvd.allreduce(view(arrays[rank]), op=hvd.Sum), wanted)
        agree(hvd.broadcast(view(arrays[rank]), size - 1), view(arrays[-1]).copy())
        agree(hvd.allgather(view(arrays[rank])), np.concatenate([view(a) for a in arrays]))
        whole = arrays[rank].copy(order="K")
        mine = view(whole)
        if not mine.flags.writeable:
            continue
        untouched = whole.copy()
        view(untouched)[...] = wanted
        assert hvd.allreduce_(mine, op=hvd.Sum) is mine
        agree(mine, wanted)
        if np.shares_memory(mine, whole):
            assert (whole == untouched).all()  # memory between the elements is unchanged
        hvd.synchronize(hvd.broadcast_async_(mine, 0))
        agree(mine, wanted)
    room = np.zeros(81, np.uint8)
    odd = room[1:].view(np.float64)
    odd[:] = rank
    assert not odd.flags.aligned
    hvd.allreduce_(odd, op=hvd.Sum)
    assert odd.tolist() == [sum(range(size))] * 10
    assert room[0] == 0


def case_arrays_that_are_read_only() -> None:
    mine = np.arange(5.0)
    mine.flags.writeable = False
    assert hvd.allreduce(mine, op=hvd.Sum).tolist() == [hvd.size() * i for i in range(5)]
    assert hvd.broadcast(mine, 0).tolist() == list(range(5))
    assert hvd.allgather(mine).tolist() == list(range(5)) * hvd.size()
    same = np.broadcast_to(np.float32(3), (4, 5))
    agree(hvd.allreduce(same), same.copy())
    for call in (
        lambda: hvd.allreduce_(mine),
        lambda: hvd.allreduce_async_(mine),
        lambda: hvd.grouped_allreduce_([np.ones(1), mine]),
        lambda: hvd.broadcast_(mine, 0),
        lambda: hvd.broadcast_async_(same, 0),
        lambda: hvd.allreduce_(np.float64(3)),
    ):
        with raises(ValueError, "read-only"):
            call()


def case_average_is_deprecated_and_works() -> None:
    size = hvd.size()
    for average, wanted in ((True, 1.0), (False, float(size))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert hvd.allreduce(np.ones(2), average=average).tolist() == [wanted] * 2
        (warning,) = caught
        assert warning.category is DeprecationWarning
        assert warning.filename == __file__  # the warning is for the caller's line
    assert hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Max).tolist() == [size - 1] * 2


def case_unnamed_calls_match_in_their_order() -> None:
    """Even if ranks mix verbs differently: each verb has its own count."""
    rank, size = hvd.rank(), hvd.size()
    sums = range(10, 15)
    starts: list[Callable[[], int]] = [
        functools.partial(hvd.allreduce_async, np.array([each]), op=hvd.Sum) for each in sums
    ]
    gathers: list[Callable[[], int]] = [
        functools.partial(hvd.allgather_async, np.array([each * 7])) for each in sums
    ]
    first, second = (starts, gathers) if rank % 2 else (gathers, starts)
    handles = {id(start): start() for start in first + second}
    for each, start, gather in zip(sums, starts, gathers, strict=True):
        assert hvd.synchronize(handles[id(start)]).tolist() == [each * size]
        assert hvd.synchronize(handles[id(gather)]).tolist() == [each * 7] * size


def case_a_name_in_flight_is_refused() -> None:
    """The last rank submits only after the others have tried twice."""
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return
    for verb in (hvd.allreduce_async, hvd.allgather_async):
        handle = 0
        if rank < size - 1:
            handle = verb(np.full(3, rank), name="twice")
            others: list[Callable[[], Any]] = [
                lambda: hvd.allreduce_async(np.ones(3), name="twice"),
                lambda: hvd.allreduce_(np.ones(9), name="twice"),
                lambda: hvd.grouped_allreduce([np.ones(1)] * 2, name="twice"),
                lambda: hvd.broadcast(np.ones(3), 0, name="twice"),
                lambda: hvd.allgather(np.ones(3), name="twice"),
                lambda: hvd.broadcast_async(np.ones(4), 0, name="twice"),
                lambda: hvd.grouped_allgather_async([np.ones(4)] * 2, name="twice"),
            ]
            for other in others:
                with raises(errors.DuplicateNameError, "'twice'"):
                    other()
            assert not hvd.poll(handle)
        hvd.barrier()
        if rank == size - 1:
            handle = verb(np.full(3, rank), name="twice")
        result = hvd.synchronize(handle)
        assert result.sum() == (
            3 * sum(range(size)) if verb is hvd.allgather_async else 3 * (sum(range(size)) // size)
        )
    assert issubclass(errors.DuplicateNameError, ValueError)
    hvd.allreduce(np.ones(1), name="twice")


def case_handles_are_good_for_one_result() -> None:
    rank, size = hvd.rank(), hvd.size()
    handle = hvd.allreduce_async(np.ones(2), op=hvd.Sum)
    assert type(handle) is int
    wait_until(lambda: hvd.poll(handle), "an allreduce")
    assert hvd.poll(handle)  # poll does not release it
    assert hvd.synchronize(handle).tolist() == [size] * 2
    for again in (hvd.synchronize, hvd.poll):
        with raises(ValueError, f"there is no handle {handle}", "synchronized before"):
            again(handle)
    for unknown in (0, -1, 10**9, 2**70, "1", None, 1.5, []):
        for call in (hvd.synchronize, hvd.poll):
            with raises(ValueError, f"there is no handle {unknown!r}"):
                call(unknown)
    # The request is pending until the last rank submits it.
    if size > 1:
        mine = np.full(2, rank)
        late = hvd.allreduce_async(mine, op=hvd.Sum, name="late") if rank < size - 1 else 0
        hvd.barrier()
        if late:
            assert not hvd.poll(late)
        hvd.barrier()
        late = late or hvd.allreduce_async(mine, op=hvd.Sum, name="late")
        assert hvd.synchronize(late).tolist() == [sum(range(size))] * 2
    # Results are kept until synchronize, in any order.
    handles = [hvd.allreduce_async(np.full(100, i), op=hvd.Max) for i in range(50)]
    for i in reversed(range(50)):
        assert hvd.synchronize(handles[i]).tolist() == [i] * 100


def case_memory_in_flight_is_kept() -> None:
    size = hvd.size()
    handles = [hvd.allreduce_async(np.full(30_000, i, np.int32), op=hvd.Sum) for i in range(20)]
    handles += [hvd.allgather_async(np.full((50, 2), i, np.int32)[::2]) for i in range(20)]
    gc.collect()
    rubbish = [np.full(30_000, -1, np.int32) for _ in range(20)]
    for i, handle in enumerate(handles[:20]):
        assert (hvd.synchronize(handle) == i * size).all()
    for i, handle in enumerate(handles[20:]):
        result = hvd.synchronize(handle)
        assert result.shape == (25 * size, 2)
        assert (result == i).all()
    assert len(rubbish) == 20


def case_a_barrier_waits_for_all() -> None:
    """After the barrier, every rank finds the files of all others."""
    folder: list[str] = []
    if hvd.rank() == 0:
        folder = [tempfile.mkdtemp()]
    signs = Path(hvd.broadcast_object(folder)[0])
    mine = random.Random(mpirun.seed() + hvd.rank())
    for turn in range(25):
        sum(range(mine.randrange(100_000)))  # so that ranks come at different times
        (signs / f"{turn}.{hvd.rank()}").touch()
        hvd.barrier()
        for rank in range(hvd.size()):
            assert (signs / f"{turn}.{rank}").exists()
    hvd.barrier()
    if hvd.rank() == 0:
        for file in signs.iterdir():
            file.unlink()
        signs.rmdir()


def case_waiting_lets_other_threads_run() -> None:
    """Two threads wait in opposite orders on even and odd ranks."""
    results: dict[str, Any] = {}

    def reduce(name: str) -> None:
        results[name] = hvd.allreduce(np.full(3, 5), name=name, op=hvd.Max)

    names = ["first", "second"]
    if hvd.rank() % 2:
        threads = [threading.Thread(target=reduce, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    else:
        for name in reversed(names):
            reduce(name)
    assert {name: result.tolist() for name, result in results.items()} == {
        name: [5, 5, 5] for name in names
    }


def case_several_threads_may_call_verbs_at_once() -> None:
    failures: list[BaseException] = []
    size, rank = hvd.size(), hvd.rank()

    def play(number: int) -> None:
        try:
            for step in range(30):
                name = f"{number}.{step % 3}"
                total = hvd.allreduce(np.full(step * 100, rank + 1), name=name, op=hvd.Sum)
                assert (total == size * (size + 1) // 2).all()
                gathered = hvd.allgather(np.full((rank + 1, 2), number), name=f"g{name}")
                assert gathered.shape == (size * (size + 1) // 2, 2)
                assert (gathered == number).all()
                root = step % size
                sent = hvd.broadcast(np.array([rank, step]), root, name=f"b{name}")
                assert sent.tolist() == [root, step]
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=(number,)) for number in range(5)]
    # Every rank has its own order.
    random.Random(rank).shuffle(threads)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    assert failures == []


def case_one_thread_may_wait_for_what_another_has_started() -> None:
    handles = [hvd.allreduce_async(np.ones(1000), name=f"w{i}", op=hvd.Sum) for i in range(20)]
    results: list[float] = []
    thread = threading.Thread(
        target=lambda: results.extend(hvd.synchronize(handle)[0] for handle in handles)
    )
    thread.start()
    thread.join(60)
    assert results == [hvd.size()] * 20


def case_tensors_of_a_reduction_must_not_share_memory() -> None:
    x = np.full(40_000, 1.0, np.float32)
    y = np.full(9, 1.0, np.float32)
    for several, named in (
        ([x, y, x], "tensors 0 and 2"),
        ([y, x[:-1], x[1:]], "tensors 1 and 2"),
        ([x[5:9], y, y.copy(), x], "tensors 0 and 3"),
    ):
        with raises(ValueError, f"allreduce 'tied': {named} of the group share memory"):
            hvd.grouped_allreduce_(several, op=hvd.Sum, name="tied")
    hvd.grouped_allreduce_([x[:9], y, x[9:]], op=hvd.Sum, name="tied")  # neighbours
    for result in hvd.grouped_allreduce([x, y, x], op=hvd.Max, name="only read"):
        assert (result == hvd.size()).all()


def case_shutdown_and_init_again() -> None:
    rank, size = hvd.rank(), hvd.size()
    for turn in range(3):
        # Only rank 0 makes this unnamed call. It fails, and its number is forgotten.
        lost = hvd.allreduce_async(np.ones(4)) if rank == 0 and size > 1 else 0
        kept = hvd.allreduce_async(np.full(5, rank), op=hvd.Sum, name="submitted by all")
        hvd.barrier()
        hvd.shutdown()
        assert not hvd.is_initialized()
        with raises(errors.NotInitializedError, "has not been initialized"):
            hvd.allreduce(np.ones(2))
        with raises(errors.NotInitializedError, "has not been initialized"):
            hvd.barrier()
        if lost:
            assert hvd.poll(lost)
            with raises(errors.ShutDownError):
                hvd.synchronize(lost)
        assert hvd.synchronize(kept).tolist() == [sum(range(size))] * 5
        hvd.shutdown()  # nothing left to do
        hvd.init()
        assert (hvd.rank(), hvd.size()) == (rank, size)
        assert hvd.allreduce(np.full(3, rank + turn), op=hvd.Min).tolist() == [turn] * 3
        assert len(hvd.allgather(np.zeros(2))) == 2 * size


def case_shutdown() -> None:
    hvd.shutdown()
    for call in (hvd.synchronize, hvd.poll):
        with raises(ValueError, "there is no handle 1"):
            call(1)


# ---------------------------------------------------------------------------------------------
# Tests


@functools.cache
def _job(transport: str, size: int) -> mpirun.Job:
    return mpirun.run(
        __file__,
        size,
        script=False,
        timeout_s=mpirun.CASES_LIMIT_S,
        environment={"HORORING_TRANSPORT": transport},
    )


@pytest.mark.timeout(mpirun.CASES_LIMIT_S + 20)
@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize(
    ("transport", "size"),
    tiers.choose(
        [("auto", 1), ("auto", 2), ("auto", 3), ("auto", 4), ("mpi", 3)], push=[("auto", 3)]
    ),
)
def test_case(case: str, transport: str, size: int):
    _job(transport, size).check(case)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@tiers.full
@pytest.mark.skipif(_available_bytes() < 16 << 30, reason="less than 16 GiB of memory are free")
def test_an_array_beyond_2_gib_is_reduced_in_place():
    job = mpirun.run(__file__, 2, "huge")
    assert job.returncode == 0, job.report()
    assert "right: 2147487744" in job.outputs[0], job.report()
    assert "right: 2147487744" in job.outputs[1], job.report()


def _huge() -> None:
    hvd.init()
    rank, step = hvd.rank(), 4099
    array = np.full(HUGE, 1 + rank, np.uint8)
    marks = (np.arange(0, HUGE, step) % 191 + 20).astype(np.uint8)
    # Every piece shows its place in the array.
    array[::step] = marks if rank == 0 else 0
    assert hvd.allreduce_(array, op=hvd.Max) is array
    assert (array[::step] == marks).all()
    array[::step] = 2
    assert array.min() == array.max() == 2
    print("right:", array.size)
    hvd.shutdown()


if __name__ == "__main__":
    assert sys.argv[1:] == ["huge"]
    _huge()
