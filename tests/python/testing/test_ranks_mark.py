"""Tests on ranks behave as in plain pytest; this file uses the mark itself."""

from __future__ import annotations

import doctest
import importlib
import os

import hypothesis
import hypothesis.strategies
import numpy as np
import pytest

import hororing.errors
import hororing.numpy as hvd
import hororing.testing
from hororing.testing import sentences
from hororing.testing.messages import Doing

made: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def _of_the_module():
    made.append("module")
    yield
    made.clear()


@pytest.fixture(params=["a", "b"])
def letter(request):
    made.append(request.param)
    return request.param


@pytest.mark.ranks(2)
def test_every_rank_runs_the_test():
    assert hvd.size() == 2
    assert list(hvd.allgather(np.array([hvd.rank()]))) == [0, 1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("number", [1, 2])
def test_parameters_and_fixtures(number, letter):
    assert made[0] == "module"
    assert made.count("module") == 1, "the fixture of the module lives on"
    assert made[-1] == letter
    hororing.testing.assert_same([number, letter])


@pytest.mark.ranks(1, 2, 3)
def test_several_numbers_of_ranks(ranks):
    assert hvd.size() == ranks == int(os.environ["WORLD_SIZE"])


@pytest.mark.ranks(2)
def test_leaves_a_request_of_one_rank():
    if hvd.rank() == 0:
        hvd.allreduce_async(np.ones(1))  # nobody waits for it


@pytest.mark.ranks(2)
def test_an_earlier_test_leaves_no_request():
    assert hvd.allreduce(np.array([1.0]), op=hvd.Sum)[0] == 2


@pytest.mark.ranks(2)
def test_each_rank_has_a_folder_of_its_own(tmp_path):
    folders = hvd.allgather_object(str(tmp_path))
    assert len(set(folders)) == 2


@pytest.mark.ranks(2)
def test_a_skipped_test():
    pytest.skip("on every rank")


@pytest.mark.ranks(2)
@pytest.mark.xfail(reason="rank 1 always fails", strict=True)
def test_an_expected_failure_of_one_rank():
    assert hvd.rank() == 0
    hvd.barrier()


@pytest.mark.ranks(2)
class TestInAClass:
    @classmethod
    def setup_class(cls):
        cls.value = 7

    def test_methods_and_classes(self, monkeypatch):
        monkeypatch.setenv("ONLY_HERE", str(self.value))
        assert hvd.allgather_object(os.environ["ONLY_HERE"]) == ["7", "7"]


@pytest.mark.ranks(2, init=False)
class TestWhatAClassInitialises:
    @classmethod
    def setup_class(cls):
        hvd.init()

    @classmethod
    def teardown_class(cls):
        hvd.allreduce(np.ones(1), name="the last")
        hvd.shutdown()

    @pytest.mark.parametrize("test", [1, 2])
    def test_lives_as_long_as_the_class(self, test):
        assert hvd.allreduce(np.array([test]), op=hvd.Sum)[0] == 2 * test


@pytest.mark.ranks(2, init=False)
@pytest.mark.parametrize("test", [1, 2])
def test_what_a_test_initialises_ends_with_it(test):
    assert not hvd.is_initialized()
    hvd.init()


@pytest.mark.ranks(3)
def test_who_raises_and_what_is_the_same():
    with hororing.testing.raises_on([0, 2], ValueError, match="of rank") as raised:
        if hvd.rank() != 1:
            raise ValueError(f"of rank {hvd.rank()}")
    assert (raised.value is None) == (hvd.rank() == 1)
    hororing.testing.assert_same({"a": [1, "text", None], "b": np.arange(3)})
    for value, text in (
        (np.int64(5) + (hvd.rank() == 2), "rank 2 differs from rank 0: rank 2 has 6, rank 0 has 5"),
        (np.ones(2 + (hvd.rank() == 1)), "rank 1 differs from rank 0: float64 (3,) instead of"),
        ([0, float(hvd.rank() == 0)], "rank 0 differs from rank 1 in [1]: rank 0 has 1.0, rank 1"),
        ("ab"[hvd.rank() % 2], "rank 1 differs from rank 0: rank 1 has b, rank 0 has a"),
    ):
        with pytest.raises(AssertionError) as found:
            hororing.testing.assert_same(value)
        assert text in str(found.value)
        hvd.barrier()


@pytest.mark.ranks(2)
@hypothesis.settings(max_examples=10, database=None, derandomize=False)
@hypothesis.given(hypothesis.strategies.integers())
def test_hypothesis_has_the_same_examples_on_all_ranks(number):
    hororing.testing.assert_same(number)


def test_the_process_of_the_tests_is_no_rank():
    assert not hvd.is_initialized()
    assert made == ["module"]


def test_a_rank_that_cannot_answer_is_at_the_line_of_the_user():
    lines = [
        (hororing.errors.__file__, 3),  # the innermost, of this package
        ("/usr/lib/python3/dist-packages/torch/_ops.py", 2),  # of another environment
        ("/home/me/test_x.py", 1),
    ]
    text = "Thread (most recent call first):\n"
    text += "\n".join(f'  File "{file}", line {line} in f' for file, line in lines)
    assert sentences._doing(Doing("", "", 0, text)) == "is at test_x.py:1"


def add(a: int, b: int = 0) -> int:
    print("from rank", hvd.rank())
    return a + b + hvd.rank() * hvd.size()


def test_run_returns_the_results_of_all_ranks(capsys):
    assert hororing.testing.run(add, (1,), {"b": 2}, ranks=2) == [3, 5]
    assert capsys.readouterr().out == "[0] from rank 0\n[1] from rank 1\n"


def test_the_example_of_run():
    module = importlib.import_module("hororing.testing.function")
    assert doctest.testmod(module) == (0, 3)


def test_run_says_who_failed_and_who_hangs():
    def fail() -> None:
        if hvd.rank() == 1:
            raise KeyError("x")
        hvd.barrier()

    def hang() -> None:
        if hvd.rank() == 1:
            hvd.barrier()

    with pytest.raises(hororing.errors.RunError, match=r"rank 1 raised KeyError: 'x'"):
        hororing.testing.run(fail, ranks=2)
    with pytest.raises(hororing.errors.RunError, match=r"rank 1 waits in hvd\.barrier\(\)"):
        hororing.testing.run(hang, ranks=2, limit_s=0.3)
    for wrong in ({"ranks": 0}, {"ranks": 2, "backend": "mpi"}, {"ranks": 2, "limit_s": 0}):
        with pytest.raises(ValueError, match="run: "):
            hororing.testing.run(fail, **wrong)
