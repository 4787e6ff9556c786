"""Results of the verbs: every type, shape, operation, factor, split and process set.

They are compared with the oracle. For other results (infinities, names, ...), the case states the
expected value.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from typing import Any

import mpirun
import numpy as np
import oracle

import hororing.numpy as hvd
from conformance.calls import Call, Caller, Ranks
from conformance.players import Player
from hororing import errors

OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]
SCATTER_OPS = [hvd.Average, hvd.Sum]
NUMBERS = [dtype for dtype in oracle.DTYPES if dtype != "bool"]


class Book(Caller):
    """Collects calls that are made together; half of them get names."""

    def __init__(self, player: Player) -> None:
        super().__init__(player, mpirun.seed())
        self.rng = random.Random(mpirun.seed())
        self.calls: list[Call] = []

    def write(self, verb: str, dtype: str, shape: tuple[int, ...], **more: Any) -> None:
        """Add a call with one tensor; other arguments are random."""
        self.write_group(verb, (dtype,), (shape,), **{"grouped": False, **more})

    def write_group(
        self, verb: str, dtypes: tuple[str, ...], shapes: tuple[tuple[int, ...], ...], **more: Any
    ) -> None:
        step, rng = len(self.calls), self.rng
        drawn = {
            "members": self.world,
            "name": f"{verb}.{step}" if rng.random() < 0.5 else None,
            "in_place": verb in ("allreduce", "broadcast") and rng.random() < 0.3,
            "blocking": rng.random() < 0.5,
            "grouped": True,
        }
        self.calls.append(Call(step, verb, dtypes=dtypes, shapes=shapes, **{**drawn, **more}))

    def play(self) -> None:
        """Make the calls of this rank; in graphs, which are slow, only half of them."""
        calls = self.calls
        if self.player.traced:
            calls = [call for call in calls if self.rng.random() < 0.5]
        self.together([call for call in calls if self.rank in call.members])
        self.check_bits()


@contextlib.contextmanager
def book(player: Player) -> Iterator[Book]:
    """Yield a Book whose calls are made at the end."""
    calls = Book(player)
    yield calls
    calls.play()


def ops_of(dtype: str) -> list[int]:
    return [op for op in OPS if dtype != "bool" or op != hvd.Average]


def case_every_type_and_operation(player: Player) -> None:
    with book(player) as calls:
        shapes = [(), (3, 0), (1,), (hvd.size() + 1,), (5, 13), (1031,)]
        for dtype in oracle.DTYPES:
            for number, op in enumerate(ops_of(dtype)):
                for shape in shapes[number % 2 :: 2]:
                    calls.write("allreduce", dtype, shape, op=op)


def case_counts_around_the_number_of_ranks(player: Player) -> None:
    size = hvd.size()
    with book(player) as calls:
        for count in sorted({0, 1, size - 1, size, size + 1, 15, 16, 17, 8191}):
            calls.write("allreduce", "int16", (count,))
            calls.write("reducescatter", "int32", (count, 2))
            calls.write("broadcast", "int8", (count,), root=size - 1)


def case_factors(player: Player) -> None:
    factors = [(0.5, 1.0), (1.0, 0.3), (-1.75, 1 / 3), (0.0, 2.0), (3.0, 0.1)]
    with book(player) as calls:
        for dtype, (number, pair) in itertools.product(NUMBERS, enumerate(factors)):
            calls.write("allreduce", dtype, (13, 5), op=calls.rng.choice(OPS), factors=pair)
            op = SCATTER_OPS[number % 2]
            calls.write("reducescatter", dtype, (7, 5), op=op, factors=pair)
        calls.write_group("allreduce", tuple(NUMBERS), ((4,),) * len(NUMBERS), factors=(0.5, 3.0))


def case_adasum(player: Player) -> None:
    if hvd.size() & (hvd.size() - 1):
        with player.refuses("Adasum", NotImplementedError, "a power of two, not 3"):
            player.run(lambda: player.hvd.allreduce(player.ones(2), op=hvd.Adasum))
        return
    with book(player) as calls:
        for dtype, shape in itertools.product(oracle.FLOATS, [(), (0,), (5, 13), (1031,)]):
            calls.write("allreduce", dtype, shape, op=hvd.Adasum)
        floats = tuple(oracle.FLOATS)
        calls.write_group("allreduce", floats, ((3, 2),) * len(floats), op=hvd.Adasum)


def case_groups_of_mixed_types(player: Player) -> None:
    everything = list(itertools.product(NUMBERS, [(3,), (0, 4), (2, 33)]))
    dtypes, shapes = (tuple(each) for each in zip(*everything, strict=True))
    with book(player) as calls:
        for op in OPS:
            calls.write_group("allreduce", (*dtypes, "int8"), (*shapes, ()), op=op)
        for op in SCATTER_OPS:
            calls.write_group("reducescatter", dtypes, shapes, op=op)
        calls.write_group("allreduce", ("bool", "float32"), ((12,), (3,)), op=hvd.Sum)
        rows = tuple(
            tuple((member + number) % 3 for number in range(len(dtypes))) for member in calls.world
        )
        calls.write_group("allgather", dtypes, shapes, rows=rows)
        calls.write_group("allgather", ("bool",), ((1, 2),), rows=((2,),) * hvd.size())


def case_a_broadcast_from_every_root(player: Player) -> None:
    with book(player) as calls:
        for root, dtype in itertools.product(range(hvd.size()), oracle.DTYPES):
            for shape in calls.rng.sample([(), (1,), (0,), (3, 0), (7, 5), (3000,)], 3):
                calls.write("broadcast", dtype, shape, root=root)


def case_ragged_allgathers(player: Player) -> None:
    size = hvd.size()
    rows_by_rank = [
        lambda rank: rank,  # none on rank 0
        lambda rank: 0,  # none anywhere
        lambda rank: 5 if rank == size - 1 else 0,  # only on one rank
        lambda rank: 3,
        lambda rank: (size - rank) * 211,
    ]
    with book(player) as calls:
        for dtype, rows in itertools.product(oracle.DTYPES, rows_by_rank):
            tail = calls.rng.choice([(), (4,), (2, 0), (1, 3, 2)])
            by_rank = tuple((rows(rank),) for rank in range(size))
            calls.write("allgather", dtype, (0, *tail), rows=by_rank)


def case_alltoalls_with_and_without_splits(player: Player) -> None:
    """Some ranks may pass no splits, and splits need not use all rows."""
    size = hvd.size()
    with book(player) as calls:
        for dtype, each in itertools.product(oracle.DTYPES, (0, 1, 3)):
            tail = calls.rng.choice([(), (4,), (2, 0)])
            for with_splits in (0.0, 0.7, 1.0):
                drawn = [
                    tuple(calls.rng.randint(0, each) for _ in range(size))
                    if calls.rng.random() < with_splits
                    else None
                    for _ in range(size)
                ]
                calls.write("alltoall", dtype, (size * each, *tail), splits=tuple(drawn))


def case_reducescatters_of_uneven_rows(player: Player) -> None:
    with book(player) as calls:
        for rows, dtype in itertools.product(range(2 * hvd.size() + 2), NUMBERS):
            calls.write("reducescatter", dtype, (rows, 3), op=calls.rng.choice(SCATTER_OPS))
        calls.write("reducescatter", "bool", (hvd.size(),), op=hvd.Sum)


def case_tensors_of_several_blocks(player: Player) -> None:
    """Larger than the shared-memory slots and the ring's segments."""
    several_blocks(player)


