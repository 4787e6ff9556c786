"""Uneven data: ranks join, and the others go on as if they contributed nothing."""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ending_ranks
import mpirun
import numpy as np
import oracle
import pytest
import session
import tiers
from configured import raises
from live_job import LiveJob

import hororing.numpy as hvd
from hororing import errors

OPS = [hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product]

# ---------------------------------------------------------------------------------------------
# On the ranks


def ranks() -> list[int]:
    return list(range(hvd.size()))


def some_joined() -> Iterator[list[int]]:
    """Yield every set of ranks that join early, except none and all."""
    for count in range(1, hvd.size()):
        for joined in itertools.combinations(ranks(), count):
            yield list(joined)


def uneven(joined: list[int], work: Callable[[list[int]], None]) -> int:
    """Call join on the ranks `joined`; the others work first, and then join."""
    if hvd.rank() not in joined:
        work([rank for rank in ranks() if rank not in joined])
    return hvd.join()


def listed(members: list[int]) -> str:
    """Return ranks as error texts show them."""
    if len(members) == 1:
        return f"rank {members[0]} has"
    run = members[-1] - members[0] == len(members) - 1 and len(members) > 2
    text = f"{members[0]}-{members[-1]}" if run else ",".join(map(str, members))
    return f"ranks {text} have"


def case_init() -> None:
    hvd.init(process_sets="dynamic")


def case_a_join_of_all_is_over_at_once_as_often_as_wanted() -> None:
    for _ in range(3):
        assert hvd.join() in ranks()
    assert hvd.join(-1) in ranks()
    assert hvd.join(0) in ranks()  # works without a GPU
    if hvd.size() == 1:
        assert hvd.join() == 0


def case_the_last_one_is_returned_everywhere() -> None:
    one = np.ones(1, np.int32)
    for order in itertools.permutations(ranks()):
        before = order.index(hvd.rank())
        # The sum of ones is the number of ranks that have not joined.
        while before and hvd.allreduce(one, op=hvd.Sum)[0] > hvd.size() - before:
            pass
        assert hvd.join() == order[-1]


def case_every_operation_and_type_has_something_neutral() -> None:
    for key, joined in enumerate(some_joined()):

        def work(active: list[int], key: int = key, joined: list[int] = joined) -> None:
            adasum = [] if hvd.size() & (hvd.size() - 1) else [hvd.Adasum]
            for number, (dtype, op) in enumerate(itertools.product(oracle.DTYPES, [*OPS, *adasum])):
                if dtype == "bool" and op == hvd.Average:
                    continue
                if op == hvd.Adasum and dtype not in oracle.FLOATS:
                    continue
                arrays = [
                    oracle.values(
                        np.random.default_rng([mpirun.seed(), key, number, rank]), dtype, (5, 7)
                    )
                    for rank in ranks()
                ]
                for name in (None, "n", "n"):  # the second one may come from the cache
                    result = hvd.allreduce(arrays[hvd.rank()], op=op, name=name)
                    oracle.reduced(arrays, op, 1.0, 1.0, joined).compare(result)

        assert uneven(joined, work) not in joined


def case_an_average_divides_by_all_ranks() -> None:
    for joined in some_joined():

        def work(active: list[int]) -> None:
            result = hvd.allreduce(np.full(3, 4.0 * hvd.size()))
            assert (result == 4 * len(active)).all()
            scaled = hvd.allreduce(np.full(3, 8.0), prescale_factor=0.5, postscale_factor=3.0)
            np.testing.assert_allclose(scaled, 12 * len(active) / hvd.size(), rtol=1e-15)

        uneven(joined, work)


def case_tensors_of_before_and_of_now() -> None:
    """Tensors known to all ranks, known to the active ones, or new; alone and in groups."""
    before = [np.full(5, hvd.rank() + 1.0) for _ in range(4)]
    for index, tensor in enumerate(before):
        hvd.allreduce(tensor, name=f"known{index}", op=hvd.Sum)
    hvd.grouped_allreduce(before, name="known group", op=hvd.Sum)
    for joined in some_joined():

        def work(active: list[int]) -> None:
            wanted = sum(rank + 1 for rank in active)
            for turn in range(3):
                names = [f"known{i}" for i in range(4)] + [f"new{turn}{i}" for i in range(4)]
                handles = [
                    hvd.allreduce_async(before[0], name=name, op=hvd.Sum)
                    for name in (names if hvd.rank() % 2 else names[::-1])
                ]
                handles.append(hvd.grouped_allreduce_async(before, name="known group", op=hvd.Sum))
                mixed = [np.full(2, hvd.rank() + 1, np.int64), np.full((), hvd.rank() + 1.0)]
                handles.append(hvd.grouped_allreduce_async_(mixed, name=f"g{turn}", op=hvd.Sum))
                handles.append(hvd.allreduce_async(np.ones(0), name="empty"))
                for handle in handles:
                    for result in results_of(handle):
                        assert (result == wanted).all()

        uneven(joined, work)
        for index, tensor in enumerate(before):  # by all ranks again
            result = hvd.allreduce(tensor, name=f"known{index}", op=hvd.Sum)
            assert (result == sum(range(hvd.size() + 1))).all()


