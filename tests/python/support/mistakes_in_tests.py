"""Mistakes in tests on two ranks; test_mistakes_in_tests.py checks what each report says.

The line with the mistake ends with "# here". A dictionary says which rank is to blame, and more of
the text. pytest runs a copy of this file.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import queue
import signal
import sys
import threading
import time
import unittest

import numpy as np
import pytest

import hororing.numpy as hvd
import hororing.testing

pytestmark = pytest.mark.ranks(2, limit_s=0.4)
ONES = np.ones(4, np.float32)
BLAME: dict[str, tuple[str, str]] = {}  # by test: a rank, or "every rank"; a part of the text


def blames(who: object, text: str):
    def note(test):
        BLAME[test.__name__] = (who if isinstance(who, str) else f"rank {who}", text)
        return test

    return note


# ---------------------------------------------------------------------------------------------
# Hangs


@blames(1, "is in time.sleep(1000)")
def test_sleeps():
    if hvd.rank() == 1:
        time.sleep(1000)  # here


@blames(0, "rank 0 waits in hvd.allreduce(ONES")
def test_forgotten_call():
    if hvd.rank() == 0:
        hvd.allreduce(ONES, name="loss")  # here


@blames(1, "waits in hvd.allreduce(ONES): 4 x float32")
def test_uneven_loop():
    for _ in range(2 + hvd.rank()):
        hvd.allreduce(ONES)  # here


@blames(0, "ended the test at line")
def test_early_return():
    if hvd.rank() == 0:
        return  # here
    hvd.allreduce(ONES)


@blames(1, "is in")
def test_endless_loop():
    rank = hvd.rank()
    any(rank != 1 for _ in itertools.count())  # here


@blames(0, "waits in hvd.allreduce(ONES, name=names[0])")
def test_wrong_order():
    names = ["a", "b"][:: 1 - 2 * hvd.rank()]
    hvd.allreduce(ONES, name=names[0])  # here
    hvd.allreduce(ONES, name=names[1])


@blames(1, "is in lock.acquire()")
def test_lock():
    lock = threading.Lock()
    lock.acquire()
    if hvd.rank() == 1:
        lock.acquire()  # here


@blames(0, "waits in hvd.barrier()")
def test_barrier_of_one():
    if hvd.rank() == 0:
        hvd.barrier()  # here


@blames(1, "(broadcast 'rank1')")
def test_names_differ():
    hvd.broadcast(ONES, 0, name=f"rank{hvd.rank()}")  # here


@blames(0, "is in queue.Queue().get()")
def test_empty_queue():
    if hvd.rank() == 0:
        queue.Queue().get()  # here


@blames(1, "waits in hvd.synchronize(handle)")
def test_handle_without_partner():
    handle = hvd.allreduce_async(ONES, name=f"rank{hvd.rank()}")
    if hvd.rank() == 1:
        hvd.synchronize(handle)  # here


@blames(1, "rank 1 is at test_of_users.py")
def test_native_code():
    # Such a call holds the interpreter, so no thread of it can answer.
    sleep_in_native_code = ctypes.PyDLL(None).sleep
    if hvd.rank() == 1:
        sleep_in_native_code(1000)  # here


# ---------------------------------------------------------------------------------------------
# Mismatches


@blames("every rank", "shapes differ: rank 0: [3]; rank 1: [4]")
def test_shapes():
    hvd.allreduce(np.ones(3 + hvd.rank()), name="loss")  # here


@blames("every rank", "rank 0: float32; rank 1: float64")
def test_dtypes():
    hvd.allreduce(np.ones(3, ["f4", "f8"][hvd.rank()]), name="loss")  # here


@blames("every rank", "rank 1: Max")
def test_operations():
    hvd.allreduce(ONES, op=[hvd.Sum, hvd.Max][hvd.rank()], name="loss")  # here


@blames("every rank", "rank 1: 1")
def test_roots():
    hvd.broadcast(ONES, hvd.rank(), name="weights")  # here


@blames("every rank", "rank 1: allgather")
def test_verbs():
    [hvd.allreduce, hvd.allgather][hvd.rank()](ONES, name="x")  # here


@blames("every rank", "rank 1: [1, 3]")
def test_columns():
    hvd.allgather(np.ones((1, 2 + hvd.rank())), name="x")  # here


# ---------------------------------------------------------------------------------------------
# Ranks that die


@blames(1, "ended its process with code 3")
def test_os_exit():
    if hvd.rank() == 1:
        os._exit(3)  # here
    hvd.allreduce(ONES)


@blames(1, "was killed by SIGKILL")
def test_sigkill():
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(ONES)


@blames(1, "was killed by SIGSEGV")
def test_crash():
    if hvd.rank() == 1:
        ctypes.string_at(0)  # here
    hvd.allreduce(ONES)


@blames(0, "was killed by SIGABRT")
def test_abort():
    if hvd.rank() == 0:
        os.abort()  # here
    hvd.allreduce(ONES)


@blames(1, "SystemExit: 3")
def test_sys_exit():
    if hvd.rank() == 1:
        sys.exit(3)  # here
    hvd.allreduce(ONES)


@blames(1, "was killed by SIGTERM")
def test_sigterm():
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1000)


# ---------------------------------------------------------------------------------------------
# Exceptions


@blames(1, "rank 0 lost it: PeerLostError")  # it learns of the failure, and is not just ended
def test_exception_on_one_rank():
    1 / (1 - hvd.rank())  # here
    hvd.allreduce(ONES)


@blames("every rank", "KeyError: 'x'")
def test_exception_on_all_ranks():
    {}["x"]  # here


@blames(0, "assert 0 == 1")
def test_assertion_on_one_rank():
    assert hvd.rank() == 1  # here
    hvd.barrier()


@blames(1, "RecursionError")
def test_recursion():
    def again():
        again()  # here

    if hvd.rank() == 1:
        again()
    hvd.barrier()


@blames(1, "ValueError: 0 batches")
def test_exception_in_a_helper():
    helper(2 - 2 * hvd.rank())
    hvd.barrier()


def helper(count: int) -> None:
    if not count:
        raise ValueError("0 batches")  # here of test_exception_in_a_helper


@pytest.fixture
def fails_on_rank_1():
    if hvd.rank() == 1:
        raise OSError("no data")  # here of test_fixture
    hvd.barrier()


@blames(1, "OSError: no data")
def test_fixture(fails_on_rank_1):
    pass


@pytest.fixture
def fails_afterwards():
    yield
    if hvd.rank() == 0:
        raise OSError("cannot remove")  # here of test_teardown


@blames(0, "OSError: cannot remove")
def test_teardown(fails_afterwards):
    pass


@blames("rank 1", "rank 1 differs from rank 0 in ['w'] element (2,): rank 1 has 1.5, rank 0 has 1")
def test_values_differ():
    value = ONES.copy()
    value[2] += hvd.rank() / 2
    hororing.testing.assert_same({"w": value})


@blames(1, "rank 1 did not raise ValueError")
def test_does_not_raise():
    with hororing.testing.raises_on(1, ValueError):  # here
        pass


@blames(0, "rank 1 has shut down")
def test_shutdown():
    if hvd.rank() == 1:
        hvd.shutdown()
        return
    hvd.allreduce(ONES, name="loss")  # here


@blames("rank 1", "rank 1 has called 1 since")
def test_is_never_killed():
    hororing.testing.kill(rank=1, at="allreduce:2")
    hvd.allreduce(ONES)


class TestOfUnittest(unittest.TestCase):
    @blames(1, "AssertionError: 1 != 0")
    def test_method(self):
        self.assertEqual(hvd.rank(), 0)  # noqa: PT009  # here of test_method

    @blames(1, "AssertionError: 1 != 0")
    def test_subtests(self):
        for number in (0, 1):
            with self.subTest(number=number):
                self.assertEqual(number * hvd.rank(), 0)  # noqa: PT009  # here of test_subtests

    @blames("ranks", "pytest does not repeat a method of unittest.TestCase")
    @pytest.mark.ranks(1, 2)
    def test_two_sizes(self):
        pass