def several_blocks(player: Player, part: int = 1) -> None:
    """Play tensors of several blocks, or the given fraction of each.

    Types do not share a batch, which may be reduced in another way.
    """
    for dtype, count in (("float32", 1_234_577), ("int16", 700_001), ("float16", 262_147)):
        with book(player) as calls:
            calls.write("allreduce", dtype, (count // part,))
    with book(player) as calls:
        rows = tuple((40_000 // part + rank,) for rank in calls.world)
        calls.write("allgather", "int32", (0, 7), rows=rows)
        calls.write("broadcast", "int64", (500_000 // part,), root=hvd.size() - 1)
        calls.write("reducescatter", "float32", (300_001 // part, 2))


def case_every_verb_in_every_process_set(player: Player) -> None:
    """Only members make the calls."""
    ranks = range(hvd.size())
    for count in range(1, hvd.size()):
        for members in itertools.combinations(ranks, count):
            process_set = hvd.add_process_set(members)
            with book(player) as calls:
                calls.sets[members] = process_set
                write_every_verb(calls, members)
            if process_set.included():
                refused_in(process_set, player)
            assert hvd.remove_process_set(process_set)


def refused_in(process_set: hvd.ProcessSet, player: Player) -> None:
    outside = next(rank for rank in range(hvd.size()) if rank not in process_set.ranks)
    with player.refuses("root", ValueError, f"root rank {outside}", "is not a member"):
        player.run(
            lambda: player.hvd.broadcast(player.ones(2), outside, process_set=process_set)
        )  # fmt: skip
    with player.refuses("Adasum", NotImplementedError, "not in a process set"):
        player.run(
            lambda: player.hvd.allreduce(player.ones(2), op=hvd.Adasum, process_set=process_set)
        )


def write_every_verb(calls: Book, members: Ranks) -> None:
    size = len(members)
    calls.write("allreduce", "float32", (3, 5), members=members)
    calls.write("allreduce", "bfloat16", (5,), members=members, op=hvd.Average)
    calls.write("allreduce", "int8", (5,), members=members, op=hvd.Max)
    calls.write_group("allreduce", ("int32", "float64"), ((2,), ()), members=members)
    rows = tuple((place, 2) for place in range(size))
    calls.write("allgather", "int16", (0, 2), members=members, rows=tuple(r[:1] for r in rows))
    calls.write_group("allgather", ("bool", "int8"), ((0,), (0, 3)), members=members, rows=rows)
    for root in members:  # a rank of the job, not of the set
        calls.write("broadcast", "uint8", (7,), members=members, root=root)
    for splits in ((None,) * size, ((1,) * size,) * size):
        calls.write("alltoall", "int64", (2 * size, 3), members=members, splits=splits)
    calls.write("reducescatter", "float32", (2 * size + 1, 2), members=members)
    calls.write_group(
        "reducescatter", ("int32", "float16"), ((size + 1,), (3, 2)), members=members
    )  # fmt: skip


def case_infinities_and_not_a_number_travel(player: Player) -> None:
    size, rank = hvd.size(), hvd.rank()
    specials = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
    dtypes = [oracle.type_of(name) for name in oracle.FLOATS]
    for op in OPS:
        results = player.run(
            lambda *tensors, op=op: player.hvd.grouped_allreduce(list(tensors), op=op),
            *(np.roll(specials, rank).astype(dtype) for dtype in dtypes),
        )
        function = {hvd.Min: np.minimum, hvd.Max: np.maximum, hvd.Product: np.multiply}
        with np.errstate(invalid="ignore"):
            parts = [np.roll(specials, each) for each in range(size)]
            wanted = parts[0]
            for part in parts[1:]:
                wanted = function.get(op, np.add)(wanted, part)
            wanted = wanted / size if op == hvd.Average else wanted
        for result, dtype in zip(results, dtypes, strict=True):
            assert result.dtype == dtype
            exact = wanted.astype(dtype).astype(np.float64)
            np.testing.assert_array_equal(result.astype(np.float64), exact)


def case_averages_of_integers_truncate_toward_zero(player: Player) -> None:
    size, rank = hvd.size(), hvd.rank()
    dtypes = [np.dtype(name) for name in ("int8", "int16", "int32", "int64")]
    values = [-5, -1, 0, 1, 5, 7, -7, 100, -128]
    ends = [[np.iinfo(dtype).min, np.iinfo(dtype).max] for dtype in dtypes]
    inputs = [
        np.array((values if rank == size - 1 else [0] * len(values)) + end, dtype)
        for dtype, end in zip(dtypes, ends, strict=True)
    ]
    results = player.run(lambda *t: player.hvd.grouped_allreduce(list(t)), *inputs)
    for result, end in zip(results, ends, strict=True):
        # Sums beyond the type's range do not wrap around on their way to the average.
        assert result.tolist() == [int(value / size) for value in values] + end
    sums = np.array([6, 10, 14]) * (rank == 0)
    scaled = player.run(
        lambda t, u: [
            player.hvd.allreduce(t, op=hvd.Sum, postscale_factor=0.3),
            player.hvd.allreduce(u, op=hvd.Sum, prescale_factor=0.5),
        ],
        sums, np.array([3, 5, -7]),
    )  # fmt: skip
    assert scaled[0].tolist() == [1, 3, 4]
    assert scaled[1].tolist() == [size, 2 * size, -3 * size]


def case_short_floats_are_rounded_once(player: Player) -> None:
    size = hvd.size()
    for dtype, unit in ((oracle.type_of("float16"), 2048.0), (oracle.type_of("bfloat16"), 256.0)):
        # Added one by one in the type itself, each 1 would be lost.
        mine = np.full(40, unit if hvd.rank() == 0 else 1.0).astype(dtype)
        total = player.run(lambda t: player.hvd.allreduce(t, op=hvd.Sum), mine)
        assert total.tolist() == np.full(40, unit + size - 1).astype(dtype).tolist()
    # A sum beyond the range does not overflow on its way to the average.
    large = np.full(9, 60000, np.float16)
    mean, total = player.run(
        lambda t: [player.hvd.allreduce(t), player.hvd.allreduce(t, op=hvd.Sum)], large
    )
    assert mean.tolist() == [60000] * 9
    assert total.tolist() == [60000 if size == 1 else np.inf] * 9


def case_compression(player: Player) -> None:
    if not hasattr(player.hvd, "Compression"):
        return
    verbs, compressors = player.hvd, player.hvd.Compression
    size, rank = hvd.size(), hvd.rank()
    for name, wire in (("none", "float64"), ("fp16", "float16"), ("bf16", "bfloat16")):
        if not hasattr(compressors, name):
            continue
        of_ranks = [np.array([1.0009765625 + r, 70000.0, 1e-9] * size) for r in range(size)]
        with np.errstate(over="ignore"):
            sent = [each.astype(oracle.type_of(wire)) for each in of_ranks]
        whole = np.arange(100_000, 100_003)
        more = {"compression": getattr(compressors, name)}
        results = player.run(
            lambda t, i, more=more: [
                verbs.allreduce(t, **more),
                verbs.grouped_allreduce([i, t], **more)[1],
                verbs.reducescatter(t, **more),
                verbs.grouped_reducescatter([t, i], **more)[0],
                verbs.allreduce(i, op=hvd.Max, **more),
            ],
            of_ranks[rank], whole,
        )  # fmt: skip
        assert results[-1].tolist() == whole.tolist()
        with np.errstate(over="ignore"):
            wanted = np.mean([each.astype(np.float64) for each in sent], 0)
        unit = {"float64": 1e-15, "float16": 2.0**-10, "bfloat16": 2.0**-7}[wire]
        mine = slice(3 * rank, 3 * rank + 3)
        for result, want in zip(
            results[:-1], [wanted, wanted, wanted[mine], wanted[mine]], strict=True
        ):
            assert result.dtype == np.float64
            np.testing.assert_allclose(result, want, rtol=unit, atol=2.0**-24)
    for bad in (object(), None, "fp16"):
        with player.refuses("compression", TypeError, "compression="):
            player.run(lambda bad=bad: verbs.allreduce(player.ones(2), compression=bad))


def case_names_of_all_kinds(player: Player) -> None:
    size = hvd.size()
    for name in ("gewöhnlich ☃", "a" * 5000, "x'y\"z\n\t", "allreduce.noname.1", "a/b:0"):
        total = player.run(
            lambda name=name: player.hvd.allreduce(player.ones(2), name=name, op=hvd.Sum)
        )
        assert total.tolist() == [size] * 2
    for turn in range(6):  # the same name repeatedly, with several shapes
        mine = np.full(1 + turn // 3, hvd.rank())
        most = player.run(lambda t: player.hvd.allreduce(t, name="again", op=hvd.Max), mine)
        assert most.tolist() == [size - 1] * len(mine)
        rows = player.run(lambda t: player.hvd.allgather(t, name="again"), mine)
        assert rows.tolist() == np.repeat(range(size), len(mine)).tolist()


def case_named_calls_in_any_order(player: Player) -> None:
    """As handles in one thread, in one graph, or as blocking calls in several threads."""
    for turn in range(3):
        calls = Book(player)
        for number in range(12):
            name, dtype = f"any.{turn}.{number}", calls.rng.choice(NUMBERS)
            shape = (calls.rng.choice([1, 3, 300]), 2)
            verb = ["allreduce", "broadcast", "allgather", "reducescatter"][number % 4]
            rows = ((shape[0],),) * hvd.size()
            calls.write(verb, dtype, shape, name=name, rows=rows, blocking=False)
        order = calls.own.sample(calls.calls, len(calls.calls))
        if player.asynchronous or player.traced:
            calls.together(order)
            calls.check_bits()
            continue
        failures: list[BaseException] = []

        def play(call: Call, calls: Book = calls, failures: list[Any] = failures) -> None:
            try:
                calls.together([call])
            except BaseException as failure:
                failures.append(failure)

        threads = [threading.Thread(target=play, args=(call,)) for call in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
        assert not failures, failures
        calls.check_bits()


def case_one_tensor_is_a_group_of_its_rows(player: Player) -> None:
    rows = player.run(
        lambda t: player.hvd.grouped_allreduce(t), np.arange(6.0, dtype=np.float32).reshape(3, 2)
    )
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]


def case_uneven_data(player: Player) -> None:
    """Every choice of ranks joins early, and the others go on."""
    size, rank = hvd.size(), hvd.rank()
    assert player.join() in range(size)
    for count in range(1, size):
        for joined in itertools.combinations(range(size), count):
            calls = Book(player)
            ops = OPS if size & (size - 1) else [*OPS, hvd.Adasum]
            for op in ops:
                for dtype in calls.rng.sample(oracle.FLOATS if op == hvd.Adasum else NUMBERS, 3):
                    calls.write("allreduce", dtype, (5, 7), op=op)
            for verb in ("allgather", "broadcast", "alltoall", "reducescatter"):
                calls.write(
                    verb, "float32", (size, 2), refused=True, rows=((size,),) * size,
                    splits=(None,) * size, name=f"refused.{verb}",
                )  # fmt: skip
            if rank not in joined:
                calls.together(calls.calls, joined)
                with player.refuses("join", errors.MismatchError, "is not supported with join"):
                    player.run(lambda: player.hvd.allgather(player.ones(2), name="refused"))
            assert player.join() not in joined
            calls.check_bits()
    calls = Book(player)
    calls.write("allgather", "int32", (1, 2), rows=((1,),) * size, name="refused.allgather")
    calls.play()
