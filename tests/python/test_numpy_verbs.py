"""The verbs on NumPy arrays, on 1 to 4 ranks, against a NumPy oracle.

Every rank knows every rank's arrays, since they are made from the seed and the rank, and so
computes what it ought to get by itself. On one host the contract is bits: sums are made in the
order of the ranks. Over MPI the order is free, so sums of floats get a tolerance there.
"""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mpirun
import numpy as np
import pytest

import hororing.numpy as hvd
from hororing import errors

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None

Array = np.ndarray[Any, np.dtype[Any]]

INTEGERS = [np.dtype(n) for n in ("uint8", "int8", "uint16", "int16", "int32", "int64")]
SHORT_FLOATS = [np.dtype("float16"), *([] if bfloat16 is None else [np.dtype(bfloat16)])]
FLOATS = [*SHORT_FLOATS, np.dtype("float32"), np.dtype("float64")]
BOOL = np.dtype("bool")
DTYPES = [*INTEGERS, *FLOATS, BOOL]
NUMBERS = [*INTEGERS, *FLOATS]
OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
HUGE = 2**31 + 4096

# ---------------------------------------------------------------------------------------------
# What every rank ought to get


def expected(arrays: list[Array], op: int, prescale: float = 1.0, postscale: float = 1.0) -> Array:
    """The reduction of the arrays of all ranks."""
    dtype = arrays[0].dtype
    if dtype == BOOL:
        return functools.reduce(
            np.logical_or if op in (hvd.Sum, hvd.Max) else np.logical_and, arrays
        )
    if dtype in INTEGERS:
        return _expected_integers(arrays, op, prescale, postscale)
    wide = np.dtype("float32") if dtype in SHORT_FLOATS else dtype
    with np.errstate(all="ignore"):
        scaled = [array.astype(wide) * wide.type(prescale) for array in arrays]
        total = functools.reduce(_function(op), scaled)
        if op == hvd.Average:
            total = total / wide.type(len(arrays))
        return np.asarray(total * wide.type(postscale)).astype(dtype)


def _function(op: int) -> Callable[[Any, Any], Any]:
    return {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}.get(op, np.add)


def _expected_integers(arrays: list[Array], op: int, prescale: float, postscale: float) -> Array:
    """With Python's integers, which have no end."""
    dtype, shape = arrays[0].dtype, arrays[0].shape
    bits, low = 8 * dtype.itemsize, int(np.iinfo(dtype).min)

    def scaled(value: int, factor: float) -> int:
        if factor == 1.0:
            return value
        return min(max(int(float(value) * factor), low), low + 2**bits - 1)

    results = []
    for values in zip(*(array.ravel().tolist() for array in arrays), strict=True):
        values = [scaled(value, prescale) for value in values]
        if op == hvd.Average:
            total = sum(values)
            result = abs(total) // len(values) * (-1 if total < 0 else 1)
        elif op in (hvd.Min, hvd.Max):
            result = (min if op == hvd.Min else max)(values)
        else:
            result = sum(values) if op == hvd.Sum else functools.reduce(int.__mul__, values)
            result = (result - low) % 2**bits + low
        results.append(scaled(result, postscale))
    return np.array(results, dtype=dtype).reshape(shape)


def agree(result: Any, wanted: Array, largest: float = 0.0) -> None:
    """Fail unless `result` is `wanted`, in type, shape and value.

    `largest` is the greatest magnitude a partial result may have had. Over MPI each of the
    fewer than `size` roundings then costs half a unit of it in the accumulation type, and the
    last one half a unit of the result in its own.
    """
    assert isinstance(result, np.ndarray)
    assert result.dtype == wanted.dtype
    assert result.shape == wanted.shape, f"{result.shape} instead of {wanted.shape}"
    if largest and wanted.dtype in FLOATS and os.environ.get("HORORING_TRANSPORT") == "mpi":
        own = float(np.finfo(wanted.dtype).eps) if wanted.dtype not in SHORT_FLOATS else 2.0**-7
        wide = 2.0**-52 if wanted.dtype == np.float64 else 2.0**-23
        np.testing.assert_allclose(
            result.astype(np.float64),
            wanted.astype(np.float64),
            rtol=own,
            atol=hvd.size() * wide * largest,
        )
        return
    # Not-a-number equals itself here, and the zeros are equal.
    np.testing.assert_array_equal(
        result.astype(np.float64) if wanted.dtype in SHORT_FLOATS else result,
        wanted.astype(np.float64) if wanted.dtype in SHORT_FLOATS else wanted,
    )