def results_of(handle: int) -> list[Any]:
    result = hvd.synchronize(handle)
    return list(result) if isinstance(result, (list, tuple)) else [result]


def case_a_barrier_does_not_wait_for_who_has_joined() -> None:
    for joined in some_joined():
        uneven(joined, lambda _: [hvd.barrier() for _ in range(3)] and None)


def case_other_verbs_are_refused_on_the_active_ranks() -> None:
    x = np.ones((hvd.size(), 2), np.float32)
    verbs: list[tuple[str, Callable[[str], Any]]] = [
        ("allgather", lambda n: hvd.allgather(x, name=n)),
        ("allgather", lambda n: hvd.grouped_allgather([x, x], name=n)),
        ("broadcast", lambda n: hvd.broadcast(x, 0, name=n)),
        ("broadcast", lambda n: hvd.broadcast_(x.copy(), hvd.size() - 1, name=n)),
        ("alltoall", lambda n: hvd.alltoall(x, name=n)),
        ("alltoall", lambda n: hvd.alltoall(x, [1] * hvd.size(), name=n)),
        ("reducescatter", lambda n: hvd.reducescatter(x, name=n)),
        ("reducescatter", lambda n: hvd.grouped_reducescatter([x, x], name=n)),
    ]
    for index, (_, call) in enumerate(verbs):
        call(f"known{index}")
    for joined in some_joined():

        def work(active: list[int], joined: list[int] = joined) -> None:
            for index, (verb, call) in enumerate(verbs):
                for name in (f"known{index}", f"new{index}"):
                    with raises(
                        errors.MismatchError,
                        f"{verb} '{name}'",
                        f"{verb} is not supported with join",
                        f"{listed(joined)} joined",
                    ):
                        call(name)
            assert (hvd.allreduce(x, op=hvd.Sum) == len(active)).all()

        uneven(joined, work)
        for index, (_, call) in enumerate(verbs):
            call(f"known{index}")


def case_scaled_extremes_and_products_are_refused() -> None:
    for joined in some_joined():

        def work(active: list[int], joined: list[int] = joined) -> None:
            for op, name in ((hvd.Min, "Min"), (hvd.Max, "Max"), (hvd.Product, "Product")):
                with raises(
                    errors.MismatchError, "'s'", f"op={name}", "prescale_factor",
                    f"{listed(joined)} joined",
                ):  # fmt: skip
                    hvd.allreduce(np.ones(2), op=op, name="s", prescale_factor=2.0)
                scaled = hvd.allreduce(np.full(2, 3.0), op=op, name="s", postscale_factor=2.0)
                assert scaled[0] == 2 * (3.0 ** len(active) if op == hvd.Product else 3.0)

        uneven(joined, work)


def case_active_ranks_that_disagree_hear_of_it() -> None:
    for joined in some_joined():

        def work(active: list[int]) -> None:
            if len(active) > 1:
                with raises(errors.MismatchError, "shapes differ", f"rank {active[0]}: [1]"):
                    hvd.allreduce(np.ones(1 if hvd.rank() == active[0] else 2), name="d")
            assert (hvd.allreduce(np.ones(2), op=hvd.Sum, name="d") == len(active)).all()

        uneven(joined, work)


def case_what_a_rank_had_in_flight_counts() -> None:
    for joined in some_joined():
        handle = 0
        if hvd.rank() in joined:
            handle = hvd.allreduce_async(np.full(3, 10.0), name="late", op=hvd.Sum)

        def work(active: list[int], joined: list[int] = joined) -> None:
            # It cannot complete before this rank submits it, and includes the joined ranks' values.
            total = hvd.allreduce(np.ones(3), name="late", op=hvd.Sum)
            assert (total == len(active) + 10 * len(joined)).all()
            assert (hvd.allreduce(np.ones(3), name="late", op=hvd.Sum) == len(active)).all()

        uneven(joined, work)
        if handle:
            wanted = hvd.size() - len(joined) + 10 * len(joined)
            assert (hvd.synchronize(handle) == wanted).all()


def case_an_epoch_after_the_other() -> None:
    rng = np.random.default_rng(mpirun.seed())
    for _ in range(10):
        batches = rng.integers(0, 6, hvd.size())
        for batch in range(batches[hvd.rank()]):
            total = hvd.allreduce(np.ones(2), op=hvd.Sum, name=f"b{batch % 2}")
            assert (total == sum(batches > batch)).all()
        assert batches[hvd.join()] == max(batches)


