"""Process sets on 1 to 4 ranks: members, ids, and errors."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ending_ranks
import numpy as np
import pytest
import session
import tiers
from configured import raises
from live_job import LiveJob

import hororing.numpy as hvd
from hororing import errors
from hororing._engine import recorder
from hororing._requests import process_sets

# ---------------------------------------------------------------------------------------------
# On the ranks


def ranks() -> list[int]:
    return list(range(hvd.size()))


def subsets() -> list[list[int]]:
    """Return all sets of ranks except that of all ranks."""
    return [
        list(each) for count in range(hvd.size()) for each in itertools.combinations(ranks(), count)
    ]


@contextlib.contextmanager
def job(process_sets: Any = "dynamic") -> Iterator[None]:
    """Run a block from init to shutdown; all ranks stay until its end."""
    hvd.init(process_sets=process_sets)
    yield
    works()
    hvd.barrier()
    hvd.shutdown()


@contextlib.contextmanager
def added(*sets: list[int]) -> Iterator[list[hvd.ProcessSet]]:
    """Add process sets, and remove them after the block."""
    made = [hvd.add_process_set(members) for members in sets]
    yield made
    assert all(hvd.remove_process_set(process_set) for process_set in made)


def sum_in(process_set: hvd.ProcessSet, **more: Any) -> None:
    """Fail unless the sum over its members is right."""
    if process_set.included():
        mine = np.array([1, hvd.rank()])
        total = hvd.allreduce(mine, op=hvd.Sum, process_set=process_set, **more)
        assert total.tolist() == [len(process_set.ranks), sum(process_set.ranks)]


def works() -> None:
    """Fail unless the job goes on."""
    sum_in(hvd.global_process_set)


def case_the_global_set_is_there_from_the_beginning() -> None:
    assert hvd.global_process_set.process_set_id == 0
    with job(None):
        everyone = hvd.global_process_set
        assert everyone.ranks == ranks()
        assert (everyone.size(), everyone.rank()) == (hvd.size(), hvd.rank())
        assert everyone.included()
        assert process_sets.ids_and_ranks() == {0: ranks()}


def case_static_sets_get_ids_in_the_order_of_the_list() -> None:
    world = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    for make in (hvd.ProcessSet, list, tuple, lambda members: range(len(members))):
        given = [make([0])] if world > 1 else []
        given += [make([0, 1])] if world > 2 else []
        with job(given):
            wanted = [[0], [0, 1]][: len(given)]
            found = process_sets.ids_and_ranks()
            assert found == dict(enumerate([ranks(), *wanted]))
            for number, each in enumerate(given, start=1):
                if isinstance(each, hvd.ProcessSet):
                    assert each.process_set_id == number
                    sum_in(each)


def case_sets_are_not_dynamic_unless_asked_for() -> None:
    for given in (None, []):
        with job(given):
            with raises(ValueError, "HORORING_DYNAMIC_PROCESS_SETS=1", "HOROVOD_DYNAMIC"):
                hvd.add_process_set([0])
            with raises(ValueError, "HORORING_DYNAMIC_PROCESS_SETS=1"):
                hvd.remove_process_set(hvd.ProcessSet([0]))
    for variable in ("HORORING_DYNAMIC_PROCESS_SETS", "HOROVOD_DYNAMIC_PROCESS_SETS"):
        os.environ[variable] = "1"
        with job(None), added([]):
            pass
        del os.environ[variable]
    with job("DYNAMIC"), added([]):
        pass
    with job(None):
        hvd.init(process_sets="dynamic")  # a second call
        with added([]):
            pass


def case_init_says_what_is_wrong_with_its_process_sets() -> None:
    for bad in ("static", 5, [5], [["a"]], [[0.5]]):
        with raises(ValueError):
            hvd.init(process_sets=bad)
        assert not hvd.is_initialized()
    world = int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))
    for bad, text in (
        ([[], []], "entry 1 of process_sets"),
        ([[], list(range(world))], "entry 1 of process_sets"),
        ([[world]], f"rank {world} is not a rank of this job"),
        ([[0, 0]], "rank 0 occurs twice"),
    ):
        with raises(ValueError, text):
            hvd.init(process_sets=bad)
        assert hvd.is_initialized()
        works()
        hvd.barrier()
        hvd.shutdown()


def case_a_second_init_looks_its_sets_up() -> None:
    static = hvd.ProcessSet([])
    with job([static]):
        again = hvd.ProcessSet([])
        hvd.init(process_sets=[again])
        assert again.process_set_id == static.process_set_id == 1
        with raises(ValueError, "entry 1 of process_sets", "initialized already"):
            hvd.init(process_sets=[[], [99]])


def case_what_a_set_knows_of_itself() -> None:
    with raises(ValueError, "must be a sequence of ranks"):
        hvd.ProcessSet(["0"])
    with raises(ValueError, "must be a sequence of ranks"):
        hvd.ProcessSet(0)
    assert hvd.ProcessSet((2, 0, 0)).ranks == [0, 0, 2]
    assert hvd.ProcessSet(range(3)).ranks == [0, 1, 2]
    with job():
        for members in subsets():
            one = hvd.ProcessSet(members[::-1])
            for _ in range(2):  # the second time after its removal
                assert (one.process_set_id, one.size(), one.rank()) == (None, None, None)
                assert one.included() == (hvd.rank() in members)
                assert (
                    str(one) == f"ProcessSet(process_set_id=None, ranks={members}, mpi_comm=None)"
                )
                assert hvd.add_process_set(one) is one
                assert (one.process_set_id, one.ranks, one.size()) == (1, members, len(members))
                assert "process_set_id=1" in str(one)
                if one.included():
                    assert one.rank() == members.index(hvd.rank())
                else:
                    with raises(ValueError, "not part of provided process set"):
                        one.rank()
                sum_in(one)
                assert hvd.remove_process_set(one) is True
                assert hvd.remove_process_set(one) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False


def case_freed_ids_are_used_again() -> None:
    with job():
        sets = [hvd.add_process_set(members) for members in subsets()[:3]]
        assert [each.process_set_id for each in sets] == list(range(1, len(sets) + 1))
        for freed in sets:
            number, members = freed.process_set_id, freed.ranks
            assert hvd.remove_process_set(freed)
            assert number not in process_sets.ids_and_ranks()
            assert hvd.add_process_set(members).process_set_id == number
        assert len(process_sets.ids_and_ranks()) == len(sets) + 1


def case_unnamed_calls_match_under_an_id_that_other_ranks_have_used() -> None:
    with job():
        for count, members in enumerate(subsets()):
            with added(members) as (one,):
                for _ in range(count % 3):
                    sum_in(one)


def case_bad_sets_are_refused_on_every_rank() -> None:
    size = hvd_size()
    with job(), added([]):
        for bad, text in (
            ([0, 0], "rank 0 occurs twice"),
            ([size], f"rank {size} is not a rank of this job"),
            ([-1], "rank -1 is not a rank of this job"),
            ([2**32], "there is no rank 4294967296"),
            (ranks(), "duplicate process set: process set 0 has the ranks"),
            ([], "duplicate process set: process set 1 has the ranks"),
        ):
            with raises(ValueError, text):
                hvd.add_process_set(bad)
            works()
        one = hvd.ProcessSet([])
        with raises(ValueError, "duplicate process set"):
            hvd.add_process_set(one)
        assert one.process_set_id is None
        with raises(ValueError, "duplicate process set"):
            hvd.add_process_set(hvd.global_process_set)
        with raises(ValueError):
            hvd.add_process_set(["x"])
        assert process_sets.ids_and_ranks() == {0: ranks(), 1: []}


def hvd_size() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", "1"))


def case_ranks_that_disagree_about_a_set_hear_of_it() -> None:
    if hvd_size() == 1:
        return
    with job():
        mine = [0] if hvd.rank() == 0 else [1]
        others = "rank 1" if hvd.size() == 2 else "ranks 1"
        with raises(ValueError, "ranks of the set differ", "rank 0: [0]", others, ": [1]"):
            hvd.add_process_set(mine)
        with added([0], [1]) as (first, second):
            with raises(ValueError, "process sets differ", "process set 1", "process set 2"):
                hvd.remove_process_set(first if hvd.rank() else second)
            sum_in(first)
            sum_in(second)


def case_only_members_of_a_registered_set_may_wait_at_its_barrier() -> None:
    """conformance/ tests the other verbs."""
    with job():
        for members in subsets()[1:]:
            with added(members) as (one,):
                if one.included():
                    hvd.barrier(one)
                    continue
                with raises(
                    ValueError, f"barrier: rank {hvd.rank()} is not a member", str(members)
                ):
                    hvd.barrier(one)
        with raises(TypeError, "barrier", "is not registered"):
            hvd.barrier(hvd.ProcessSet(ranks()))
        with raises(TypeError, "barrier", "must be a ProcessSet"):
            hvd.barrier(1)


def case_names_are_scoped_by_set() -> None:
    with job():
        sets = [hvd.global_process_set, *map(hvd.add_process_set, subsets()[1:])]
        mine = [each for each in sets if each.included()]
        number = np.array([hvd.rank() + 1])
        for _ in range(3):  # negotiated, then from the cache
            handles = [
                hvd.allreduce_async(number, name="n", op=hvd.Sum, process_set=each)
                for each in mine
            ]  # fmt: skip
            for each, handle in zip(mine, handles, strict=True):
                assert hvd.synchronize(handle)[0] == sum(rank + 1 for rank in each.ranks)
        # Also for the doctor.
        seen = recorder.read(str(recorder.find(os.getpid())))
        ids = [each.process_set_id for each in mine]
        ends = {event.request for event in seen.events if event.kind == "done"}
        names = {f"allreduce 'n'{f' of process set {number}' * (number != 0)}" for number in ids}
        assert names <= ends
        assert not seen.unfinished(), seen.unfinished()


def case_sets_may_be_used_in_any_order() -> None:
    with job():
        sets = [hvd.global_process_set, *map(hvd.add_process_set, subsets()[1:])]
        mine = [each for each in sets if each.included()]
        order = mine if hvd.rank() % 2 else mine[::-1]
        number = np.full(5_000, hvd.rank())
        for turn in range(5):
            handles = [
                hvd.allreduce_async(number, name=f"n{turn}", op=hvd.Sum, process_set=each)
                for each in order
            ]  # fmt: skip
            for each, handle in zip(order, handles, strict=True):
                assert (hvd.synchronize(handle) == sum(each.ranks)).all()


def case_threads_may_block_in_several_sets_at_once() -> None:
    with job():
        sets = [hvd.global_process_set, *map(hvd.add_process_set, subsets()[1:])]
        mine = [each for each in sets if each.included()]
        failures: list[BaseException] = []

        def work(process_set: hvd.ProcessSet) -> None:
            try:
                for turn in range(20):
                    sum_in(process_set)
                    sum_in(process_set, name=f"x{turn % 3}")
            except BaseException as failure:
                failures.append(failure)

        order = mine if hvd.rank() % 2 else mine[::-1]
        threads = [threading.Thread(target=work, args=(each,)) for each in order]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures, failures


def case_what_is_in_flight_fails_when_its_set_is_removed() -> None:
    with job():
        for members in [each for each in subsets() if len(each) > 1]:
            process_set = hvd.add_process_set(members)
            handles = []
            if hvd.rank() == members[0]:  # only this rank submits
                x = np.ones(3)
                handles = [
                    hvd.allreduce_async(x, name="x", process_set=process_set),
                    hvd.allgather_async(x, name="y", process_set=process_set),
                    hvd.broadcast_async(x, members[-1], process_set=process_set),
                ]
            assert hvd.remove_process_set(process_set)
            for handle in handles:
                with raises(errors.MismatchError, "process set was removed"):
                    hvd.synchronize(handle)
            works()


def case_after_a_mismatch_in_a_set_all_sets_go_on() -> None:
    if hvd_size() == 1:
        return
    with job():
        for members in [each for each in subsets() if len(each) > 1]:
            with added(members) as (process_set,):
                if process_set.included():
                    shape = 3 if hvd.rank() == members[-1] else 2
                    with raises(
                        errors.MismatchError, "'x'", f"rank {members[-1]}: [3]",
                        f"process set {process_set.process_set_id}",
                    ):  # fmt: skip
                        hvd.allreduce(np.ones(shape), name="x", process_set=process_set)
                    sum_in(process_set, name="x")
                works()


def case_sets_end_with_their_job() -> None:
    with job():
        first = hvd.add_process_set([])
        assert first.process_set_id == 1
    assert hvd.global_process_set.process_set_id == 0
    with job():
        assert process_sets.ids_and_ranks() == {0: ranks()}
        assert first.process_set_id is None
        with raises(TypeError, "is not registered"):
            hvd.barrier(first)
        assert hvd.add_process_set(first).process_set_id == 1
    with raises(errors.NotInitializedError):
        hvd.add_process_set([0])
    with raises(errors.NotInitializedError):
        hvd.remove_process_set(first)


# ---------------------------------------------------------------------------------------------
# Tests


test_sets_on_several_ranks = session.on_ranks(globals(), 1, 2, 3, 4, session="numpy")


@pytest.mark.parametrize(
    ("transport", "victim"),
    tiers.choose(itertools.product(["auto", "mpi"], range(4)), push=[("auto", 0), ("mpi", 2)]),
)
def test_the_death_of_a_member_is_told_to_all_sets(transport, victim):
    with LiveJob(
        Path(__file__), 4, "work_in_sets", str(victim),
        options=["--runtime-options", "recoverable"], HORORING_TRANSPORT=transport,
    ) as running:  # fmt: skip
        running.wait_until_all_say("working")
        os.kill(running.pid(victim), signal.SIGKILL)
        for rank in {0, 1, 2, 3} - {victim}:
            seen = json.loads(running.said(rank, "failed"))
            assert (seen["kind"], seen["rank"]) == ("PeerLostError", victim), seen
        assert running.end() != 0
        assert running.files_left() == set()


def work_in_sets(victim: str) -> None:
    """{0, 1} and {2, 3} work separately until one of the four is killed."""
    ending_ranks.say("pid", os.getpid())
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    halves = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([2, 3])]
    hvd.init(process_sets=halves)
    hvd.barrier()
    mine = halves[hvd.rank() // 2]
    sum_in(mine)
    ending_ranks.say("working")

    def work() -> None:
        while True:
            sum_in(mine, name="x")

    ending_ranks.fail_with(work)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