def array_of(rank: int, dtype: np.dtype[Any], shape: Any, *key: int) -> Array:
    """What `rank` passes: whole ranges of integers, multiples of 1/8 up to 4."""
    return np.asarray(_values_of(rank, dtype, shape, *key))  # no scalars


def _values_of(rank: int, dtype: np.dtype[Any], shape: Any, *key: int) -> Any:
    rng = np.random.default_rng([mpirun.seed(), rank, *key])
    if dtype == BOOL:
        return rng.integers(0, 3, shape) > 0
    if dtype in INTEGERS:
        limits = np.iinfo(dtype)
        values = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        edges = np.array([limits.min, limits.max, 0], dtype)
        return np.where(rng.random(shape) < 0.1, rng.choice(edges, shape), values)
    return (rng.integers(-32, 33, shape) / 8).astype(dtype)


def arrays_of(dtype: np.dtype[Any], shape: Any, *key: int) -> list[Array]:
    """What all ranks pass."""
    return [array_of(rank, dtype, shape, *key) for rank in range(hvd.size())]


def ops_of(dtype: np.dtype[Any]) -> list[int]:
    return [op for op in OPS if dtype != BOOL or op != hvd.Average]


def wait_until(true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline, f"{what} did not happen"
        time.sleep(0)


@contextlib.contextmanager
def raises(kind: type[BaseException], *texts: str) -> Iterator[None]:
    with pytest.raises(kind) as caught:
        yield
    for text in texts:
        assert text in str(caught.value), f"{text!r} is not in: {caught.value}"


# ---------------------------------------------------------------------------------------------
# Cases, on every rank


def case_before_init_every_verb_says_so() -> None:
    one = np.ones(3)
    for call in (
        lambda: hvd.allreduce(one),
        lambda: hvd.allreduce_(one),
        lambda: hvd.allreduce_async(one),
        lambda: hvd.allreduce_async_(one),
        lambda: hvd.grouped_allreduce([one]),
        lambda: hvd.grouped_allreduce_([one]),
        lambda: hvd.grouped_allreduce_async([one]),
        lambda: hvd.grouped_allreduce_async_([one]),
        lambda: hvd.broadcast(one, 0),
        lambda: hvd.broadcast_(one, 0),
        lambda: hvd.broadcast_async(one, 0),
        lambda: hvd.broadcast_async_(one, 0),
        lambda: hvd.allgather(one),
        lambda: hvd.allgather_async(one),
        lambda: hvd.grouped_allgather([one]),
        lambda: hvd.grouped_allgather_async([one]),
        lambda: hvd.broadcast_object(1),
        lambda: hvd.allgather_object(1),
        hvd.barrier,
        hvd.rank,
    ):
        with raises(errors.NotInitializedError, "has not been initialized; use hvd.init()."):
            call()
    with raises(ValueError, "there is no handle 1"):
        hvd.synchronize(1)
    with raises(ValueError, "there is no handle 1"):
        hvd.poll(1)


def case_init() -> None:
    hvd.init()
    assert hvd.size() == int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    assert hvd.rank() == int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


def case_every_type_and_operation_agrees_with_numpy() -> None:
    size, rank = hvd.size(), hvd.rank()
    counts = [1, size + 1, 67, 1031]
    for key, (dtype, count) in enumerate(itertools.product(DTYPES, counts)):
        arrays = arrays_of(dtype, count, key)
        for op in ops_of(dtype):
            wanted = expected(arrays, op)
            largest = 4.0 ** (size if op == hvd.Product else 1) * size
            agree(hvd.allreduce(arrays[rank], op=op), wanted, largest)
            mine = arrays[rank].copy()
            assert hvd.allreduce_(mine, op=op, name=f"{dtype}.{op}") is mine
            agree(mine, wanted, largest)


def case_counts_around_the_number_of_ranks() -> None:
    for count in sorted({0, 1, hvd.size() - 1, hvd.size(), hvd.size() + 1, 15, 16, 17, 8191}):
        arrays = arrays_of(np.dtype("int16"), count, count)
        agree(hvd.allreduce(arrays[hvd.rank()], op=hvd.Sum), expected(arrays, hvd.Sum))


def case_factors_agree_with_numpy() -> None:
    factors = [(0.5, 1.0), (1.0, 0.3), (-1.75, 1 / 3), (0.0, 2.0), (3, np.float32(0.1))]
    for key, (dtype, (pre, post)) in enumerate(itertools.product(NUMBERS, factors)):
        arrays = arrays_of(dtype, 130, 100, key)
        for op in ops_of(dtype):
            result = hvd.allreduce(
                arrays[hvd.rank()], op=op, prescale_factor=pre, postscale_factor=post
            )
            bound = 12.0 ** (hvd.size() if op == hvd.Product else 1) * hvd.size()
            agree(result, expected(arrays, op, float(pre), float(post)), 2 * bound)
    sums = np.array([6, 10, 14]) * (hvd.rank() == 0)
    assert hvd.allreduce(sums, op=hvd.Sum, postscale_factor=0.3).tolist() == [1, 3, 4]
    halves = hvd.allreduce(np.array([3, 5, -7]), op=hvd.Sum, prescale_factor=0.5)
    assert halves.tolist() == [hvd.size(), 2 * hvd.size(), -3 * hvd.size()]
    with raises(ValueError, "bool cannot be scaled"):
        hvd.allreduce(np.ones(2, BOOL), op=hvd.Sum, prescale_factor=2.0)
    for bad in (float("nan"), float("inf")):
        with raises(ValueError, "must be finite"):
            hvd.allreduce(np.ones(2), prescale_factor=bad)
        with raises(ValueError, "must be finite"):
            hvd.allreduce(np.ones(2), postscale_factor=bad)


def case_an_average_of_bool_is_refused() -> None:
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with raises(ValueError, "Average of bool is not defined"):
            call(np.ones(2, BOOL))


def case_averages_of_integers_truncate_toward_zero() -> None:
    size, rank = hvd.size(), hvd.rank()
    for dtype in (np.int8, np.int16, np.int32, np.int64):
        # One rank holds the value, the others nothing.
        values = [-5, -1, 0, 1, 5, 7, -7, 100, -128]
        mine = np.array(values if rank == size - 1 else [0] * len(values), dtype)
        assert hvd.allreduce(mine).tolist() == [int(value / size) for value in values]
        # Sums beyond the type's range do not wrap on their way to the average.
        for end in (np.iinfo(dtype).min, np.iinfo(dtype).max):
            assert hvd.allreduce(np.full(3, end, dtype)).tolist() == [end] * 3
    multiples = np.arange(1000, dtype=np.int32) * size
    assert (hvd.allreduce(multiples if rank == 0 else multiples * 0) == np.arange(1000)).all()


def case_short_floats_are_rounded_once() -> None:
    rank = hvd.rank()
    for dtype in SHORT_FLOATS:
        unit = float(2 / np.finfo(np.float16).eps) if dtype == np.float16 else 256.0
        # Added one by one in the type itself, each 1 would be lost.
        arrays = [np.full(40, unit if r == 0 else 1.0).astype(dtype) for r in range(hvd.size())]
        total = hvd.allreduce(arrays[rank], op=hvd.Sum)
        agree(total, np.full(40, unit + hvd.size() - 1).astype(np.float32).astype(dtype))
    # A sum beyond the range does not overflow on its way to the average.
    assert hvd.allreduce(np.full(9, 60000, np.float16)).tolist() == [60000] * 9
    sums = hvd.allreduce(np.full(9, 60000, np.float16), op=hvd.Sum)
    assert sums.tolist() == [60000 if hvd.size() == 1 else np.inf] * 9


def case_infinities_and_not_a_number_travel() -> None:
    size, rank = hvd.size(), hvd.rank()
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    for dtype in FLOATS:
        arrays = [np.roll(specials, r).astype(dtype) for r in range(size)]
        for op in OPS:
            agree(hvd.allreduce(arrays[rank], op=op), expected(arrays, op))


def case_all_ranks_get_the_same_bits() -> None:
    rng = np.random.default_rng([mpirun.seed(), 7, hvd.rank()])
    for count, dtype in itertools.product((5, 4097, 70001), FLOATS):
        scale = np.exp(rng.uniform(-9, 9, count))
        mine = (rng.standard_normal(count) * scale).astype(dtype)
        for op in (hvd.Average, hvd.Sum, hvd.Product):
            result = hvd.allreduce(mine, op=op, prescale_factor=1.1, postscale_factor=0.7)
            bits = np.frombuffer(result.tobytes(), np.uint8)[np.newaxis]
            everywhere = hvd.allgather(bits)
            assert (everywhere == bits).all(), f"{dtype} {op}"


def case_arrays_of_several_blocks() -> None:
    """More than the shared-memory slots and the ring's segments take at once."""
    size, rank = hvd.size(), hvd.rank()
    for dtype, count in (("float32", 1_234_577), ("int16", 700_001), ("float16", 262_147)):
        arrays = arrays_of(np.dtype(dtype), count, 11)
        with np.errstate(over="ignore"):
            wide = functools.reduce(np.add, [a.astype(np.float32) for a in arrays])
            wanted = functools.reduce(np.add, arrays) if dtype == "int16" else wide.astype(dtype)
        agree(hvd.allreduce(arrays[rank], op=hvd.Sum), wanted)
        assert (hvd.allreduce_(arrays[rank].copy(), op=hvd.Sum) == wanted).all()
    rows = hvd.allgather(np.full((40_000 + rank, 7), rank, np.int32))
    assert rows.shape == (sum(40_000 + r for r in range(size)), 7)
    assert (rows == np.repeat(np.arange(size), [40_000 + r for r in range(size)])[:, None]).all()
    sent = hvd.broadcast(np.arange(500_000) * (rank + 1), size - 1)
    assert (sent == np.arange(500_000) * size).all()


def case_inputs_stay_as_they_were() -> None:
    rank, root = hvd.rank(), hvd.size() - 1
    mine = array_of(rank, np.dtype("float32"), 100, 12)
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
        result[...] = 77  # the caller's own
    assert (mine == before).all()


def case_async_in_any_order_on_every_rank() -> None:
    size, rank = hvd.size(), hvd.rank()
    plan = random.Random(mpirun.seed())
    mine = random.Random(mpirun.seed() + 1 + rank)
    for turn in range(6):
        jobs: list[tuple[Callable[[], int], Array]] = []
        for number in range(40):
            dtype, shape = plan.choice(DTYPES), (plan.randrange(5), plan.choice([1, 3, 300]))
            arrays = arrays_of(dtype, shape, 13, turn, number)
            name, kind = f"any order.{number}", plan.randrange(4)
            op, root = plan.choice(ops_of(dtype)), plan.randrange(size)
            if kind == 0:
                start = functools.partial(hvd.allreduce_async, arrays[rank], None, name, op)
                wanted = expected(arrays, op)
            elif kind == 1:
                start = functools.partial(hvd.allreduce_async_, arrays[rank].copy(), None, name, op)
                wanted = expected(arrays, op)
            elif kind == 2:
                start = functools.partial(hvd.broadcast_async_, arrays[rank].copy(), root, name)
                wanted = arrays[root]
            else:
                start = functools.partial(hvd.allgather_async, arrays[rank], name)
                wanted = np.concatenate(arrays)
            jobs.append((start, wanted))
        mine.shuffle(jobs)
        running = [(start(), wanted) for start, wanted in jobs]
        mine.shuffle(running)
        for handle, wanted in running:
            agree(hvd.synchronize(handle), wanted, 4.0**size * size)


def case_groups_of_mixed_types() -> None:
    size, rank = hvd.size(), hvd.rank()
    members = [(dtype, shape) for dtype in NUMBERS for shape in ((3,), (), (0, 4), (2, 33))]
    arrays = [arrays_of(dtype, shape, 14, k) for k, (dtype, shape) in enumerate(members)]
    wanted = {op: [expected(each, op) for each in arrays] for op in (hvd.Average, hvd.Min)}
    for op, results in wanted.items():
        for made in (
            hvd.grouped_allreduce([a[rank] for a in arrays], op=op),
            hvd.grouped_allreduce((a[rank] for a in arrays), op=op, name="from a generator"),
            hvd.synchronize(hvd.grouped_allreduce_async([a[rank] for a in arrays], op=op)),
        ):
            assert type(made) is list
            for result, want in zip(made, results, strict=True):
                agree(result, want, 4.0 * size)
        for verb in (
            hvd.grouped_allreduce_,
            lambda *a, **k: hvd.synchronize(hvd.grouped_allreduce_async_(*a, **k)),
        ):
            mine = [a[rank].copy() for a in arrays]
            made = verb(mine, op=op)
            assert type(made) is tuple
            for result, given, want in zip(made, mine, results, strict=True):
                assert result is given
                agree(result, want, 4.0 * size)
    bools = arrays_of(BOOL, 12, 15)
    both = hvd.grouped_allreduce([bools[rank], arrays[0][rank]], op=hvd.Sum)
    agree(both[0], expected(bools, hvd.Sum))
    agree(both[1], expected(arrays[0], hvd.Sum))
    rows = hvd.grouped_allreduce(np.arange(6.0).reshape(3, 2))  # one array: its rows
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allgather):
        with raises(ValueError, "there are no tensors"):
            call([])