def case_joined_members_of_process_sets() -> None:
    sets = [
        hvd.add_process_set(members)
        for count in range(1, hvd.size())
        for members in itertools.combinations(ranks(), count)
    ]
    x = np.full(2, hvd.rank() + 1.0)
    for joined in some_joined():

        def work(active: list[int], joined: list[int] = joined) -> None:
            for each in sets:
                if not each.included():
                    continue
                present = [rank for rank in each.ranks if rank in active]
                total = hvd.allreduce(x, op=hvd.Sum, process_set=each)
                assert (total == sum(rank + 1 for rank in present)).all()
                mean = hvd.allreduce(x, process_set=each, name="mean")
                np.testing.assert_allclose(mean, total / len(each.ranks), rtol=1e-15)
                hvd.barrier(each)
                if present == each.ranks:  # no member has joined
                    assert len(hvd.allgather(x, process_set=each)) == 2 * len(present)
                    continue
                gone = [rank for rank in each.ranks if rank in joined]
                with raises(errors.MismatchError, f"{listed(gone)} joined"):
                    hvd.allgather(x, name="g", process_set=each)

        uneven(joined, work)
    for each in sets:
        assert hvd.remove_process_set(each)


def case_sets_do_not_change_while_someone_has_joined() -> None:
    for joined in some_joined():

        def work(_: list[int]) -> None:
            with raises(errors.MismatchError, "not supported with join"):
                hvd.add_process_set([])

        uneven(joined, work)
    assert hvd.remove_process_set(hvd.add_process_set([]))


def case_other_threads_hear_that_their_rank_has_joined() -> None:
    """Otherwise their calls would be taken for the rank's part in the calls of others."""
    rank, size = hvd.rank(), hvd.size()
    if size == 1:
        return
    tensor = np.ones(4, np.float32)
    refused: list[str] = []

    def other() -> None:
        while not refused:
            try:
                hvd.synchronize(hvd.allreduce_async(tensor, name="x", op=hvd.Sum))
            except ValueError as error:
                refused.append(str(error))

    for _ in range(5):
        refused.clear()
        if rank == 1:
            thread = threading.Thread(target=other)
            thread.start()
            hvd.join()
            refused.append("")  # not before join returned
            thread.join()
        else:
            for _ in range(100):
                total = hvd.allreduce(tensor, name="x", op=hvd.Sum)
                assert size - 1 <= total[0] <= size
            hvd.join()
        hvd.join()


def case_a_shutdown_ends_a_join() -> None:
    if hvd.size() > 1:
        if hvd.rank() == 0:
            with raises(errors.ShutDownError, "join"):
                hvd.join()
        else:
            hvd.shutdown()
    hvd.shutdown()
    with raises(errors.NotInitializedError):
        hvd.join()


# ---------------------------------------------------------------------------------------------
# Tests


test_joins_on_several_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="numpy")


def test_the_stall_inspector_names_the_missing_but_not_who_has_joined():
    quick = {"HORORING_STALL_WARNING_S": "0.2", "HORORING_STALL_SHUTDOWN_S": "0"}
    job = mpirun.run(__file__, 3, "wait_long", environment=quick)
    assert job.returncode == 0, job.report()
    lines = [line for line in job.outputs[0].splitlines() if "stall: waited" in line]
    warnings = [line for line in lines if "who is there" not in line]  # before rank 1 has joined
    assert warnings, job.report()
    for line in warnings:
        assert "allreduce 'late': submitted by rank 0, missing rank 2." in line
        assert "join" not in line


def wait_long() -> None:
    """Rank 1 joins; rank 2 makes the others wait, then all wait for rank 0 to join."""
    hvd.init()
    # Rank 1 must have joined before the others are warned about.
    joined = False
    while hvd.rank() != 1 and not joined:
        joined = hvd.allreduce(np.ones(1), name="who is there", op=hvd.Sum)[0] == 2
    if hvd.rank() == 0:
        assert hvd.allreduce(np.ones(1), name="late", op=hvd.Sum)[0] == 2
        time.sleep(1)  # no warning may come meanwhile
    if hvd.rank() == 2:
        time.sleep(1)  # busy
        hvd.allreduce(np.ones(1), name="late", op=hvd.Sum)
    assert hvd.join() == 0
    hvd.shutdown()


@pytest.mark.parametrize("victim", tiers.choose([0, 2], push=[0]))
def test_the_death_of_a_joined_rank_is_told_to_the_others(victim):
    options = ["--runtime-options", "recoverable"]
    with LiveJob(Path(__file__), 3, "join_and_die", str(victim), options=options) as running:
        running.wait_until_all_say("ready")
        running.said((victim + 1) % 3, "alone")
        os.kill(running.pid(victim), signal.SIGKILL)
        for rank in {0, 1, 2} - {victim}:
            seen = json.loads(running.said(rank, "failed"))
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", victim), seen
        assert running.end() != 0
        assert running.files_left() == set()


def join_and_die(victim: str) -> None:
    """The victim joins; the others reduce until they notice its death."""
    ending_ranks.begin()
    if hvd.rank() == int(victim):
        hvd.join()

    def work() -> None:
        said = False
        while True:
            if hvd.allreduce(np.ones(1), op=hvd.Sum, name="x")[0] == 2 and not said:
                said = True
                ending_ranks.say("alone")

    ending_ranks.fail_with(work)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
