"""The table of what owns the memory of requests in flight, by handle."""

from __future__ import annotations

import gc
import random
import threading
import weakref

import mpirun
import numpy as np
import pytest
import torch

import hororing.torch as hvd
from hororing._core import lib
from hororing._tensors import InFlight

STEP = 1 << lib.HR_HANDLE_PLACE_BITS  # between the handles that one place has in turn


class Owner:
    pass


@pytest.mark.parametrize("seed", range(5))
def test_it_is_a_table(seed: int):
    table, expected = InFlight(), {}
    draw = random.Random(seed)
    for number in range(2000):
        free = set(range(50)) - {handle % STEP for handle in expected}
        if free and draw.random() < 0.5:
            handle = (number + 1) * STEP + draw.choice(sorted(free))
            expected[handle] = Owner()
            table.put(handle, expected[handle])
        elif expected:
            handle = draw.choice(sorted(expected))
            assert table.get(handle) is expected[handle]
            assert table.take(handle) is expected.pop(handle)
            assert table.get(handle) is None
            assert table.take(handle) is None
        assert len(table) == len(expected)
        assert bool(table) == bool(expected)


def test_a_handle_that_had_the_place_before_is_unknown():
    table, first, second = InFlight(), Owner(), Owner()
    table.put(STEP + 3, first)
    assert table.take(STEP + 3) is first
    table.put(2 * STEP + 3, second)
    assert table.get(STEP + 3) is None
    assert table.take(STEP + 3) is None
    assert table.get(2 * STEP + 3) is second


def test_an_owner_lives_as_long_as_it_is_there():
    table, owner = InFlight(), Owner()
    there = weakref.ref(owner)
    table.put(STEP, owner)
    del owner
    gc.collect()
    assert there() is table.get(STEP)
    table.take(STEP)
    assert there() is None


@pytest.mark.parametrize("handle", [0, -1, STEP, 2**63, "1", None, 1.0, [], object()])
def test_what_is_no_handle_is_not_there(handle: object):
    table = InFlight()
    table.put(2 * STEP, Owner())
    assert table.get(handle) is None
    assert table.take(handle) is None
    assert len(table) == 1


def test_numbers_of_other_kinds_are_handles():
    table, owner = InFlight(), Owner()
    table.put(np.int64(5 * STEP + 1), owner)
    assert table.get(5 * STEP + 1) is owner
    assert table.take(np.int64(5 * STEP + 1)) is owner


@pytest.mark.parametrize("arguments", [(), (STEP,), (0, 1), ("1", 1), (-5, 1), (STEP, 1, 2)])
def test_what_cannot_be_put_is_a_type_error(arguments: tuple[object, ...]):
    with pytest.raises(TypeError, match="handle"):
        InFlight().put(*arguments)


def case_threads_that_wait_and_submit_by_turns_do_not_mix_up_results():
    wrong = []

    def work(thread: int) -> None:
        for step in range(150):
            tensor = torch.full((3,), float(thread * 1000 + step))
            handle = hvd.allreduce_async_(tensor, op=hvd.Sum, name=f"of thread {thread}")
            if hvd.synchronize(handle) is not tensor:
                wrong.append((thread, step))
            elif tensor[0] != hvd.size() * (thread * 1000 + step):
                wrong.append((thread, step, float(tensor[0])))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong


@pytest.mark.parametrize("case", mpirun.case_names(globals()))
@pytest.mark.parametrize("size", [1, 2])
def test_case(case: str, size: int):
    mpirun.cases_of(__file__, size).check(case)