def case_a_group_waits_for_all_of_its_members_ranks() -> None:
    """Groups, single arrays and unnamed calls, submitted in another order on every rank."""
    rank = hvd.rank()
    mine = random.Random(mpirun.seed() + 50 + rank)
    for turn in range(4):
        arrays = arrays_of(np.dtype("float32"), 60, 16, turn)
        parts = [np.split(array, 3) for array in arrays]
        starts = [
            lambda t=turn, p=parts[rank]: hvd.grouped_allreduce_async(p, op=hvd.Sum, name=f"g{t}"),
            lambda t=turn, a=arrays[rank]: hvd.allreduce_async(a, op=hvd.Sum, name=f"s{t}"),
            lambda t=turn, p=parts[rank]: hvd.grouped_allgather_async(p, name=f"a{t}"),
        ]
        order = mine.sample(range(3), 3)
        handles = {which: starts[which]() for which in order}
        total = expected(arrays, hvd.Sum)
        agree(hvd.synchronize(handles[1]), total)
        agree(np.concatenate(hvd.synchronize(handles[0])), total)
        gathered = hvd.synchronize(handles[2])
        assert type(gathered) is tuple
        for index, each in enumerate(gathered):
            agree(each, np.concatenate([p[index] for p in parts]))


def case_a_broadcast_from_every_root() -> None:
    size, rank = hvd.size(), hvd.rank()
    for root, (key, dtype) in itertools.product(range(size), enumerate(DTYPES)):
        for shape in ((), (1,), (0,), (3, 0), (7, 5), (3000,)):
            arrays = arrays_of(dtype, shape, 17, key)
            agree(hvd.broadcast(arrays[rank], root), arrays[root])
            mine = arrays[rank].copy()
            assert hvd.broadcast_(mine, root, name="into itself") is mine
            agree(mine, arrays[root])
    for verb in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
        for root in (-1, size, 7):
            with raises(ValueError, f"root rank {root} is not a rank of this job"):
                verb(np.ones(2), root)
        with pytest.raises((TypeError, ValueError, OverflowError)):
            verb(np.ones(2), "0")  # type: ignore[arg-type]


def case_ragged_allgathers() -> None:
    size, rank = hvd.size(), hvd.rank()
    rows_by_rank: list[Callable[[int], int]] = [
        lambda r: r,  # none on rank 0
        lambda r: 0,  # none anywhere
        lambda r: 5 if r == size - 1 else 0,  # of one rank only
        lambda r: 3,
        lambda r: (size - r) * 211,
    ]
    for rows, tail in itertools.product(rows_by_rank, ((), (4,), (2, 0), (1, 3, 2))):
        for key, dtype in enumerate(DTYPES):
            arrays = [array_of(r, dtype, (rows(r), *tail), 18, key) for r in range(size)]
            agree(hvd.allgather(arrays[rank]), np.concatenate(arrays))
    several = [np.full((rank + 1, 2), rank, np.int8), np.full(2 * rank, 1.5), np.zeros((0, 3))]
    made = hvd.grouped_allgather(several)
    agree(made[0], np.repeat(np.arange(size, dtype=np.int8), 2 * np.arange(1, size + 1))
          .reshape(-1, 2))  # fmt: skip
    agree(made[1], np.full(size * (size - 1), 1.5))
    agree(made[2], np.zeros((0, 3)))
    with raises(ValueError, "without dimensions cannot be gathered"):
        hvd.allgather(np.array(3.0))
    kept = hvd.allgather(np.full(1000, rank, np.int64))
    part = kept[5:9]
    del kept
    gc.collect()
    hvd.allgather(np.full(1000, 99, np.int64))  # might get the memory, if it had been freed
    assert part.tolist() == [0] * 4


def case_no_elements_and_no_dimensions() -> None:
    size, rank = hvd.size(), hvd.rank()
    for key, dtype in enumerate(DTYPES):
        for shape in ((), (0,), (0, 3), (3, 0, 2), (1, 1, 1, 1)):
            arrays = arrays_of(dtype, shape, 19, key)
            for op in ops_of(dtype):
                agree(hvd.allreduce(arrays[rank], op=op), expected(arrays, op), 4.0**size * size)
            mine = arrays[rank].copy()
            assert hvd.allreduce_(mine, op=hvd.Max) is mine
            agree(mine, expected(arrays, hvd.Max))
    agree(hvd.allreduce(np.float32(rank), op=hvd.Sum), np.array(sum(range(size)), np.float32))
    deep = np.full((1,) * 32 + (2,), rank, np.int32)
    assert hvd.allreduce(deep, op=hvd.Max).shape == deep.shape


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
        arrays = arrays_of(np.dtype(dtype), (10, 8), 20, key)
        wanted = expected([np.ascontiguousarray(view(a)) for a in arrays], hvd.Sum)
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
            assert (whole == untouched).all()  # nothing between the elements was written
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


def case_what_is_not_supported_is_refused_by_name() -> None:
    for what in ([1.0], 1.0, None, "text", (np.ones(2),)):
        with raises(TypeError, "takes NumPy arrays", type(what).__name__):
            hvd.allreduce(what)  # type: ignore[arg-type]
    for dtype in ("complex64", "uint32", "uint64", "U3", "O", "M8[s]", "i4,f4"):
        with raises(ValueError, "not supported", "bfloat16"):
            hvd.allgather(np.zeros(2, dtype))
    with raises(ValueError, "foreign byte order"):
        hvd.broadcast(np.zeros(2, np.dtype("float32").newbyteorder()), 0)
    with raises(ValueError, "supersedes average"):
        hvd.allreduce(np.ones(2), average=True, op=hvd.Sum)
    with raises(ValueError, "no reduce operation 99"):
        hvd.allreduce(np.ones(2), op=99)
    if hvd.size() != 3:  # where there is none at all
        with raises(ValueError, "Adasum of int32"):
            hvd.allreduce(np.ones(2, np.int32), op=hvd.Adasum)
    with raises(TypeError, "name must be a str"):
        hvd.allreduce(np.ones(2), name=3)  # type: ignore[arg-type]
    for name in ("", "a\0b"):
        with raises(ValueError, "name"):
            hvd.allreduce(np.ones(2), name=name)
    # One bad member: nothing of the group has been submitted.
    with raises(ValueError, "not supported"):
        hvd.grouped_allreduce([np.ones(2), np.ones(2, "c8")], name="half bad")
    hvd.grouped_allreduce([np.ones(2), np.ones(2)], name="half bad")


def case_average_is_deprecated_and_works() -> None:
    size = hvd.size()
    for average, wanted in ((True, 1.0), (False, float(size))):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert hvd.allreduce(np.ones(2), average=average).tolist() == [wanted] * 2
        (warning,) = caught
        assert warning.category is DeprecationWarning
        assert warning.filename == __file__  # blames the caller
    assert hvd.allreduce(np.full(2, hvd.rank()), op=hvd.Max).tolist() == [size - 1] * 2


def case_names_of_all_kinds() -> None:
    for name in ("gewöhnlich ☃", "a" * 5000, "\udce4", "x'y\"z\n\t", "allreduce.noname.1"):
        assert hvd.allreduce(np.ones(2), name=name, op=hvd.Sum).tolist() == [hvd.size()] * 2
    for turn in range(30):  # the same name, again and again, with another shape now and then
        array = np.full(1 + turn // 10, hvd.rank())
        assert (hvd.allreduce(array, name="again", op=hvd.Max) == hvd.size() - 1).all()
        assert len(hvd.allgather(array, name="again")) == hvd.size() * len(array)


def case_unnamed_calls_match_in_their_order() -> None:
    """Also when ranks mix verbs differently: each verb counts for itself."""
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
    """The last rank submits only when the others have tried twice."""
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
    assert hvd.poll(handle)  # asking does not use it up
    assert hvd.synchronize(handle).tolist() == [size] * 2
    for again in (hvd.synchronize, hvd.poll):
        with raises(ValueError, f"there is no handle {handle}", "synchronized before"):
            again(handle)
    for unknown in (0, -1, 10**9, 2**70):
        for call in (hvd.synchronize, hvd.poll):
            with raises(ValueError, f"there is no handle {unknown}"):
                call(unknown)
    # It stays pending until the last rank comes.
    if size > 1:
        mine = np.full(2, rank)
        late = hvd.allreduce_async(mine, op=hvd.Sum, name="late") if rank < size - 1 else 0
        hvd.barrier()
        if late:
            assert not hvd.poll(late)
        hvd.barrier()
        late = late or hvd.allreduce_async(mine, op=hvd.Sum, name="late")
        assert hvd.synchronize(late).tolist() == [sum(range(size))] * 2
    # Results wait for those who come late to them, in whatever order.
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
    """Signs outside the library: a rank that is through finds the file of every other."""
    folder: list[str] = []
    if hvd.rank() == 0:
        folder = [tempfile.mkdtemp()]
    signs = Path(hvd.broadcast_object(folder)[0])
    mine = random.Random(mpirun.seed() + hvd.rank())
    for turn in range(25):
        sum(range(mine.randrange(100_000)))  # come at different times
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


def case_many_threads_submit_at_once() -> None:
    failures: list[BaseException] = []

    def play(which: int) -> None:
        try:
            for turn in range(20):
                mine = np.full(which * 100 + 1, hvd.rank() + which)
                result = hvd.allreduce(mine, name=f"thread.{which}.{turn}", op=hvd.Max)
                assert (result == hvd.size() - 1 + which).all()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=play, args=(which,)) for which in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert failures == []


def case_whatever_hypothesis_thinks_of() -> None:
    """Rank 0 thinks; what is wrong on one rank fails on all, so that they shrink it together."""
    import hypothesis as h
    from hypothesis import strategies as st

    size, rank = hvd.size(), hvd.rank()

    def play(steps: list[tuple[int, int, tuple[int, ...], int, int, bool]]) -> str:
        order = list(range(len(steps)))
        random.Random(len(steps) * 31 + rank).shuffle(order)
        handles: dict[int, int] = {}
        wanted: dict[int, list[Array]] = {}
        for index in order:
            kind, type_number, shape, op_number, key, sliced = steps[index]
            dtype = DTYPES[type_number % len(DTYPES)]
            op = ops_of(dtype)[op_number % len(ops_of(dtype))]
            name = f"thought.{index}"
            arrays = arrays_of(dtype, shape, 21, key)
            if sliced and shape:
                arrays = [array[::2] for array in arrays]
            mine = arrays[rank]
            if kind == 0:
                handles[index] = hvd.allreduce_async(mine, op=op, name=name)
                wanted[index] = [expected(arrays, op)]
            elif kind == 1:
                handles[index] = hvd.allreduce_async_(mine, op=op, name=name)
                wanted[index] = [expected([a.copy() for a in arrays], op)]
            elif kind == 2:
                handles[index] = hvd.broadcast_async(mine, key % size, name=name)
                wanted[index] = [arrays[key % size].copy()]
            elif kind == 3 and shape:
                arrays = [a[: r * key % (len(a) + 1)] for r, a in enumerate(arrays)]
                handles[index] = hvd.allgather_async(arrays[rank], name=name)
                wanted[index] = [np.concatenate(arrays)]
            else:
                handles[index] = hvd.grouped_allreduce_async([mine, mine], op=op, name=name)
                wanted[index] = [expected(arrays, op)] * 2
        wrong = ""
        for index, handle in handles.items():
            try:
                made = hvd.synchronize(handle)
                made = made if isinstance(made, list) else [made]
                for result, want in zip(made, wanted[index], strict=True):
                    agree(result, want, 4.0**size * size)
            except Exception as error:
                wrong += f"rank {rank}, step {index}: {error!r}\n"
        return "".join(hvd.allgather_object(wrong, name="wrong"))

    step = st.tuples(
        st.integers(0, 4),
        st.integers(0, len(DTYPES) - 1),
        st.lists(st.sampled_from([0, 1, 2, 3, 5, 17, 260]), max_size=3)
        .map(tuple)
        .filter(lambda shape: np.prod(shape) < 20_000),
        st.integers(0, 4),
        st.integers(0, 1000),
        st.booleans(),
    )

    @h.seed(mpirun.seed())
    @h.settings(
        max_examples=40,
        database=None,
        deadline=None,
        suppress_health_check=list(h.HealthCheck),
        phases=[h.Phase.generate, h.Phase.shrink],
    )
    @h.given(st.lists(step, min_size=1, max_size=12))
    def think(steps: Any) -> None:
        wrong = play(hvd.broadcast_object(steps, name="steps"))
        assert not wrong, wrong

    if rank == 0:
        try:
            think()
        finally:
            hvd.broadcast_object(None, name="steps")
    else:
        while (steps := hvd.broadcast_object(None, name="steps")) is not None:
            play(steps)


def case_shutdown_and_init_again() -> None:
    rank, size = hvd.rank(), hvd.size()
    for turn in range(3):
        # An unnamed call that only rank 0 makes: it fails, and is forgotten with its number.
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


def case_after_shutdown_every_verb_says_so() -> None:
    hvd.shutdown()
    case_before_init_every_verb_says_so()


# ---------------------------------------------------------------------------------------------
# Tests


@functools.cache
def _job(transport: str, size: int) -> mpirun.Job:
    return mpirun.run(
        __file__,
        size,
        script=False,
        timeout_s=110,
        environment={"HORORING_TRANSPORT": transport},
    )


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize(
    ("transport", "size"), [("auto", 1), ("auto", 2), ("auto", 3), ("auto", 4), ("mpi", 3)]
)
def test_case(case: str, transport: str, size: int):
    _job(transport, size).check(case)


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


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
    # Where in the array a piece belongs can be seen from it.
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
